"""Chunks over data connections, and the threads and buffers that they take."""
