"""Pickles that are read without running them."""
