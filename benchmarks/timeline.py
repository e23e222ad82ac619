"""What the two processes of one transfer do when: `python -m benchmarks.timeline [--gpu]`.

Prints every message and every step of a repeated transfer, by the clock that both processes share.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import SECONDS, Ranks
from torchrelay import Relay
from torchrelay.transports.meeting import node
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.protocol import holder, receiver, sender, serving
from torchrelay.transports.routes import cuda_ipc, memory, reading, tcp
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.streams import chunk_receiver, sockets

_events: list[tuple[float, str]] = []
_state: dict[str, torch.Tensor] = {}
_relay: list[Relay] = []


def _traced(owner: Any, name: str, label: str = "") -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(*args, **options)
        finally:
            spent = time.perf_counter() - begun
            _events.append((begun, f"{label or name} ({1000 * spent:.2f} ms)"))

    setattr(owner, name, wrapper)


def _trace() -> None:
    for owner, name in (
        (sender, "capture"),
        (serving.Serving, "offer"),
        (serving.Serving, "go"),
        (serving.Serving, "confirm"),
        (serving.Serving, "close"),
        (receiver, "_inspected"),
        (receiver.Receiving, "_fit"),
        (holder.LiveHolder, "accept"),
        (receiver.Receiving, "_commit"),
        (receiver, "uninterrupted"),
        (node.Node, "connect"),
        (memory.MemoryFetch, "_plan"),
        (memory.MemoryFetch, "_begin"),
        (reading.ReadingFetch, "run"),
        (tcp.TcpFetch, "run"),
        (cuda_ipc.CudaFetch, "_copy_device_memory"),
        (cuda_ipc.CudaFetch, "_copied_and_hashed"),
        (cuda_ipc.CudaFetch, "run"),
        (cuda_ipc.CudaFetch, "close"),
        (cuda_ipc.CudaService, "offer"),
        (Outgoing, "hash_on_devices"),
        (node.Node, "connect_data"),
        (sockets.DataSocket, "take_chunk"),
        (sockets.DataSocket, "send_chunk"),
        (tcp.TcpFetch, "close"),
        (chunk_receiver.ChunkReceiver, "__init__"),
    ):
        _traced(owner, name, f"{getattr(owner, '__name__', owner).split('.')[-1]}.{name}")
    send, heard = Connection.send, Connection._received

    def said(self: Connection, message: Any) -> None:
        _events.append((time.perf_counter(), f"  -> {type(message).__name__}"))
        send(self, message)

    def came(self: Connection, message: Any, nbytes: int) -> None:
        _events.append((time.perf_counter(), f"  <- {type(message).__name__} ({nbytes} bytes)"))
        heard(self, message, nbytes)

    Connection.send, Connection._received = said, came  # type: ignore[method-assign]


def make(group: Any, count: int, nbytes: int, device: str, route: str | None) -> None:
    for index in range(count):
        _state[f"w{index}"] = torch.full((nbytes // 2,), group.rank() + 1.0, device=device).to(
            torch.bfloat16
        )
    _relay.append(Relay(group, timeout=SECONDS, route=route))
    _trace()


def once(group: Any, atomic: bool) -> list[tuple[float, str]]:
    _events.clear()
    torch.distributed.barrier(group)
    _events.append((time.perf_counter(), "begin"))
    if group.rank() == 0:
        _relay[0].send(_state, to=1)
    else:
        _relay[0].recv(0, into=_state, atomic=atomic)
    _events.append((time.perf_counter(), "end"))
    return list(_events)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--many", action="store_true", help="20,000 tensors of 4 KB")
    parser.add_argument("--atomic", action="store_true")
    parser.add_argument("--route", default=None)
    parser.add_argument("--large", action="store_true", help="16 tensors, 1 GiB")
    parser.add_argument("--small", action="store_true", help="8 tensors: a test")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    count, each = 320, 25_000_000 if options.gpu else 1 << 20
    if options.many:
        count, each = 20_000, 4096
    if options.large:
        count, each = 16, 1 << 26
    if options.small:
        count = 8
    with Ranks(2) as ranks:
        ranks.run(make, count, each, "cuda" if options.gpu else "cpu", options.route)
        for _ in range(options.runs):
            found = ranks.run(once, options.atomic)
    first = min(events[0][0] for events in found)
    rows = [(at, rank, text) for rank, events in enumerate(found) for at, text in events]
    for at, rank, text in sorted(rows):
        print(f"{1000 * (at - first):9.3f} ms  {' ' * 50 * rank}{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
