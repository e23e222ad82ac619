"""Ranks compare what they hold in common."""
