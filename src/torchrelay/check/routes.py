"""Every route between two ranks: whether it works, whether the bytes are exact, and how fast it is
next to what the hardware allows."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.check.ranks import Ranks
from torchrelay.check.report import Finding
from torchrelay.errors import RelayError
from torchrelay.memory.vectors import OtherMemoryError, read_bytes
from torchrelay.relay import Relay
from torchrelay.transports.routes.choice import ALWAYS

AREA = "routes"
NBYTES = 64 << 20
CALL_SECONDS = 20.0
SLOW_FACTOR = 10  # times below the limit is slow: the library's own cost is well within it ...
FIXED_SECONDS = 0.5  # ... and this much more may pass on a machine that does other things, too
TIMES = 3
HOST_ROUTES = ("memory", "tcp")
GPU_ROUTES = ("cuda_ipc", "memory", "tcp")
_SECRET = 32
_FACTOR = 0x9E3779B1  # of a pattern whose words all differ


def pattern(nbytes: int, device: str) -> torch.Tensor:
    """Bytes that both ends can make."""
    words = torch.arange(nbytes // 8, dtype=torch.int64, device=device)
    return words * _FACTOR


def copy_speed(nbytes: int, device: str) -> float:
    """Bytes a second of a copy within this process: no route can be faster."""
    source = pattern(nbytes, device)
    into = torch.empty_like(source)
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        into.copy_(source)
        _wait_for_device(device)
        best = max(best, nbytes / (time.perf_counter() - begin))
    return best


def transfer(
    group: Any, route: str, device: str, nbytes: int, rank: int | None = None
) -> dict[str, Any]:
    """Move a state by one route between the two ranks of a group, some times; both call this.

    The receiver's facts have `exact`, `seconds` and `speed` of the fastest time; of a route that is
    not available, `why`.
    """
    rank = group.rank() if rank is None else rank
    state = pattern(nbytes, device) if rank == 0 else torch.zeros(nbytes // 8, dtype=torch.int64)
    state = state.to(device)
    seconds = inf
    try:
        with Relay(group, timeout=CALL_SECONDS, route=route, pool=0) as relay:
            for _ in range(TIMES):
                begin = time.perf_counter()
                if rank == 0:
                    relay.send({"x": state}, to=1)
                else:
                    relay.recv(0, into={"x": state})
                seconds = min(seconds, time.perf_counter() - begin)
    except RelayError as fault:
        return {"why": str(fault)}
    if rank == 0:
        return {}
    exact = torch.equal(state, pattern(nbytes, device))
    return {"exact": exact, "seconds": seconds, "speed": nbytes / seconds}


def reads_memory(ranks: Ranks, name: str, pair: tuple[int, int]) -> str | None:
    """Why the second rank of a pair cannot read the first one's memory; empty if it can. None on
    ranks that are not the second. Every rank calls this."""
    secret = ctypes.create_string_buffer(os.urandom(_SECRET), _SECRET)
    mine = [os.getpid(), ctypes.addressof(secret), secret.raw.hex()]
    others = ranks.gather(f"{name}/memory", mine if ranks.rank == pair[0] else None, CALL_SECONDS)
    try:
        if ranks.rank != pair[1] or others[pair[0]] is None:
            return None
        pid, address, shown = others[pair[0]]
        try:
            found = read_bytes(pid, address, _SECRET)
        except OtherMemoryError as fault:
            return str(fault)
        return "" if found.hex() == shown else "its number is that of another process here"
    finally:
        ranks.gather(f"{name}/memory-read", True, CALL_SECONDS)  # the secret lives until then


def judge_memory(subject: str, why: str) -> Finding:
    """A row about reading another process's memory."""
    if not why:
        return Finding(AREA, subject, "ok", "memory of another process can be read")
    return Finding(
        AREA,
        subject,
        "slow",
        f"memory of another process cannot be read: {why}",
        "states go through a ring of shared memory, in two copies: for one copy, run both ranks "
        "in one container with the capability SYS_PTRACE, or set kernel.yama.ptrace_scope=0",
    )


def judge(
    subject: str, found: Mapping[str, Mapping[str, Any]], limits: Mapping[str, float]
) -> list[Finding]:
    """Rows of one pair, by route. `limits` has the limit of a route in bytes a second."""
    rows = []
    for route, facts in found.items():
        shown = f"{subject}, {route}"
        if "why" in facts:
            rows.append(_unavailable(shown, route, facts["why"]))
            continue
        speed, limit = facts["speed"], limits.get(route)
        text = f"exact, {_speed(speed)}" + (f", limit {_speed(limit)}" if limit else "")
        if not facts["exact"]:
            rows.append(
                Finding(
                    AREA,
                    shown,
                    "problem",
                    "the bytes that arrived are not those that were sent",
                    "run both hosts through a memory test, and name a route with verify='all'",
                )
            )
        elif limit and speed * SLOW_FACTOR < limit and facts["seconds"] > FIXED_SECONDS:
            rows.append(
                Finding(AREA, shown, "slow", text, "is this machine busy? run the check again")
            )
        else:
            rows.append(Finding(AREA, shown, "ok", text))
    return rows


def _unavailable(shown: str, route: str, why: str) -> Finding:
    # One route is a promise; the others are taken where the machine has what they need.
    if route == ALWAYS.name:
        remedy = "open the firewall between these ranks"
        return Finding(AREA, shown, "problem", f"does not work: {why}", remedy)
    return Finding(AREA, shown, "ok", f"not available: {why}")


def _speed(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _wait_for_device(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def routes_here(device: str) -> Sequence[str]:
    """The routes to try for a state on a device."""
    return HOST_ROUTES if device == "cpu" else GPU_ROUTES


def broadcast_speed(group: Any, nbytes: int, device: str) -> float:
    """Bytes a second of the backend's own broadcast to the ranks of a group."""
    tensor = pattern(nbytes, device)
    seconds = 0.0
    for _ in range(3):
        _wait_for_device(device)
        begin = time.perf_counter()
        dist.broadcast(tensor, group=group, group_src=0)
        _wait_for_device(device)
        seconds = time.perf_counter() - begin
    return nbytes / seconds
