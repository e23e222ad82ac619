"""A rank of a group as the parts of a transfer see it, with what it keeps between calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchrelay.landing.workspace import Workspace
from torchrelay.transports.meeting.node import Node

T = TypeVar("T")


class Resources:
    """Things that take longer to make than most transfers, one of each kind. They are freed when
    the relay is closed. Threads may share it."""

    def __init__(self) -> None:
        self._kept: dict[type[Any], Any] = {}
        self._lock = threading.Lock()

    def of(self, kind: type[T]) -> T:
        """The one of this kind, made when it is first asked for. It has a method `close`."""
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = kind()
            found: T = self._kept[kind]
            return found

    def close(self) -> None:
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        for one in kept:
            one.close()


@dataclass(frozen=True)
class Member:
    """This process in its group."""

    node: Node
    group: Any  # the process group, for device backends
    rank: int
    resources: Resources
    workspace: Workspace

    def buffer(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Host memory for a chunk; `pinned` for copies to and from a GPU. When nothing refers to it
        any more, the workspace keeps it for the next; torch does, if it is pinned."""
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self.workspace.stage(nbytes)
