"""The version of this library. It stands in every commit record."""

__version__ = "0.1.0"
