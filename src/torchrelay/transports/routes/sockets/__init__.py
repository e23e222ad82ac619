"""TCP connections of the library's own."""
