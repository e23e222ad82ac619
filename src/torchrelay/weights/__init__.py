"""Weights that follow a trainer: other meshes, other names and layouts."""
