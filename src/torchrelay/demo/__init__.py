"""A demonstration: four processes on one machine pass a training job's state on.

Run it with `python -m torchrelay.demo` or `torchrelay demo`.
"""
