"""Copies of live state into an arena, on a few threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchrelay.state.stream import Stream

PIECE = 16 << 20  # bytes copied by one call: large, because each call may wait for the interpreter


class Copy(NamedTuple):
    """Bytes [start, stop) of a stream, and where in the arena they go."""

    stream: Stream
    start: int
    stop: int
    at: int


def stage(copies: Sequence[Copy], arena: torch.Tensor, *, threads: int = 2) -> None:
    """Copy everything; returns when the sources may change."""
    pieces = [
        (copy, low, min(low + PIECE, copy.stop))
        for copy in copies
        for low in range(copy.start, copy.stop, PIECE)
    ]
    upcoming = iter(pieces)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not failures:
                with lock:
                    piece = next(upcoming, None)
                if piece is None:
                    return
                copy, low, high = piece
                copy.stream.read(low, high, arena[copy.at + low - copy.start :])
        except BaseException as fault:
            failures.append(fault)

    others = [
        threading.Thread(target=work, name="torchrelay-stage", daemon=True)
        for _ in range(min(threads, len(pieces)) - 1)
    ]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
