"""Copies of live state into an arena, on a few threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from torchrelay.describing.region import Stream
from torchrelay.memory import vectors
from torchrelay.memory.thread_pool import run_on_threads

# Bytes copied by one call: many, because each call may wait for the interpreter, and no more than a
# small part of the state, so that all threads end together.
PIECE = 16 << 20
LARGE_PIECE = 64 << 20
_PARTS = 64


class Copy(NamedTuple):
    """Bytes [start, stop) of a stream, and where in the arena they go."""

    stream: Stream
    start: int
    stop: int
    at: int


def stage(copies: Sequence[Copy], arena: torch.Tensor, *, threads: int = 2) -> None:
    """Copy everything; returns when the sources may change.

    One thread queues all copies of a GPU at once, on a stream of its own and with a call for each
    tensor: many small calls would leave the link idle between them. Meanwhile other threads copy
    host memory. The caller must have waited for pending work on the memory.
    """
    part = sum(copy.stop - copy.start for copy in copies) // _PARTS
    size = min(max(part // PIECE * PIECE, PIECE), LARGE_PIECE)
    pieces = [
        (copy, low, min(low + size, copy.stop))
        for copy in copies
        for low in range(copy.start, copy.stop, size)
    ]
    devices = set().union(*(copy.stream.devices for copy in copies))
    streams: list[torch.cuda.Stream] = [
        torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        for device in devices
    ]

    def copy_piece(piece: tuple[Copy, int, int]) -> None:
        copy, low, high = piece
        out = arena[copy.at + low - copy.start :]
        copy.stream.read(low, high, out, vectors.copy, devices=False)

    try:
        with ExitStack() as inside:
            for stream in streams:
                inside.enter_context(torch.cuda.stream(stream))
            for copy in copies if streams else ():
                copy.stream.ask_devices(copy.start, copy.stop, arena[copy.at :])
        run_on_threads(pieces, lambda: copy_piece, threads)
    finally:
        for stream in streams:
            stream.synchronize()
