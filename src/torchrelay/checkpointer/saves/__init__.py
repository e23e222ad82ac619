"""A save from the caller's state to a committed step, and the last one of a process that ends."""
