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
from torch.distributed.checkpoint._pg_transport import PGTransport

from torchrelay.options import Verify
from torchrelay.relay import Relay

Who = Literal["torch", "torchrelay"]
Mode = Literal["new tensors", "in place", "in place, atomic=False"]

NEW: Mode = "new tensors"
IN_PLACE: Mode = "in place"
DIRECT: Mode = "in place, atomic=False"

SOURCE = 0
PUSHED = ("tcp", "group")  # routes on which the sender sends; on the others the receiver reads


@dataclass(frozen=True)
class Setup:
    """How a `Relay` is set up; None leaves the choice to it."""

    route: str | None = None
    verify: Verify = True
    pool: int | None = None
    connections: int | None = None


AS_IT_COMES = Setup()


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
    """What a contender hands back: the state (receivers only), and what it tells of the way."""

    state: Any
    phases: dict[str, float]
    route: str = ""
    sent: int = 0  # bytes that this rank sent, not through the group
    read: int = 0  # bytes of the state that this rank took out of another's memory


class Contender(Protocol):
    def rest(self) -> None:
        """Before each lap, not timed."""

    def send(self, state: object, to: Sequence[int]) -> Moved: ...
    def recv(self) -> Moved: ...
    def close(self) -> None: ...


class ByTorch:
    """torch's own class. It has one way to write in place, and does not verify."""

    def __init__(self, group: Counted, into: object, timeout: float) -> None:
        callback = None if into is None else lambda: into
        limit, cpu = timedelta(seconds=timeout), torch.device("cpu")
        # A stand-in for a group: it has the methods that the class calls.
        self._transport = PGTransport(group, limit, cpu, callback)  # type: ignore[arg-type]

    def rest(self) -> None:
        pass

    def send(self, state: object, to: Sequence[int]) -> Moved:
        self._transport.send_checkpoint(list(to), state)
        return Moved(None, {})

    def recv(self) -> Moved:
        return Moved(self._transport.recv_checkpoint(SOURCE), {})

    def close(self) -> None:
        pass


class ByRelay:
    """One `Relay` for all laps, so that its memory is warm."""

    def __init__(
        self, group: Any, into: object, timeout: float, *, atomic: bool, setup: Setup
    ) -> None:
        self._relay = Relay(
            group,
            timeout=timeout,
            route=setup.route,
            verify=setup.verify,
            pool=setup.pool,
            connections=setup.connections,
        )
        self._into = into
        self._atomic = atomic

    def rest(self) -> None:
        pass

    def send(self, state: object, to: Sequence[int]) -> Moved:
        report = self._relay.send(state, to=to)
        sent = report.traffic.bytes if report.route in PUSHED else 0
        return Moved(None, report.seconds, report.route, sent=sent)

    def recv(self) -> Moved:
        got = self._relay.recv(SOURCE, into=self._into, atomic=self._atomic)
        report = got.report
        read = 0 if report.route in PUSHED else report.traffic.bytes
        return Moved(got.state, report.seconds, report.route, read=read)

    def close(self) -> None:
        self._relay.close()


@dataclass(frozen=True)
class Lap:
    """One transfer as one rank saw it."""

    seconds: float
    bytes: int  # that this rank sent
    messages: int  # through the group
    phases: dict[str, float] = field(default_factory=dict)
    route: str = ""
    read: int = 0  # bytes that this rank took out of another's memory
    cpu_seconds: float = 0.0  # of this rank's process, all threads


class Course:
    """Transfers of one kind, run again and again by every rank of a group.

    `state` is what rank 0 sends, and on the others what is written into (None for new tensors).
    """

    def __init__(
        self,
        who: Who | Contender,
        mode: Mode,
        group: Any,
        state: object,
        timeout: float,
        setup: Setup = AS_IT_COMES,
    ) -> None:
        self._group = Counted(group)
        self._state = state
        self._sends = self._group.rank() == SOURCE
        into = None if self._sends or mode == NEW else state
        self._contender: Contender
        if who == "torch":
            self._contender = ByTorch(self._group, into, timeout)
        elif who == "torchrelay":
            atomic = mode != DIRECT
            self._contender = ByRelay(group, into, timeout, atomic=atomic, setup=setup)
        else:
            self._contender = who
        self.received: Any = None

    def lap(self) -> Lap:
        """From a barrier to the moment this rank is done. What came is in `received` after it."""
        self.received = None
        count = self._group
        self._contender.rest()
        bytes_before, messages_before = count.bytes, count.messages
        count.group.barrier().wait()
        begun, worked = time.perf_counter(), time.process_time()
        if self._sends:
            moved = self._contender.send(self._state, range(1, count.size()))
        else:
            moved = self._contender.recv()
        seconds = time.perf_counter() - begun
        self.received = moved.state
        return Lap(
            seconds,
            count.bytes - bytes_before + moved.sent,
            count.messages - messages_before,
            moved.phases,
            moved.route,
            moved.read,
            time.process_time() - worked,
        )

    def close(self) -> None:
        self.received = None
        self._contender.close()
