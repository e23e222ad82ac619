"""Digests of files to be, made on the GPUs that their bytes are on.

A digest that is made there covers the way to the host, staging and the medium, and the writer need
not hash those chunks. It is made of chunks that have bytes of one GPU; what such a chunk has in
host memory besides (a file's header) is brought to the GPU for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from torchrelay.geometry.runs import Column, Runs, moves, reached
from torchrelay.memory import kernels
from torchrelay.memory.kernels import ChunkTable, CudaError, Tables
from torchrelay.memory.side import on_side_stream
from torchrelay.plan.stream import Stream
from torchrelay.record.digest import DIGEST_BYTES
from torchrelay.stores.writer.ranges import FileSpec

_Marks = np.ndarray[Any, np.dtype[np.bool_]]


def hashed_on_devices(files: Sequence[FileSpec], streams: Sequence[Stream]) -> list[FileSpec]:
    """The files, with the digests of chunks that a GPU can make. Work that was begun on the memory
    is over. All files are hashed at once, as if they were one behind the other."""
    line = _Line()
    for file, stream in zip(files, streams, strict=True):
        line.add(file, stream)
    if not line.device:
        return list(files)
    found = iter(line.digests())
    return [file._replace(digests=next(found)) for file in files]


class _Line:
    """Files one behind the other, each from a multiple of its chunks' size on."""

    def __init__(self) -> None:
        self.device: dict[int, list[tuple[int, int, int]]] = {}
        self._strays: list[tuple[int, int, int]] = []
        self._host: list[Runs] = []
        self._starts: list[Column] = []
        self._stops: list[Column] = []
        self._end = 0

    def add(self, file: FileSpec, stream: Stream) -> None:
        base = self._end
        for at, region in stream.elsewhere:
            run = region.run(0, region.nbytes) if region.keep.is_cuda else None
            if run is None:
                self._strays.append((base + at, at, region.nbytes))
            else:
                rows = self.device.setdefault(run.get_device(), [])
                rows.append((base + at, run.data_ptr(), run.nbytes))
        host, skip = stream.host, np.uint64(base)
        self._host.append(Runs(host.starts + skip, host.addresses, host.stops - host.starts))
        starts = np.arange(0, file.nbytes, file.chunk_bytes, dtype=np.uint64)
        stops = np.minimum(starts + np.uint64(file.chunk_bytes), np.uint64(file.nbytes))
        self._starts.append(starts + skip)
        self._stops.append(stops + skip)
        self._end += len(starts) * file.chunk_bytes

    def digests(self) -> list[bytes]:
        """Those of each file's chunks; zeros for chunks that no GPU has alone."""
        starts, stops = np.concatenate(self._starts), np.concatenate(self._stops)
        memory = {device: Runs.of(rows) for device, rows in self.device.items()}
        touched = {device: _reached(starts, runs) for device, runs in memory.items()}
        shared = np.sum([*touched.values(), _reached(starts, Runs.of(self._strays))], axis=0) > 1
        found = np.zeros((len(starts), DIGEST_BYTES), np.uint8)
        host = Runs.merged(*self._host)
        for device, runs in memory.items():
            chosen = np.flatnonzero(touched[device] & ~shared)
            some = starts[chosen], stops[chosen]
            with suppress(CudaError), torch.cuda.device(device), on_side_stream():
                beside, keep = _brought(host, *some)
                hashed = ChunkTable.of(Runs.merged(runs, beside), *some)
                found[chosen] = kernels.digests(hashed, device, Tables()).cpu().numpy()
                del keep  # what was brought has been read
        ends = np.cumsum([len(column) for column in self._starts])
        return [part.tobytes() for part in np.split(found, ends[:-1])]


def _reached(starts: Column, memory: Runs) -> _Marks:
    """Which chunks have bytes of this memory."""
    first = np.searchsorted(starts, memory.starts, side="right") - 1
    last = np.searchsorted(starts, memory.stops - np.uint64(1), side="right") - 1
    return reached(first, last, len(starts))


def _brought(host: Runs, starts: Column, stops: Column) -> tuple[Runs, torch.Tensor]:
    """What chunks have in host memory, on the current device; the tensor that it lies in."""
    found = moves(host, Runs(starts, starts, stops - starts))
    ends = np.cumsum(found.nbytes)
    buffer = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8, device="cpu")
    places = ends - found.nbytes
    source = Runs(places, found.sources, found.nbytes)
    source.gather(0, buffer.numel(), buffer.data_ptr())
    there = buffer.to("cuda")
    return Runs(found.positions, places + np.uint64(there.data_ptr()), found.nbytes), there
