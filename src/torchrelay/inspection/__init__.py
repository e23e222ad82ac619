"""States looked at: their tensors, statistics and differences. No tensor is read whole."""
