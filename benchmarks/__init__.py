"""Side by side with torch's own transport: `python -m benchmarks`."""
