"""Pullers that serve what they have to each other."""
