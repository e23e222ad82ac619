"""A rank of a group as the parts of a transfer see it, with what it keeps between calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from torchrelay.landing.workspace import Workspace
from torchrelay.transports.meeting.departures import Departures
from torchrelay.transports.meeting.node import Meeting, Node


class Resource:
    """Something that takes longer to make than most transfers, and is kept between them.

    A resource that belongs to another process is kept by the id of that process (`Identity.node`).
    A rank is no such id: it may be another process in the next transfer.
    """

    def forget(self, process: bytes) -> None:
        """Free what is of this process and not in use, or is in use no more: it has ended."""

    def close(self) -> None:
        """Free everything that is not in use."""


T = TypeVar("T", bound=Resource)


class Resources:
    """Resources, one of each kind. They are freed when the relay is closed. Threads may share
    it."""

    def __init__(self) -> None:
        self._kept: dict[type[Resource], Resource] = {}
        self._lock = threading.Lock()
        self._departures = Departures(self._forget)

    def of(self, kind: type[T]) -> T:
        """The one of this kind, made when it is first asked for."""
        with self._lock:
            if kind not in self._kept:
                self._kept[kind] = kind()
            found = self._kept[kind]
            assert isinstance(found, kind)
            return found

    def watch(self, process: bytes, pid: int) -> None:
        """Free what is kept of a process of this machine when it ends: see `Departures.watch`."""
        self._departures.watch(process, pid)

    def settle(self, process: bytes, *, arrived: bool) -> None:
        """A transfer from a process is over: nothing is kept of one that has ended meanwhile. Nor
        if the state has not `arrived`: memory that may be the cause is not used again."""
        if not arrived or not self._departures.watches(process):
            self._forget(process)

    def _forget(self, process: bytes) -> None:
        with self._lock:
            kept = list(self._kept.values())
        for one in kept:
            one.forget(process)

    def close(self) -> None:
        self._departures.close()
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        for one in kept:
            one.close()


@dataclass(frozen=True)
class Member:
    """This process in its group."""

    meeting: Meeting
    group: Any  # the process group, for device backends
    rank: int
    resources: Resources
    workspace: Workspace

    @property
    def node(self) -> Node:
        return self.meeting.node

    def buffer(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Host memory for a chunk; `pinned` for copies to and from a GPU. When nothing refers to it
        any more, the workspace keeps it for the next; torch does, if it is pinned."""
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self.workspace.stage(nbytes)
