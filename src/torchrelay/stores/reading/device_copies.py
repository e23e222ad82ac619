"""Boxes of a step that is in memory of a GPU, into tensors on GPUs.

Runs of bytes on the same device are copied by one launch for all of them. A box in pieces, one
of another dtype, and one that another device has, is copied by torch from where it lies: nothing
goes through host memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from torchrelay.geometry.runs import Moves
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.stores.reading.box_reads import BoxRead
from torchrelay.stores.step_files import DeviceRun, StepFiles


class DeviceCopies:
    """As `reading.Fetch`, for boxes whose source and destination are on GPUs."""

    def __init__(
        self,
        step: StepFiles,
        record: Record,
        boxes: list[BoxRead],
        progress: Callable[[int], None],
    ) -> None:
        self._step, self._progress = step, progress
        self._names = [file.name for file in record.volumes]
        self._bases = [step.device_memory(name) for name in self._names]
        self._runs: dict[int, list[tuple[int, int, int]]] = {}  # by device
        self._others: list[BoxRead] = []
        self._nbytes = 0
        self.begun = False
        copied = [run for read in boxes if (run := self._added(read)) is not None]
        step.note_copies(copied, bool(self._others))

    def _added(self, read: BoxRead) -> DeviceRun | None:
        """The run that a box is, if it is one."""
        to = read.destination
        if not to.numel():
            return None
        self._nbytes += to.nbytes
        device, base = self._bases[read.shard.file]
        same = to.dtype == t.dtype_named(read.dtype) and to.get_device() == device
        if same and to.is_contiguous() and read.is_run:
            start, address, nbytes = read.first_byte, to.data_ptr(), to.nbytes
            self._runs.setdefault(device, []).append((base + start, address, nbytes))
            return DeviceRun(self._names[read.shard.file], start, address, nbytes)
        self._others.append(read)
        return None

    def check(self) -> None:
        """Nothing: the step is compared when it is opened."""

    def land(self, *, verify: bool = True) -> None:
        """Fill the places, if the memory is still lent."""
        self._step.check_lent()
        self.begun = True
        devices = {read.destination.get_device() for read in self._others} | set(self._runs)
        for device in devices:
            torch.cuda.synchronize(device)  # other streams may use what is overwritten
        for device in devices:
            with torch.cuda.device(device), on_side_stream():
                if rows := self._runs.get(device):
                    moves = Moves(
                        np.arange(len(rows), dtype=np.uint64), *np.array(rows, np.uint64).T
                    )
                    kernels.copy(moves, device)
                for read in self._others:
                    if read.destination.get_device() == device:
                        self._copy(read)
        self._progress(self._nbytes)

    def _copy(self, read: BoxRead) -> None:
        device, base = self._bases[read.shard.file]
        dtype = t.dtype_named(read.dtype)
        strides = contiguous_strides(read.shard.sizes)
        reach = sum((n - 1) * step for n, step in zip(read.sizes, strides, strict=True)) + 1
        raw = kernels.device_bytes(base + read.first_byte, reach * dtype.itemsize, device)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        box = raw.view(dtype).as_strided(read.sizes, strides)
        if read.destination.dtype == dtype:  # as integers: a copy of floats may quiet NaNs
            t.raw_of(read.destination).copy_(t.raw_of(box))
        else:
            read.destination.copy_(box)
