"""Programs for developers of this project."""
