"""The version of this library; every commit record contains it."""

__version__ = "0.1.0"
