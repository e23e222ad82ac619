"""Staged steps in the memory of a process that outlives the workers."""
