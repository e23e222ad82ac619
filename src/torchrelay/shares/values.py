"""Digests of all bytes of tensors, by which ranks find out that they have the same values.

A digest is that of a chunk of a tensor's elements in row-major order (`memory.digest`), whichever
device has them and however they lie in its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

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


def value_digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The digest of each tensor's bytes. What its device was asked to do before is waited for."""
    found: list[bytes | bytearray] = []
    tasks: list[_Cells] = []  # for threads
    mine: list[_Cells] = []  # for this one, whose stream the caller's work is on
    on_devices: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        region = Region.row_major(tensor)
        if region.address and region.nbytes <= CELL_BYTES:  # as nearly all are
            found.append(digest(host_view(region.address, region.nbytes)))
            continue
        digests = bytearray(DIGEST_BYTES * -(-region.nbytes // CELL_BYTES))
        found.append(digests)
        if region.device_address and region.nbytes:
            on_devices.setdefault(tensor.get_device(), []).append(index)
        else:
            cut = [_Cells(region, at, digests) for at in range(0, region.nbytes, TASK_BYTES)]
            (tasks if tensor.is_cpu else mine).extend(cut)
    if on_devices:
        settle()
    for device, places in on_devices.items():
        try:
            some = _on_device([tensors[place] for place in places], device)
        except CudaError:
            for place in places:
                region, cells = Region.row_major(tensors[place]), found[place]
                assert isinstance(cells, bytearray)
                mine += [_Cells(region, at, cells) for at in range(0, region.nbytes, TASK_BYTES)]
        else:
            for place, made in zip(places, some, strict=True):
                found[place] = made
    run_on_threads(tasks, _hasher, min(THREADS, cores()))
    run_on_threads(mine, _hasher, 1)
    return [one if isinstance(one, bytes) else joined(bytes(one)) for one in found]


def _on_device(tensors: Sequence[torch.Tensor], device: int) -> list[bytes]:
    """The same of contiguous tensors of one GPU, which hashes them, as if they were one stream."""
    sizes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    ends = np.cumsum(-(-sizes // ALIGN) * ALIGN)
    starts = np.append(0, ends[:-1])
    memory = Runs.of(
        [(int(at), one.data_ptr(), one.nbytes) for at, one in zip(starts, tensors, strict=True)]
    )
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
