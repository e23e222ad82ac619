"""Steps in a directory. No torch."""
