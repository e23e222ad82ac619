"""From what is offered to what is read of each holder, without I/O."""
