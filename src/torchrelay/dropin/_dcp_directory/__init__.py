"""Directories that stock DCP has written."""
