"""Whether a destination can take what is offered."""
