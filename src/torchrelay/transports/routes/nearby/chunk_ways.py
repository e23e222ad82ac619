"""By which way each chunk of a state travels on this machine. Pure.

A chunk is taken straight from the sender's memory where both ends lie in memory of the same kind;
by way of a buffer where the sender's end can be read but this end takes more than a copy; and
through the ring where the sender's end cannot be read from here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.chunks import Chunks, Counts
from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.landing.places import Places


def stretches(chunks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Ascending chunks as the first of each stretch, and the one after its last."""
    firsts = [n for n, chunk in enumerate(chunks) if not n or chunk != chunks[n - 1] + 1]
    lasts = [n - 1 for n in (*firsts[1:], len(chunks))]
    return tuple((chunks[a], chunks[b] + 1) for a, b in zip(firsts, lasts, strict=False))


def chunks_in(stretches: tuple[tuple[int, int], ...], count: int) -> tuple[int, ...]:
    """The chunks of stretches, of so many; `ValueError` for chunks that are none."""
    edges = [0, *(edge for stretch in stretches for edge in stretch), count]
    if any(low > high for low, high in pairwise(edges)):
        raise ValueError("chunks that do not exist")
    return tuple(chunk for low, high in stretches for chunk in range(low, high))


class Shares(NamedTuple):
    straight: list[int]
    buffered: list[int]
    ringed: list[int]
    opened: frozenset[int] = frozenset()  # of those taken straight, from device memory alone


class SenderMemory(NamedTuple):
    """What the sender has where, and what of it this process can read."""

    host: Runs
    apart: tuple[int, ...]  # chunks that have bytes elsewhere
    reads: bool  # this process can read its host memory
    exported: Runs | None = None  # bytes in device memory that this process can read too
    strays: tuple[int, ...] = ()  # chunks that have bytes where no export reaches


def share(chunks: Chunks, places: Places, memory: SenderMemory, *, verify: bool) -> Shares:
    """`verify`: host memory is hashed."""
    sources, exported, reads = memory.host, memory.exported, memory.reads
    count = len(chunks)
    if exported is not None and _all_opened(count, places, memory, exported):
        return Shares(list(range(count)), [], [], frozenset(range(count)))
    device = places.device.stretches
    far = exported is not None or memory.apart or len(device.starts)
    if reads and not (verify or far or places.indirect):
        return Shares(list(range(count)), [], [])  # host memory at both ends
    to_device = _bytes_in(chunks, device)
    apart, strays = _mask(count, memory.apart), _mask(count, memory.strays)
    indirect = _mask(count, places.indirect)
    if exported is not None:
        matched = _bytes_in(chunks, moves(exported, device))
        crossed = _bytes_in(chunks, moves(exported, places.host)) > 0
        opened = apart & ~strays & ~indirect & (matched == to_device) & ~crossed
    else:
        opened = np.zeros(count, bool)
    from_host = _bytes_in(chunks, moves(sources, places.host))
    if not reads or verify:
        # Some bytes of an opened chunk may lie on the host: to be read, or hashed.
        opened &= from_host == 0
    readable = ~apart if reads else np.zeros(count, bool)
    ringed = ~readable & ~opened
    buffered = readable & (indirect | (to_device > 0))
    if verify:  # a digest is of the whole chunk, also of what nobody wants
        buffered |= readable & (from_host < _bytes_in(chunks, sources))
    straight = ~ringed & ~buffered
    marks = (straight, buffered, ringed, straight & opened)
    here, by_buffer, by_ring, far = (np.flatnonzero(mark).tolist() for mark in marks)
    return Shares(here, by_buffer, by_ring, frozenset(far))


def _all_opened(count: int, places: Places, memory: SenderMemory, exported: Runs) -> bool:
    """Whether both sides have nothing but the same pieces of device memory: told fast, because it
    is the common case where transfers are fastest."""
    if memory.strays or places.indirect or len(memory.host.starts) or len(places.host.starts):
        return False
    here = places.device.stretches
    return (
        len(memory.apart) == count
        and np.array_equal(exported.starts, here.starts)
        and np.array_equal(exported.stops, here.stops)
    )


def _mask(count: int, indices: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(count, bool)
    mask[list(indices)] = True
    return mask


def _bytes_in(chunks: Chunks, held: Runs | Moves) -> Counts:
    """How many bytes of these lie in each chunk."""
    if isinstance(held, Moves):
        return chunks.shares_of(held.positions, held.nbytes)
    return chunks.shares_of(held.starts, held.stops - held.starts)
