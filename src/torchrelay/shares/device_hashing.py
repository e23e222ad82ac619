"""Digests of files to be, made on the GPUs that their bytes are on.

A digest that is made there covers the way to the host, staging and the medium, and the writer need
not hash those chunks. It is made of chunks that have bytes of one GPU; what such a chunk has in
host memory besides (a file's header) is brought to the GPU for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.describing.region import Stream
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.runs import Column, Runs, moves, reached
from torchrelay.memory.digest import joined_each
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.chunk_table import ChunkTable
from torchrelay.memory.gpu.kernels import CudaError
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.stores.writer.file_writer import FileSpec

Marks = np.ndarray[Any, np.dtype[np.bool_]]


class _OnDevice(NamedTuple):
    """Chunks that one GPU hashes."""

    chosen: np.ndarray[Any, np.dtype[np.intp]]  # which of all chunks
    beside: _Brought
    table: ChunkTable  # of their cells
    edges: list[int]  # the first cell of each, and the number of all


class DeviceHashing:
    """Digests of files, computed on the GPUs that hold the bytes. The plan is kept, so computing
    them a second time is cheap. The caller must have waited for pending work on the memory.

    All files are hashed at once, as if they were one behind the other, each from a multiple of its
    chunks' size on.
    """

    def __init__(self, files: Sequence[FileSpec], streams: Sequence[Stream]) -> None:
        self._files = files
        self._device: dict[int, list[tuple[int, int, int]]] = {}
        self._unmatched: list[tuple[int, int, int]] = []
        self._host: list[Runs] = []
        self._starts: list[Column] = []
        self._stops: list[Column] = []
        self._planned: dict[int, _OnDevice] = {}
        base = 0
        for file, stream in zip(files, streams, strict=True):
            for at, region in stream.elsewhere:
                run = region.run(0, region.nbytes) if region.keep.is_cuda else None
                if run is None:
                    self._unmatched.append((base + at, at, region.nbytes))
                else:
                    rows = self._device.setdefault(run.get_device(), [])
                    rows.append((base + at, run.data_ptr(), run.nbytes))
            host, skip = stream.host, np.uint64(base)
            self._host.append(Runs(host.starts + skip, host.addresses, host.stops - host.starts))
            starts = np.arange(0, file.nbytes, file.chunk_bytes, dtype=np.uint64)
            stops = np.minimum(starts + np.uint64(file.chunk_bytes), np.uint64(file.nbytes))
            self._starts.append(starts + skip)
            self._stops.append(stops + skip)
            base += len(starts) * file.chunk_bytes

    def hashed(self) -> list[FileSpec]:
        """The files, with the digests of chunks that a GPU has alone, and zeros for others."""
        if not self._device:
            return list(self._files)
        found = np.zeros((sum(map(len, self._starts)), DIGEST_BYTES), np.uint8)
        for device, memory in self._device.items():
            with suppress(CudaError), torch.cuda.device(device), on_side_stream():
                # Memory is taken here, too. Had another stream its memory before, work that is
                # still queued there could write to it.
                if device not in self._planned:
                    self._planned[device] = self._plan(device, Runs.of(memory))
                chosen, beside, table, edges = self._planned[device]
                beside.bring()
                cells = kernels.digests(table, device).cpu().numpy().tobytes()
                made = b"".join(joined_each(cells, edges))
                found[chosen] = np.frombuffer(made, np.uint8).reshape(-1, DIGEST_BYTES)
        parts = np.split(found, np.cumsum([len(column) for column in self._starts])[:-1])
        pairs = zip(self._files, parts, strict=True)
        return [file._replace(digests=part.tobytes()) for file, part in pairs]

    @cached_property
    def _shared(self) -> Marks:
        """Marks chunks that have bytes of several GPUs, or of memory that is not in one run."""
        starts = np.concatenate(self._starts)
        memory = [*self._device.values(), self._unmatched]
        found: Marks = np.sum([_reached(starts, Runs.of(rows)) for rows in memory], axis=0) > 1
        return found

    def _plan(self, device: int, memory: Runs) -> _OnDevice:
        starts, stops = np.concatenate(self._starts), np.concatenate(self._stops)
        chosen = np.flatnonzero(_reached(starts, memory) & ~self._shared)
        some = starts[chosen], stops[chosen]
        beside = _Brought(Runs.merged(*self._host), *some, device)
        begin, end, edges = kernels.cells_of(some[0], some[1] - some[0])
        table = ChunkTable.of(Runs.merged(memory, beside.runs), begin, end)
        return _OnDevice(chosen, beside, table, edges)


def _reached(starts: Column, memory: Runs) -> Marks:
    """Which chunks have bytes of this memory."""
    first = np.searchsorted(starts, memory.starts, side="right") - 1
    last = np.searchsorted(starts, memory.stops - np.uint64(1), side="right") - 1
    return reached(first, last, len(starts))


class _Brought:
    """The bytes of chunks in host memory, copied to a device each time they are hashed."""

    def __init__(self, host: Runs, starts: Column, stops: Column, device: int) -> None:
        found = moves(host, Runs(starts, starts, stops - starts))
        ends = np.cumsum(found.nbytes)
        nbytes = int(ends[-1]) if len(ends) else 0
        self._here = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device))
        places = ends - found.nbytes
        self._source = Runs(places, found.sources, found.nbytes)
        addresses = places + np.uint64(self._there.data_ptr())
        self.runs = Runs(found.positions, addresses, found.nbytes)

    def bring(self) -> None:
        self._source.gather(0, self._here.numel(), self._here.data_ptr())
        self._there.copy_(self._here)
