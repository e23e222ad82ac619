"""A live state served over HTTP, and pulled from there."""
