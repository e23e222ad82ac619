"""Weights that follow a trainer: what an update costs, on one host, over links, in training."""
