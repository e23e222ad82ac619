"""Replicas of torchft's quorums: processes that continue while their ranks change.

The functions run in `Members`. `here.transport` is a `RelayTransport`, `here.seat` the process
group that it is given.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch

from tests.support.members import Member
from tests.support.torchft_files import find_interface
from tests.support.ways import patched, taking
from torchrelay.transports.routes.cuda.handles import Openings

SECONDS = 30.0
ROWS, COLUMNS = 600, 2000


def state_of(value: float, device: str = "cpu") -> dict[str, Any]:
    """A state of one value. No other process can read the tensor with gaps where it lies."""
    gapped = torch.full((ROWS, COLUMNS), value, device=device)[:, ::2]
    return {"gapped": gapped, "whole": torch.full((300_000,), value, device=device), "value": value}


def values_in(state: dict[str, Any]) -> set[float]:
    """All values in a state: one, if it is whole."""
    tensors = [state["gapped"], state["whole"]]
    return {value for one in tensors for value in one.unique().tolist()} | {state["value"]}


class Seat:
    """A torchft process group as its transport sees it: a rank in the quorum of the moment."""

    def __init__(self) -> None:
        self._rank, self._size = 0, 1

    def sit(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


# In the members


def join_transport(here: Any, way: str, verify: Any = True, device: str = "cpu") -> None:
    """Make a `RelayTransport` that takes this way alone, for states on this device."""
    find_interface()
    from torchrelay.integrations.torchft import RelayTransport

    here.taking = contextlib.ExitStack()
    here.taking.enter_context(taking(way))
    here.seat, here.device = Seat(), device
    limit = timedelta(seconds=SECONDS)
    here.transport = RelayTransport(here.seat, limit, device, verify=verify)


def sit(here: Any, rank: int, size: int) -> str:
    here.seat.sit(rank, size)
    metadata: str = here.transport.metadata()
    return metadata


def send(here: Any, to: list[int], step: int, value: float) -> tuple[int, int]:
    """Send to these ranks; returns the bytes that left this process, and those of the state."""
    reports, relay = [], here.transport._relay
    original = relay.send

    def noted(*args: Any, **options: Any) -> Any:
        reports.append(original(*args, **options))
        return reports[-1]

    with patched(relay, send=noted):
        state = state_of(value, here.device)
        here.transport.send_checkpoint(to, step, state, timedelta(seconds=SECONDS))
    return reports[0].traffic.bytes, reports[0].bytes


def buffers_here(here: Any, count: int) -> int:
    """The number of other processes' buffers that are mapped here; waits until it is `count`."""
    ends = time.monotonic() + SECONDS
    while True:
        with open("/proc/self/maps") as maps:
            found = sum("memfd:torchrelay-arena" in line for line in maps)
        if found == count or time.monotonic() > ends:
            return found
        time.sleep(0.01)


def openings_here(here: Any) -> int:
    """The number of other processes' allocations on a GPU that are open here."""
    return len(here.transport._relay._resources.of(Openings)._open)


def openings_end(here: Any) -> bool:
    """Wait until none is open; False if one stays."""
    ends = time.monotonic() + SECONDS
    while openings_here(here) and time.monotonic() < ends:
        time.sleep(0.01)
    return not openings_here(here)


def receive(here: Any, source: int, metadata: str, step: int) -> set[float]:
    """Receive; returns the values that came. `here.report` is the report."""
    relay = here.transport._relay
    original = relay.recv

    def noted(*args: Any, **options: Any) -> Any:
        got = original(*args, **options)
        here.report = got.report
        return got

    with patched(relay, recv=noted):
        got = here.transport.recv_checkpoint(source, metadata, step, timedelta(seconds=SECONDS))
    return values_in(got)


def was_verified(here: Any) -> bool:
    """Whether digests of the last state that was received were compared."""
    return bool(here.report.verified)


# In the test


def recover(sender: Member, receiver: Member, step: int, value: float) -> set[float]:
    """A quorum of two, whose rank 0 sends to its rank 1; what came of it there."""
    _, (found,) = recover_all([sender, receiver], step, value)
    return found


def recover_all(
    members: list[Member], step: int, value: float
) -> tuple[tuple[int, int], list[set[float]]]:
    """A quorum of these, in the order of their ranks, whose rank 0 sends to all others: what `send`
    returns, and what came of it in each of them."""
    sender, *receivers = members
    metadata, *_ = [one.call(sit, rank, len(members)) for rank, one in enumerate(members)]
    sender.begin(send, list(range(1, len(members))), step, value)
    for one in receivers:
        one.begin(receive, 0, metadata, step)
    sent = sender.end()
    return sent, [one.end() for one in receivers]
