"""Stores of steps: a directory or a bucket; how a step is written, opened and read."""
