"""Chunks over data connections, and the threads that move them."""
