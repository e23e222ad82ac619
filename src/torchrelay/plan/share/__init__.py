"""The share that one rank takes of a recorded state."""
