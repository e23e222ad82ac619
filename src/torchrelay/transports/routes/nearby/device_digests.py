"""Device memory that a receiver copies itself, and the digests that show whether it holds.

The stream is laid over a grid. A cell's digest is that of its bytes in the memory of one GPU, with
zeros for all others. The sender makes one of each cell; the receiver makes them of what has come to
lie in its own memory. Of a cell that it wants in part it compares the sender's memory, which it has
open, with its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from torchrelay.geometry.chunks import DIGEST_BYTES
from torchrelay.geometry.runs import Column, Moves, Runs, moves, reached
from torchrelay.memory import kernels
from torchrelay.memory.kernels import ChunkTable, Tables, by_device, device_bytes
from torchrelay.memory.side import on_side_stream, side_stream

Sources = dict[int, Runs]  # memory by the device that it is on
CELL_BYTES = (64 << 10, 1 << 20)  # the least and the most
CELLS = 1 << 13  # as many keep a GPU busy


def cell_bytes(stream_bytes: int) -> int:
    """Bytes of a cell: the same at both ends."""
    least, most = CELL_BYTES
    size = least
    while size < most and size * CELLS < stream_bytes:
        size *= 2
    return size


def cells(memory: Runs, size: int) -> Column:
    """Where the cells begin that have bytes of this memory."""
    if not len(memory.starts):
        return np.zeros(0, np.uint64)
    first, last = memory.starts // np.uint64(size), (memory.stops - np.uint64(1)) // np.uint64(size)
    marks = reached(first, last, int(last.max()) + 1)
    found: Column = np.flatnonzero(marks).astype(np.uint64) * np.uint64(size)
    return found


def _in_order(memory: Sources) -> list[tuple[int, Runs]]:
    """By device, as both ends have them in order: processes may number their GPUs otherwise."""
    held = [(device, runs) for device, runs in memory.items() if len(runs.starts)]
    return sorted(held, key=lambda one: int(one[1].starts[0]))


def _bytes_in(memory: Runs, begin: Column, size: int) -> Column:
    """How many bytes the cells that begin there have of this memory."""
    found = moves(memory, Runs(begin, begin * np.uint64(2), np.full(len(begin), size, np.uint64)))
    cell = np.searchsorted(begin, found.positions, side="right") - 1
    counts: Column = np.bincount(cell, found.nbytes.astype(np.float64), len(begin)).astype("u8")
    return counts


def _hashed(memory: Runs, begin: Column, stream_bytes: int) -> ChunkTable:
    stops = begin + np.uint64(cell_bytes(stream_bytes))
    return ChunkTable.of(memory, begin, np.minimum(stops, np.uint64(stream_bytes)))


class Grid:
    """The cells of a sender's device memory, remembered for the next state in the same memory."""

    def __init__(self) -> None:
        self._tables = Tables()
        self._last: tuple[Runs, int, dict[int, ChunkTable]] | None = None

    def digests(self, memory: Runs, stream_bytes: int) -> DeviceDigests:
        last = self._last
        if last is None or last[0] is not memory or last[1] != stream_bytes:
            size = cell_bytes(stream_bytes)
            found = {
                device: _hashed(runs, cells(runs, size), stream_bytes)
                for device, runs in _in_order(by_device(memory))
            }
            last = self._last = memory, stream_bytes, found
        return DeviceDigests(last[2], self._tables)


class DeviceDigests:
    """Of a sender's device memory: asked of its devices, not awaited."""

    def __init__(self, hashed: dict[int, ChunkTable], tables: Tables) -> None:
        self._found: list[torch.Tensor] = []
        for device, some in hashed.items():
            with torch.cuda.device(device), side_stream():
                self._found.append(kernels.digests(some, device, tables))

    def packed(self) -> bytes:
        """All of them, device by device; waits for these."""
        with side_stream():
            return b"".join(found.cpu().numpy().tobytes() for found in self._found)


class _Compared(NamedTuple):
    """Cells of one device of the sender's, with digests of what is here; `whole` marks those of
    which all bytes are, the others are compared with `there`."""

    first: int  # of the sender's digests
    begin: Column
    wanted: Column  # which of that device's cells
    whole: np.ndarray[tuple[int], np.dtype[np.bool_]]
    here: torch.Tensor
    there: torch.Tensor | None


class Copied:
    """What `copy` did."""

    def __init__(self) -> None:
        self.compared: list[_Compared] = []
        self.cells = 0  # of the sender
        self.pieces = 0
        self.nbytes = 0

    def differs(self, theirs: bytes) -> int | None:
        """The position of the first cell whose bytes are not those that were sent, if there is."""
        if len(theirs) != self.cells * DIGEST_BYTES:
            return 0
        sent = np.frombuffer(theirs, np.uint8).reshape(-1, DIGEST_BYTES)
        found: list[int] = []
        for first, begin, wanted, whole, here, there in self.compared:
            with torch.cuda.device(here.get_device()), on_side_stream():
                mine = here.cpu().numpy()
            expected = sent[first + wanted.astype(np.int64)]
            if there is not None:
                expected = np.where(whole[:, None], expected, there.cpu().numpy())
            bad = (expected != mine).any(axis=1)
            found += begin[bad][:1].tolist()
        return min(found, default=None)


def copy(
    sources: Sources, destinations: Sources, stream_bytes: int, tables: Tables, *, digests: bool
) -> Copied:
    """Copy what both have; returns when it is over. With `digests`, those of all that has come are
    made meanwhile: `Copied.differs` waits for them, in the same thread."""
    copied = Copied()
    size = cell_bytes(stream_bytes)
    for there, theirs in _in_order(sources):
        known = cells(theirs, size) if digests else np.zeros(0, np.uint64)
        for here, ours in destinations.items():
            both = moves(theirs, ours)
            copied.pieces += len(both.nbytes)
            copied.nbytes += int(both.nbytes.sum())
            with torch.cuda.device(here), side_stream() as stream:
                if there == here:
                    kernels.copy(both, here, tables)
                else:
                    _copy_across(both, there, here)
                over = stream.record_event()
                if digests and len(both.nbytes):
                    copied.compared.append(
                        _compared(
                            copied.cells, known, stream_bytes, theirs, both, (there, here), tables
                        )
                    )
                over.synchronize()
        copied.cells += len(known)
    return copied


def _compared(
    first: int,
    known: Column,
    stream_bytes: int,
    theirs: Runs,
    both: Moves,
    devices: tuple[int, int],
    tables: Tables,
) -> _Compared:
    there, here = devices
    size = cell_bytes(stream_bytes)
    landed = Runs(both.positions, both.destinations, both.nbytes)
    begin = cells(landed, size)
    found = kernels.digests(_hashed(landed, begin, stream_bytes), here, tables)
    if both.nbytes.sum() == (theirs.stops - theirs.starts).sum():
        whole = np.ones(len(begin), bool)
    else:
        whole = _bytes_in(landed, begin, size) == _bytes_in(theirs, begin, size)
    wanted = np.searchsorted(known, begin).astype(np.uint64)
    if whole.all():
        return _Compared(first, begin, wanted, whole, found, None)
    read = Runs(both.positions, both.sources, both.nbytes)
    with torch.cuda.device(there), on_side_stream():
        source = kernels.digests(_hashed(read, begin, stream_bytes), there, tables)
    return _Compared(first, begin, wanted, whole, found, source)


def _copy_across(both: Moves, there: int, here: int) -> None:
    """From one GPU to another that can reach it."""
    columns = (both.sources, both.destinations, both.nbytes)
    for source, to, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        device_bytes(to, nbytes, here).copy_(device_bytes(source, nbytes, there))
