"""Device memory that a receiver copies itself, and the digests that show whether it holds.

The stream is laid over a grid. A cell's digest is that of its bytes in the memory of one GPU, with
zeros for all others. The sender makes one of each cell; the receiver makes them of what has come to
lie in its own memory. Of a cell that it wants in part it compares the sender's memory, which it has
open, with its own.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.runs import Column, Moves, Runs, moves, reached
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.kernels import ChunkTable, Tables, by_device, device_bytes
from torchrelay.memory.gpu.side import side_stream
from torchrelay.record.digest import running_digest

Sources = dict[int, Runs]  # memory by the device that it is on
Digests = np.ndarray[Any, np.dtype[np.uint8]]
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


def _hashed(memory: Runs, begin: Column, stream_bytes: int, to: Runs | None = None) -> ChunkTable:
    stops = begin + np.uint64(cell_bytes(stream_bytes))
    return ChunkTable.of(memory, begin, np.minimum(stops, np.uint64(stream_bytes)), to)


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


def summary(digests: bytes) -> bytes:
    """The digest of the digests of all cells: what is said of them as long as they hold."""
    found = running_digest()
    found.update(digests)
    return bytes(found.digest())


class _OnHost:
    """Digests that the current stream makes, on their way to the host."""

    def __init__(self, found: torch.Tensor) -> None:
        self._found, self._over = found, None
        if found.is_cuda:
            self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._found.copy_(found, non_blocking=True)
            self._over = torch.cuda.current_stream().record_event()

    @property
    def rows(self) -> Digests:
        """A row for each; waits for them."""
        if self._over is not None:
            self._over.synchronize()
        rows: Digests = self._found.numpy()
        return rows


class DeviceDigests:
    """Of a sender's device memory: asked of its devices, not awaited."""

    def __init__(self, hashed: dict[int, ChunkTable], tables: Tables) -> None:
        self._found: list[_OnHost] = []
        for device, some in hashed.items():
            with torch.cuda.device(device), side_stream():
                self._found.append(_OnHost(kernels.digests(some, device, tables)))

    def packed(self) -> bytes:
        """All of them, device by device; waits for these."""
        return b"".join(found.rows.tobytes() for found in self._found)


class _Cells(NamedTuple):
    """Cells of one device of the sender's that come to one device here. `whole` marks those of
    which all bytes do: the others are compared with the memory at the other end, `read`."""

    first: int  # of the sender's digests
    begin: Column
    wanted: Column  # which of that device's cells
    whole: np.ndarray[tuple[int], np.dtype[np.bool_]]
    landed: ChunkTable  # copies them too, where that can be done at once
    read: ChunkTable | None


class _Compared(NamedTuple):
    """Cells, and digests of what has come of them; of those in part, of what was read too."""

    cells: _Cells
    here: _OnHost
    there: _OnHost | None


class _Way(NamedTuple):
    """What goes from one device to one here."""

    there: int
    here: int
    both: Moves
    cells: _Cells | None  # with digests


class CopyPlan(NamedTuple):
    """What is copied from where to where, and which cells are compared with what. Numbers alone."""

    ways: list[_Way]
    cells: int  # of the sender
    pieces: int
    nbytes: int


def plan_copy(
    sources: Sources, destinations: Sources, stream_bytes: int, *, digests: bool
) -> CopyPlan:
    """For what both have; `digests`: those of all that comes are wanted."""
    ways, count = [], 0
    size = cell_bytes(stream_bytes)
    for there, theirs in _in_order(sources):
        known = cells(theirs, size) if digests else np.zeros(0, np.uint64)
        for here, ours in destinations.items():
            both = moves(theirs, ours)
            found = None
            if digests and len(both.nbytes):
                found = _cells(count, known, stream_bytes, theirs, both, at_once=there == here)
            ways.append(_Way(there, here, both, found))
        count += len(known)
    pieces = sum(len(way.both.nbytes) for way in ways)
    return CopyPlan(ways, count, pieces, sum(int(way.both.nbytes.sum()) for way in ways))


def _cells(
    first: int, known: Column, stream_bytes: int, theirs: Runs, both: Moves, *, at_once: bool
) -> _Cells:
    size = cell_bytes(stream_bytes)
    landed = Runs(both.positions, both.destinations, both.nbytes)
    read = Runs(both.positions, both.sources, both.nbytes)
    begin = cells(landed, size)
    if both.nbytes.sum() == (theirs.stops - theirs.starts).sum():
        whole = np.ones(len(begin), bool)
    else:
        whole = _bytes_in(landed, begin, size) == _bytes_in(theirs, begin, size)
    wanted = np.searchsorted(known, begin).astype(np.uint64)
    if at_once and kernels.in_words(both):
        table = _hashed(read, begin, stream_bytes, landed)
    else:
        table = _hashed(landed, begin, stream_bytes)
    source = None if whole.all() else _hashed(read, begin, stream_bytes)
    return _Cells(first, begin, wanted, whole, table, source)


class Copier:
    """Copies device memory; the plan and the tables of the last time are kept, for a state that
    comes from the same memory to the same memory again."""

    def __init__(self) -> None:
        self._tables = Tables()
        self._last: tuple[Sources, Sources, tuple[int, bool], CopyPlan] | None = None

    def clear(self) -> None:
        self._tables.clear()
        self._last = None

    def copy(
        self, sources: Sources, destinations: Sources, stream_bytes: int, *, digests: bool
    ) -> Copied:
        """Copy what both have; returns when it is over. With `digests`, those of all that has come
        are made meanwhile: `Copied.differs` waits for them, in the same thread."""
        last, how = self._last, (stream_bytes, digests)
        if (
            last is None
            or last[2] != how
            or last[0] is not sources
            or not _same(last[1], destinations)
        ):
            plan = plan_copy(sources, destinations, stream_bytes, digests=digests)
            self._last = last = sources, destinations, how, plan
        return self._carry_out(last[3])

    def _carry_out(self, plan: CopyPlan) -> Copied:
        copied = Copied(plan)
        for there, here, both, found in plan.ways:
            with torch.cuda.device(here), side_stream() as stream:
                at_once = found is not None and found.landed.copies
                if there != here:
                    _copy_across(both, there, here)
                elif not at_once:
                    kernels.copy(both, here, self._tables)
                over = stream.record_event()
                if found is not None:
                    copied.compared.append(self._compared(found, there, here))
                (stream.record_event() if at_once else over).synchronize()
        return copied

    def _compared(self, found: _Cells, there: int, here: int) -> _Compared:
        mine = _OnHost(kernels.digests(found.landed, here, self._tables))
        if found.read is None:
            return _Compared(found, mine, None)
        with torch.cuda.device(there), side_stream():
            theirs = _OnHost(kernels.digests(found.read, there, self._tables))
        return _Compared(found, mine, theirs)


class Copied:
    """What was copied, and whether it holds."""

    def __init__(self, plan: CopyPlan) -> None:
        self.pieces, self.nbytes, self._cells = plan.pieces, plan.nbytes, plan.cells
        self.compared: list[_Compared] = []

    @cached_property
    def summary(self) -> bytes | None:
        """As `summary` of what the sender has, if nothing differs; None unless all cells are here.
        Waits for the digests."""
        if any(one.there is not None for one in self.compared):
            return None
        mine = b"".join(one.here.rows.tobytes() for one in self.compared)
        return summary(mine) if len(mine) == self._cells * DIGEST_BYTES else None

    def differs(self, theirs: bytes) -> int | None:
        """The position of the first cell whose bytes are not those that were sent, if there is."""
        if len(theirs) != self._cells * DIGEST_BYTES:
            return 0
        sent = np.frombuffer(theirs, np.uint8).reshape(-1, DIGEST_BYTES)
        found: list[int] = []
        for (first, begin, wanted, whole, _, _), here, there in self.compared:
            expected = sent[first + wanted.astype(np.int64)]
            if there is not None:
                expected = np.where(whole[:, None], expected, there.rows)
            bad = (expected != here.rows).any(axis=1)
            found += begin[bad][:1].tolist()
        return min(found, default=None)


def _same(some: Sources, others: Sources) -> bool:
    return some.keys() == others.keys() and all(
        np.array_equal(getattr(runs, column), getattr(others[device], column))
        for device, runs in some.items()
        for column in ("starts", "stops", "addresses")
    )


def _copy_across(both: Moves, there: int, here: int) -> None:
    """From one GPU to another that can reach it."""
    columns = (both.sources, both.destinations, both.nbytes)
    for source, to, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        device_bytes(to, nbytes, here).copy_(device_bytes(source, nbytes, there))
