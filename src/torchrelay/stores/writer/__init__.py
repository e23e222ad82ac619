"""The process that writes staged states. No torch."""
