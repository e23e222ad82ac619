"""Chunks on their way out and in."""
