"""The keeper's own process. No torch."""
