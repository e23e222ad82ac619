"""Live state between ranks of a process group: `Relay.send` and `Relay.recv`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchrelay.errors import (
    PeerRefusedError,
    RemoteProtocolError,
    StateError,
    StepMismatchError,
    UsageError,
)
from torchrelay.state.landing import land
from torchrelay.state.prepared import prepare
from torchrelay.state.snapshot import capture
from torchrelay.transports import wire
from torchrelay.transports.buffers import BufferPool
from torchrelay.transports.clock import Deadline, Stopwatch
from torchrelay.transports.group import Post, post_of
from torchrelay.transports.receiver import Receiving, answer
from torchrelay.transports.sender import Sending

ProgressCallback = Callable[["Progress"], None]


class Progress(NamedTuple):
    """Bytes of the state that have gone out or come in, of all."""

    done: int
    total: int


@dataclass(frozen=True)
class Report:
    """How a transfer went, as this rank saw it."""

    step: int | None
    bytes: int  # of the state itself
    wire_bytes: int  # that this rank sent (sender) or received (receiver) as data
    messages: int  # that carried data
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    route: str = "group"
    receivers: tuple[int, ...] = ()  # that have the state
    failed: dict[int, str] = field(default_factory=dict)  # rank: why it has not
    rerouted: tuple[int, ...] = ()  # served directly after their upstream was lost
    missing: tuple[str, ...] = ()  # offered, not in the destination (strict=False)
    extra: tuple[str, ...] = ()  # in the destination, not offered (strict=False)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


class Received(NamedTuple):
    """What `recv` returns: the state, its step, and the report."""

    state: Any
    step: int | None
    report: Report


class Relay:
    """Moves states between ranks of a process group. Ranks are ranks of that group.

    Any backend of torch serves. Where it moves host memory (gloo), GPU states are staged there;
    a backend of the device itself (nccl, xccl) moves them from device to device. `timeout` bounds
    each call. With several receivers `join_window` is how long the first to come wait for the
    others, and how long a receiver may make no progress before the others go on without it.

    Calls from several threads at once are fine. The relay keeps its transfer buffers (at most
    `IN_FLIGHT` chunks each way, `BufferPool.limit` in all) until `close`.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        timeout: float = 300.0,
        join_window: float = 10.0,
        chunk_bytes: int | None = None,
        verify: bool = True,
    ) -> None:
        if group is None:
            if not dist.is_initialized():
                raise UsageError("no group given, and torch.distributed is not initialized")
            group = dist.group.WORLD
        if join_window <= 0:
            raise UsageError(f"join_window is a positive number of seconds, not {join_window}")
        if chunk_bytes is not None and chunk_bytes < 1:
            raise UsageError(f"chunk_bytes is a positive number, not {chunk_bytes}")
        Deadline(timeout)
        self._group = group
        self._post: Post = post_of(group)
        self._timeout = timeout
        self._join_window = join_window
        self._chunk_bytes = chunk_bytes
        self._verify = verify
        self._buffers = BufferPool()
        self._closed = False

    @property
    def rank(self) -> int:
        return self._post.group.rank()

    def send(
        self,
        state: object,
        to: int | Iterable[int],
        *,
        step: int | None = None,
        timeout: float | None = None,
        join_timeout: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> Report:
        """Send a state to one or several ranks; returns when each has it or has failed.

        The state must not change until this returns. Receivers that are absent, late or lost are
        named in `report.failed` and do not keep the others from getting it. Raises where no
        receiver got it, and where one refused it: `PeerRefusedError` or `StepMismatchError`, with
        `report` telling how the others fared. `timeout` bounds the whole call; `join_timeout` is
        how long to wait for the first receiver to come, if less than that.
        """
        ranks = self._receivers(to)
        _check_step(step)
        deadline = Deadline(self._timeout if timeout is None else timeout)
        watch = Stopwatch()
        with watch("capture"):
            snapshot = capture(state, step, receivers=len(ranks), chunk_bytes=self._chunk_bytes)
        sending = Sending(
            self._post,
            snapshot,
            ranks,
            deadline=deadline,
            window=self._join_window,
            join_timeout=deadline.seconds if join_timeout is None else join_timeout,
            verify=self._verify,
            buffers=self._buffers,
            watch=watch,
            progress=_reporter(progress),
        )

        def report() -> Report:
            peers = sending.peers.values()
            return Report(
                step=step,
                bytes=snapshot.manifest.nbytes,
                wire_bytes=sending.wire_bytes,
                messages=sending.messages,
                seconds=watch.seconds,
                receivers=tuple(peer.rank for peer in peers if peer.stage == "done"),
                failed={peer.rank: peer.reason for peer in peers if peer.stage != "done"},
                rerouted=tuple(sending.rerouted),
            )

        try:
            sending.run()
        except (PeerRefusedError, StepMismatchError) as fault:
            fault.report = report()
            raise
        return report()

    def recv(
        self,
        source: int,
        *,
        into: object = None,
        step: int | None = None,
        strict: bool = True,
        atomic: bool = True,
        device: torch.device | str | None = None,
        timeout: float | None = None,
        progress: ProgressCallback | None = None,
    ) -> Received:
        """Receive the state that rank `source` sends.

        `into=None` makes new tensors, on `device` or on the kind of device they come from.
        With `into` its tensors are written in place, by path, whatever their strides or device;
        dtype, shape and placement must agree, and with `strict` the paths too. `atomic=True`
        stages the state and writes it once it is whole and verified; `atomic=False` writes as bytes
        arrive and raises `TornStateError` if it cannot finish. `step` refuses any other step.
        """
        deadline = Deadline(self._timeout if timeout is None else timeout)
        self._check_rank(source)
        _check_step(step)
        watch = Stopwatch()
        with watch("prepare"):
            into = prepared(into)
        with self._post.trading.call(source):
            with watch("call"):
                transfer = wire.read_prelude(answer(self._post, source, deadline))
            if transfer is None:
                raise RemoteProtocolError(
                    "the sender is torch's PGTransport: receive with torchrelay.dropin.PGTransport",
                    rank=source,
                )
            return self.receive_from(
                source,
                transfer,
                deadline,
                watch,
                into=into,
                step=step,
                strict=strict,
                atomic=atomic,
                device=device,
                progress=progress,
            )

    def receive_from(
        self,
        source: int,
        transfer: int,
        deadline: Deadline,
        watch: Stopwatch,
        *,
        into: object,
        step: int | None,
        strict: bool,
        atomic: bool,
        device: torch.device | str | None,
        progress: ProgressCallback | None,
        make_missing: bool = False,
    ) -> Received:
        """The rest of `recv`, after a sender's first message has been read."""
        where = None if device is None else torch.device(device)
        receiving = Receiving(
            self._post,
            source,
            transfer,
            step=step,
            land=lambda manifest: land(
                manifest,
                into=into,
                strict=strict,
                atomic=atomic,
                device=where,
                rank=self.rank,
                make_missing=make_missing,
            ),
            deadline=deadline,
            buffers=self._buffers,
            watch=watch,
            progress=_reporter(progress),
        )
        landed = receiving.run()
        manifest, intake = receiving.manifest, receiving.intake
        assert manifest is not None and intake is not None
        report = Report(
            step=manifest.step,
            bytes=manifest.nbytes,
            wire_bytes=intake.wire_bytes,
            messages=intake.messages,
            seconds=watch.seconds,
            receivers=(self.rank,),
            missing=tuple(landed.missing),
            extra=tuple(landed.extra),
        )
        return Received(landed.state, manifest.step, report)

    def close(self) -> None:
        """Free the transfer buffers. The group itself is the caller's."""
        self._closed = True
        self._buffers.clear()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _receivers(self, to: int | Iterable[int]) -> list[int]:
        ranks = [to] if isinstance(to, int) else list(to)
        for rank in ranks:
            self._check_rank(rank)
        if len(set(ranks)) != len(ranks):
            raise UsageError(f"a rank stands twice in {ranks}")
        return ranks

    def _check_rank(self, rank: int) -> None:
        if self._closed:
            raise UsageError("this relay is closed")
        size = self._post.group.size()
        if type(rank) is not int or not 0 <= rank < size:
            raise UsageError(f"rank {rank!r} is not in a group of {size}")
        if rank == self.rank:
            raise UsageError(f"rank {rank} is this rank itself")


def _check_step(step: object) -> None:
    if step is not None and (type(step) is not int or not 0 <= step < 1 << 62):
        raise UsageError(f"step is a whole number from 0, not {step!r}")


def prepared(into: object) -> object:
    """What can be known of a destination before a sender has come."""
    try:
        return None if into is None else prepare(into)
    except StateError:
        return into  # refused when it is offered a state, so that the sender hears of it


def _reporter(progress: ProgressCallback | None) -> Callable[[int, int], None]:
    if progress is None:
        return lambda done, total: None
    return lambda done, total: progress(Progress(done, total))
