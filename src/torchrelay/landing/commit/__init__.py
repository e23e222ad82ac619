"""The end of a landing: objects take their states, tensors are written, or all is as it was."""
