"""A live state served over HTTP, and pulled from there."""

from torchrelay.endpoint.encoding import Encoding

__all__ = ["Encoding"]
