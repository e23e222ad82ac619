"""A step of any source becomes a state: planned, checked and landed on all ranks together."""
