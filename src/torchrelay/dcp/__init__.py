"""Steps of torchrelay behind torch's own DCP calls: `Writer` and `Reader`."""

from torchrelay.dcp.storage import Reader, Writer

__all__ = ["Reader", "Writer"]
