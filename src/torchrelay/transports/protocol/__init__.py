"""The messages of a transfer, and its two sides."""
