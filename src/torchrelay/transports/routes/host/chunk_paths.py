"""The path that each chunk of a state takes on one machine. Pure.

A chunk is read straight from the sender's memory if both ends lie in memory of the same kind, by
way of a buffer if the sender's end can be read but this end takes more than a copy, and through the
ring if the sender's end cannot be read from here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.chunks import Chunks, Counts
from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.plan.region import Stream


class ChunkPaths(NamedTuple):
    """Chunks by their paths."""

    straight: list[int]
    buffered: list[int]
    ringed: list[int]
    opened: frozenset[int] = frozenset()  # of those read straight, from device memory alone


class SenderMemory(NamedTuple):
    """The locations of the sender's bytes, and the parts that this process can read."""

    host: Runs
    apart: tuple[int, ...]  # chunks that have bytes elsewhere
    reads: bool  # this process can read its host memory
    exported: Runs | None = None  # bytes in device memory that this process can read too
    strays: tuple[int, ...] = ()  # chunks that have bytes where no export reaches
    hashed: frozenset[int] | None = None  # if device memory is hashed: chunks that can be


def choose_paths(
    chunks: Chunks, places: Stream, memory: SenderMemory, *, verify: bool
) -> ChunkPaths:
    """`verify`: host memory is hashed."""
    sources, exported, reads = memory.host, memory.exported, memory.reads
    count = len(chunks)
    device = places.device.stretches
    far = exported is not None or memory.apart or len(device.starts)
    if reads and not (verify or far):
        return ChunkPaths(list(range(count)), [], [])  # host memory at both ends
    to_device = _bytes_in(chunks, device)
    apart, strays = _mask(count, memory.apart), _mask(count, memory.strays)
    if exported is not None:
        matched = _bytes_in(chunks, moves(exported, device))
        crossed = _bytes_in(chunks, moves(exported, places.host)) > 0
        opened = apart & ~strays & (matched == to_device) & ~crossed
        if memory.hashed is not None:
            # A digest is of the whole chunk.
            opened &= (_bytes_in(chunks, exported) == to_device) & _mask(count, memory.hashed)
    else:
        opened = np.zeros(count, bool)
    from_host = _bytes_in(chunks, moves(sources, places.host))
    if not reads or verify or memory.hashed is not None:
        # Some bytes of an opened chunk may lie on the host: to be read, or hashed.
        opened &= from_host == 0
    readable = ~apart if reads else np.zeros(count, bool)
    ringed = ~readable & ~opened
    buffered = readable & (to_device > 0)
    if verify:  # a digest covers the whole chunk, including unwanted bytes
        buffered |= readable & (from_host < _bytes_in(chunks, sources))
    straight = ~ringed & ~buffered
    marks = (straight, buffered, ringed, straight & opened)
    here, by_buffer, by_ring, far = (np.flatnonzero(mark).tolist() for mark in marks)
    return ChunkPaths(here, by_buffer, by_ring, frozenset(far))


def _mask(count: int, indices: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(count, bool)
    mask[list(indices)] = True
    return mask


def _bytes_in(chunks: Chunks, held: Runs | Moves) -> Counts:
    """How many bytes of these lie in each chunk."""
    if isinstance(held, Moves):
        return chunks.shares_of(held.positions, held.nbytes)
    return chunks.shares_of(held.starts, held.stops - held.starts)
