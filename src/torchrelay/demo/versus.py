"""One transfer by torch's `PGTransport` or by `Relay`, timed and counted the same way."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import torch

from torchrelay.dropin.stock import PGTransport
from torchrelay.relay import Relay

Who = Literal["torch", "torchrelay"]
Mode = Literal["new tensors", "in place", "in place, atomic=False"]

NEW: Mode = "new tensors"
IN_PLACE: Mode = "in place"
DIRECT: Mode = "in place, atomic=False"

SOURCE = 0


def hush_torch() -> None:
    """Keep the warnings that torch's own class causes within torch off the screen."""
    warnings.filterwarnings("ignore", module=re.escape(PGTransport.__module__))


class Counted:
    """A process group that counts what is sent through it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.bytes = 0
        self.messages = 0
        self._lock = threading.Lock()  # a relay sends from several threads

    def rank(self) -> int:
        return int(self.group.rank())

    def size(self) -> int:
        return int(self.group.size())

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        with self._lock:
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            self.messages += 1
        return self.group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self.group.recv(tensors, src, tag)


class Moved(NamedTuple):
    """What a contender hands back: the state (receivers only), and seconds by phase."""

    state: Any
    phases: dict[str, float]


class Contender(Protocol):
    def send(self, state: object, to: Sequence[int]) -> Moved: ...
    def recv(self) -> Moved: ...


class ByTorch:
    """torch's own class. It has one way to write in place, and does not verify."""

    def __init__(self, group: Counted, into: object, timeout: float) -> None:
        callback = None if into is None else lambda: into
        limit, cpu = timedelta(seconds=timeout), torch.device("cpu")
        # A stand-in for a group: it has the methods that the class calls.
        self._transport = PGTransport(group, limit, cpu, callback)  # type: ignore[arg-type]

    def send(self, state: object, to: Sequence[int]) -> Moved:
        self._transport.send_checkpoint(list(to), state)
        return Moved(None, {})

    def recv(self) -> Moved:
        return Moved(self._transport.recv_checkpoint(SOURCE), {})


class ByRelay:
    """`Relay` with its defaults: digests on, old or new weights unless `atomic` says otherwise."""

    def __init__(self, group: Counted, into: object, timeout: float, *, atomic: bool) -> None:
        self._relay = Relay(group, timeout=timeout)
        self._into = into
        self._atomic = atomic

    def send(self, state: object, to: Sequence[int]) -> Moved:
        return Moved(None, self._relay.send(state, to=to).seconds)

    def recv(self) -> Moved:
        got = self._relay.recv(SOURCE, into=self._into, atomic=self._atomic)
        return Moved(got.state, got.report.seconds)


@dataclass(frozen=True)
class Lap:
    """One transfer as one rank saw it."""

    seconds: float
    bytes: int  # that this rank sent
    messages: int
    phases: dict[str, float] = field(default_factory=dict)


class Course:
    """Transfers of one kind, run again and again by every rank of a group.

    `state` is what rank 0 sends, and on the others what is written into (None for new tensors).
    """

    def __init__(self, who: Who, mode: Mode, group: Any, state: object, timeout: float) -> None:
        self._group = Counted(group)
        self._state = state
        self._sends = self._group.rank() == SOURCE
        into = None if self._sends or mode == NEW else state
        self._contender: Contender
        if who == "torch":
            self._contender = ByTorch(self._group, into, timeout)
        else:
            self._contender = ByRelay(self._group, into, timeout, atomic=mode != DIRECT)
        self.received: Any = None

    def lap(self) -> Lap:
        """From a barrier to the moment this rank is done. What came is in `received` after it."""
        self.received = None
        count = self._group
        bytes_before, messages_before = count.bytes, count.messages
        count.group.barrier().wait()
        begun = time.perf_counter()
        if self._sends:
            moved = self._contender.send(self._state, range(1, count.size()))
        else:
            moved = self._contender.recv()
        seconds = time.perf_counter() - begun
        self.received = moved.state
        return Lap(
            seconds, count.bytes - bytes_before, count.messages - messages_before, moved.phases
        )
