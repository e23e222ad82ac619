"""Digests of all bytes of tensors, by which ranks find out that they have the same values.

A digest is that of a chunk of a tensor's elements in row-major order (`memory.digest`), whichever
device has them and however they lie in its memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.describing.plain import PlainTensors
from torchrelay.describing.region import Region
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.chunks import ALIGN
from torchrelay.geometry.runs import Runs
from torchrelay.memory.digest import CELL_BYTES, digest, joined
from torchrelay.memory.gpu.kernels import CudaError, digests_of
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.pages import host_view
from torchrelay.memory.pool import cores
from torchrelay.memory.thread_pool import run_on_threads

TASK_BYTES = 8 * CELL_BYTES  # that a thread takes at once
THREADS = 8  # more do not read memory faster


class _Cells(NamedTuple):
    """Cells of a tensor from a byte on, and where their digests go."""

    region: Region
    start: int
    digests: bytearray


def value_digests(
    tensors: Sequence[torch.Tensor], plain: PlainTensors | None = None
) -> list[bytes]:
    """The digest of each tensor's bytes. What its device was asked to do before is waited for.
    `plain`: the plain ones of these tensors, where the caller knows them."""
    hashing = _Hashing(tensors)
    known = set()
    if plain is not None:
        columns = plain.leaves, plain.addresses, plain.nbytes, plain.gpus
        for index, address, nbytes, gpu in zip(*(one.tolist() for one in columns), strict=True):
            if gpu >= 0:
                hashing.add_device(index, address, nbytes, gpu)
            elif nbytes <= CELL_BYTES:  # as nearly all are
                hashing.found[index] = digest(host_view(address, nbytes))
            else:
                hashing.add(index, Region(tensors[index], nbytes, address))
        known.update(plain.leaves.tolist())
    if len(known) < len(tensors):
        for index, tensor in enumerate(tensors):
            if index not in known:
                hashing.add(index, Region.row_major(tensor))
    return hashing.digests()


class _Hashing:
    """Tensors, by how they are hashed."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self.found: list[bytes | bytearray] = [b""] * len(tensors)
        self._tasks: list[_Cells] = []  # for threads
        self._mine: list[_Cells] = []  # for this one, whose stream the caller's work is on
        self._on_devices: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def add(self, index: int, region: Region) -> None:
        if region.address and region.nbytes <= CELL_BYTES:
            self.found[index] = digest(host_view(region.address, region.nbytes))
        elif region.nbytes and (address := region.device_address):
            self.add_device(index, address, region.nbytes, self._tensors[index].get_device())
        else:
            on_host = self._tensors[index].is_cpu
            self._add_cells(index, region, self._tasks if on_host else self._mine)

    def add_device(self, index: int, address: int, nbytes: int, device: int) -> None:
        self._on_devices[device].append((index, address, nbytes))

    def _add_cells(self, index: int, region: Region, tasks: list[_Cells]) -> None:
        digests = bytearray(DIGEST_BYTES * -(-region.nbytes // CELL_BYTES))
        self.found[index] = digests
        tasks += [_Cells(region, at, digests) for at in range(0, region.nbytes, TASK_BYTES)]

    def digests(self) -> list[bytes]:
        if self._on_devices:
            settle()
        for device, rows in self._on_devices.items():
            try:
                made = _on_device(rows, device)
            except CudaError:
                for index, _, _ in rows:
                    self._add_cells(index, Region.row_major(self._tensors[index]), self._mine)
            else:
                for (index, _, _), one in zip(rows, made, strict=True):
                    self.found[index] = one
        run_on_threads(self._tasks, _hasher, min(THREADS, cores()))
        run_on_threads(self._mine, _hasher, 1)
        return [one if isinstance(one, bytes) else joined(bytes(one)) for one in self.found]


def _on_device(rows: Sequence[tuple[int, int, int]], device: int) -> list[bytes]:
    """The same of memory of one GPU, which hashes it, as if it were one stream. Rows have index,
    address and bytes."""
    _, addresses, sizes = np.array(rows, np.uint64).T
    ends = np.cumsum(-(-sizes.astype(np.int64) // ALIGN) * ALIGN)
    starts = np.append(0, ends[:-1])
    memory = Runs(starts.astype(np.uint64), addresses, sizes)
    return digests_of(memory, starts.tolist(), sizes.tolist(), device)


def _hasher() -> partial[None]:
    """Hashes cells, on one thread."""
    return partial(_hash, torch.empty(CELL_BYTES, dtype=torch.uint8, device="cpu"))


def _hash(buffer: torch.Tensor, cells: _Cells) -> None:
    region = cells.region
    for start in range(cells.start, min(cells.start + TASK_BYTES, region.nbytes), CELL_BYTES):
        stop = min(start + CELL_BYTES, region.nbytes)
        if region.address:
            view = host_view(region.address + start, stop - start)
        else:
            region.read(start, stop, buffer)
            view = host_view(buffer.data_ptr(), stop - start)
        at = start // CELL_BYTES * DIGEST_BYTES
        cells.digests[at : at + DIGEST_BYTES] = digest(view)
