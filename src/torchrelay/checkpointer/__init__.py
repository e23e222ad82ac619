"""Durable state: saves and loads of a job's steps."""

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.checkpointer.keep import Keep, KeepAll, KeepEvery, KeepLast
from torchrelay.checkpointer.loader import Loaded, LoadReport
from torchrelay.checkpointer.pending import Pending, Saved

__all__ = [
    "Checkpointer",
    "Keep",
    "KeepAll",
    "KeepEvery",
    "KeepLast",
    "LoadReport",
    "Loaded",
    "Pending",
    "Saved",
]
