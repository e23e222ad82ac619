"""`PGTransport` under torch's own name and signature, on the relay protocol or torch's."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import Work

from torchrelay.coordination.groups import check_group, current_group
from torchrelay.deadlines import TICK, Deadline, seconds_of
from torchrelay.dropin import torch_private as private
from torchrelay.dropin._torch_wire import LENGTH_TAG, Wait, recv_torch, send_torch
from torchrelay.errors import PeerLostError, TransferTimeoutError, UsageError
from torchrelay.landing.options import LandingOptions
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.uninterrupted import hurried
from torchrelay.relay import Relay
from torchrelay.state.torch_private import device_backends
from torchrelay.system import needs_linux
from torchrelay.transports.c10d import watch
from torchrelay.transports.meeting.directory import directory_of
from torchrelay.transports.protocol.options import ReceiveOptions, TransferCall

PARTING_SECONDS = 10.0  # that a transfer of torch's protocol has after an interrupt

logger: logging.Logger = logging.getLogger(__name__)


class PGTransport:
    """Sends a state dict over a process group, so that a worker recovers from a live one.

    Args:
        pg: the process group to use for communication
        timeout: bounds each call as a whole
        device: where tensors are placed that have no in-place destination; with
            `protocol="torch"` also the device that messages are sent from
        state_dict: if given, called to get the state that is received into, in place
        protocol: "relay", or "torch" to send to ranks that run torch's own class. With "relay",
            `recv_checkpoint` also understands a sender that runs torch's class, if that rank has
            no `Relay` on the group. "relay" needs the group's store, "torch" does not.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device,
        state_dict: Callable[[], object] | None = None,
        *,
        protocol: Literal["relay", "torch"] = "relay",
    ) -> None:
        needs_linux("PGTransport")
        if protocol not in ("relay", "torch"):
            raise UsageError(f'protocol is "relay" or "torch", not {protocol!r}')
        check_group(pg)
        self._pg = pg
        self._timeout = seconds_of(timeout)
        self._device = torch.device(device)
        self._state_dict = state_dict
        self._relay = Relay(pg, timeout=self._timeout) if protocol == "relay" else None

    @property
    def _group(self) -> Any:
        """The group of the moment: torchft's have another one behind them after each quorum."""
        return current_group(self._pg)

    def send_checkpoint(self, dst_ranks: list[int], state_dict: object) -> None:
        """Send a state dict to each rank in `dst_ranks`.

        A rank that is absent or dies does not keep the others from getting it; it is named in the
        error that is raised at the end.
        """
        if self._relay is None:
            self._send_torch(dst_ranks, state_dict)
            return
        report = self._relay.send(state_dict, dst_ranks)
        lost = {**report.failed, **report.unknown}
        if lost:
            rank, reason = next(iter(lost.items()))
            raise PeerLostError(
                f"not every rank is known to have the checkpoint: rank {rank} {reason} "
                f"(failed: {sorted(report.failed)}, unknown: {sorted(report.unknown)}, "
                f"got it: {list(report.receivers)})",
                rank=int(rank),
            )

    def recv_checkpoint(self, src_rank: int) -> object:
        """Receive the state dict that `src_rank` sends, in either protocol.

        With a `state_dict` callback the tensors it returns are written in place once everything
        has arrived and holds; leaves that it lacks are new. Without it all tensors are, on the CPU.
        """
        into = self._state_dict() if self._state_dict is not None else None
        deadline = Deadline(self._timeout)
        if self._relay is None or self._comes_from_torch(src_rank, deadline):
            return self._recv_torch(src_rank, into, deadline)
        landing = LandingOptions(
            strict=False,
            device=torch.device("cpu"),
            shards="replica",
            make_missing=True,
            rank=self._relay.rank,
        )
        options = ReceiveOptions(into, landing=landing)
        call = TransferCall(Deadline(max(deadline.left(), 0.001)))
        got = self._relay.receive([src_rank], options, call)
        if got.report.unexpected_keys or got.report.missing_keys:
            logger.warning(
                "checkpoint and destination differ: created %s, left as they were %s",
                list(got.report.unexpected_keys),
                list(got.report.missing_keys),
            )
        return got.state

    # torch's own protocol. It cannot be called off, and a transfer that is left midway is mistaken
    # for the beginning of the next: an interrupted call has some time to end as it should.

    def _send_torch(self, dst_ranks: list[int], state_dict: object) -> None:
        settle()
        deadline = Deadline(self._timeout)
        group = self._group
        wait = _waiter(group, deadline)
        hurried(
            lambda: send_torch(group, dst_ranks, state_dict, self._device, wait),
            hurry=lambda: deadline.hasten(PARTING_SECONDS),
        )

    def _recv_torch(self, src_rank: int, into: object, deadline: Deadline) -> object:
        settle()
        leaves = None if into is None else dict(private.tree_flatten_with_path(into)[0])
        group = self._group
        wait = _waiter(group, deadline)

        def receive() -> object:
            first = self._first(group, src_rank)
            first.wait(deadline, "at the start", phase="join")
            del _firsts[group][src_rank]
            length = int(first.tensor.item())
            return recv_torch(group, src_rank, length, self._device, wait, leaves)

        return hurried(receive, hurry=lambda: deadline.hasten(PARTING_SECONDS))

    def _first(self, group: Any, src_rank: int) -> _Posted:
        """The first message of a torch sender. A receive that was posted for it cannot be taken
        back, so it serves the next call on the group."""
        firsts = _firsts.setdefault(group, {})
        if src_rank not in firsts:
            device = self._device if _is_device_only(group) else torch.device("cpu")
            length = torch.zeros(1, dtype=torch.int64, device=device)
            work = group.recv([length], src_rank, LENGTH_TAG)
            firsts[src_rank] = _Posted(group, work, length)
        return firsts[src_rank]

    def _comes_from_torch(self, src_rank: int, deadline: Deadline) -> bool:
        """Whether the next checkpoint comes by torch's protocol. Waits until that shows: a rank
        with a `Relay` has published where it listens."""
        group = self._group
        directory = directory_of(group)
        first = _firsts.get(group, {}).get(src_rank)
        if first is None and not directory.knows(src_rank) and not _is_device_only(group):
            first = self._first(group, src_rank)
        while first is not None and not directory.knows(src_rank):
            if first.over.wait(min(TICK, deadline.left())):
                return True
            if deadline.passed:
                raise TransferTimeoutError(
                    f"timed out: nothing came from rank {src_rank} within {deadline.seconds:.3g} s",
                    rank=src_rank,
                    phase="join",
                )
        return first is not None and first.here


class _Posted:
    """An operation that was posted on a group; its memory is not touched until it has ended."""

    def __init__(self, pg: Any, work: Work, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.over = threading.Event()
        self._fault: Exception | None = None
        watch(pg, work, tensor, self._report)

    def _report(self, fault: Exception | None) -> None:
        self._fault = fault
        self.over.set()

    @property
    def here(self) -> bool:
        return self.over.is_set() and self._fault is None

    def wait(self, deadline: Deadline, when: str, phase: str) -> None:
        while not self.over.wait(min(deadline.left(), TICK)):
            if deadline.passed:
                raise TransferTimeoutError(
                    f"timed out after {deadline.seconds:.3g} s {when}", phase=phase
                )
        if self._fault is not None:
            raise PeerLostError(f"connection lost {when}: {self._fault}", phase=phase)


# The receives that are posted for the first message of a torch sender, by group and rank.
_firsts: weakref.WeakKeyDictionary[Any, dict[int, _Posted]] = weakref.WeakKeyDictionary()


def _is_device_only(group: Any) -> bool:
    """Whether the backend cannot move host memory."""
    backends = device_backends(group)
    return bool(backends) and "cpu" not in backends and "gloo" not in backends.values()


def _waiter(pg: Any, deadline: Deadline) -> Wait:
    none = torch.empty(0, device="cpu")
    return lambda work, when: _Posted(pg, work, none).wait(deadline, when, phase="data")
