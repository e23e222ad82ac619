"""Ranks that decide together through the store of their process group."""
