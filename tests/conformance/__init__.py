"""Every door with every kind of training job on every number of ranks: see `matrix`."""
