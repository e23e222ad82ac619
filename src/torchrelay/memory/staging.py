"""Copies of live state into an arena, on a few threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchrelay.memory import vectors
from torchrelay.memory.crew import share_out
from torchrelay.plan.stream import Stream

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

    def copy_piece(piece: tuple[Copy, int, int]) -> None:
        copy, low, high = piece
        copy.stream.read(low, high, arena[copy.at + low - copy.start :], vectors.copy)

    share_out(pieces, lambda: copy_piece, threads)
