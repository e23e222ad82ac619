"""The process that serves a staged state. No torch."""
