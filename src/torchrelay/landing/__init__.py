"""From bytes to the caller's tensors and objects: old or new, never between."""
