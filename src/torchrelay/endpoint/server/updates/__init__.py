"""What changed from step to step, for subscribers that read parts. No torch."""
