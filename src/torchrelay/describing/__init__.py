"""From live tensors to records and runs of bytes."""
