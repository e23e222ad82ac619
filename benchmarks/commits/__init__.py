"""Two commits of this repository side by side: `python -m benchmarks.commits BEFORE [AFTER]`."""
