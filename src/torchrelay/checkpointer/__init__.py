"""Durable state: saves and loads of a job's steps."""

from torchrelay.checkpointer.front import Checkpointer
from torchrelay.checkpointer.keep import Keep, KeepAll, KeepBest, KeepEvery, KeepLast
from torchrelay.checkpointer.mirror import Mirror

__all__ = [
    "Checkpointer",
    "Keep",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Mirror",
]
