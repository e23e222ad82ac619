"""`PGTransport` under torch's own name and signature, on the relay protocol or torch's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import Work
from torch.utils._pytree import tree_flatten_with_path

from torchrelay.deadlines import TICK, Deadline, seconds_of
from torchrelay.dropin._torch_wire import recv_torch, send_torch
from torchrelay.errors import PeerLostError, TransferTimeoutError, UsageError
from torchrelay.memory.gpu.side import settle
from torchrelay.relay import Relay
from torchrelay.transports.group.c10d import Watcher
from torchrelay.transports.group.lines import FirstMessage, lines_of
from torchrelay.transports.group.shield import shielded
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.options import ReceiveTarget, TransferCall
from torchrelay.transports.protocol.receiver import answer

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
        protocol: what `send_checkpoint` speaks: "relay", or "torch" for receivers that run torch's
            own class. `recv_checkpoint` understands both.
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
        if protocol not in ("relay", "torch"):
            raise UsageError(f'protocol is "relay" or "torch", not {protocol!r}')
        self._pg = pg
        self._timeout = seconds_of(timeout)
        self._device = torch.device(device)
        self._state_dict = state_dict
        self._protocol = protocol
        self._relay = Relay(pg, timeout=self._timeout)

    def send_checkpoint(self, dst_ranks: list[int], state_dict: object) -> None:
        """Send a state dict to each rank in `dst_ranks`.

        A rank that is absent or dies does not keep the others from getting it; it is named in the
        error that is raised at the end.
        """
        if self._protocol == "torch":
            settle()
            deadline = Deadline(self._timeout)
            wait = _waiter(deadline)
            shielded(
                deadline, lambda: send_torch(self._pg, dst_ranks, state_dict, self._device, wait)
            )
            return
        report = self._relay.send(state_dict, dst_ranks)
        lost = {**report.failed, **report.unknown}
        if lost:
            rank, reason = next(iter(lost.items()))
            raise PeerLostError(
                f"not every rank is known to have the checkpoint: rank {rank} {reason} "
                f"(failed: {sorted(report.failed)}, unknown: {sorted(report.unknown)}, "
                f"got it: {list(report.receivers)})",
                rank=rank,
            )

    def recv_checkpoint(self, src_rank: int) -> object:
        """Receive the state dict that `src_rank` sends, in either protocol.

        With a `state_dict` callback the tensors it returns are written in place once everything
        has arrived and holds; what it lacks is made anew. Without it tensors are new, on the CPU.
        """
        into = self._state_dict() if self._state_dict is not None else None
        settle()
        deadline = Deadline(self._timeout)
        return shielded(deadline, lambda: self._recv(src_rank, into, deadline))

    def _recv(self, src_rank: int, into: object, deadline: Deadline) -> object:
        group_lines, wait = lines_of(self._pg), _waiter(deadline)
        ready = self._relay.prepared(into)
        if group_lines.device_only and self._protocol == "torch":
            # Without host memory our first message comes by another way than torch's; no telling.
            number = torch.zeros(1, dtype=torch.int64, device=self._device)
            wait(self._pg.recv([number], src_rank, wire.PRELUDE_TAG), "at the start")
            first = int(number.item())
        else:
            first = answer(group_lines, src_rank, deadline)
        transfer = wire.read_prelude(first)
        if transfer is None:
            try:
                leaves = None if into is None else dict(tree_flatten_with_path(into)[0])
            except BaseException:
                group_lines.keep_first_message(
                    src_rank, FirstMessage(first)
                )  # nothing of the transfer was used
                raise
            return recv_torch(self._pg, src_rank, first, self._device, wait, leaves)
        target = ReceiveTarget(
            ready, strict=False, device=torch.device("cpu"), shards="replica", make_missing=True
        )
        got = self._relay.receive_from(src_rank, transfer, TransferCall(deadline), target)
        if got.report.missing or got.report.extra:
            logger.warning(
                "checkpoint and destination differ: made anew %s, left as they were %s",
                list(got.report.missing),
                list(got.report.extra),
            )
        return got.state


def _waiter(deadline: Deadline) -> Callable[[Work, str], None]:
    """Waits for a posted operation until the deadline, leaving the group alone if it passes.

    torch's protocol has no word for giving up, and a transfer that is left midway is taken for the
    beginning of the next. So a call that is interrupted has some time to end as it should.
    """
    ends = time.monotonic() + deadline.seconds

    def left() -> float:
        nonlocal ends
        if deadline.cancelled:
            ends = min(ends, time.monotonic() + PARTING_SECONDS)
        return max(0.0, ends - time.monotonic())

    def wait(work: Work, what: str) -> None:
        over = threading.Event()
        faults: list[Exception] = []

        def report(fault: Exception | None) -> None:
            if fault is not None:
                faults.append(fault)
            over.set()

        watcher = Watcher("torch")
        watcher.watch(work, torch.empty(0, device="cpu"), report)
        watcher.close()
        while not over.wait(min(left(), TICK)):
            if not left():
                raise TransferTimeoutError(
                    f"timed out after {deadline.seconds:.3g} s {what}", phase="data"
                )
        if faults:
            raise PeerLostError(f"connection lost {what}: {faults[0]}", phase="data")

    return wait
