"""Where the bytes of a state lie in the sender's memory."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torchrelay.geometry.runs import Runs, reached
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.side import in_use
from torchrelay.plan.snapshot import Sendable


class MemoryLayout:
    """Found out when it is first asked for."""

    def __init__(self, snapshot: Sendable) -> None:
        self._stream, self._chunks = snapshot.stream, snapshot.chunks

    @cached_property
    def host(self) -> bytes:
        """The table of host memory, packed."""
        return self._stream.host.pack()

    @cached_property
    def apart(self) -> tuple[int, ...]:
        """The chunks that have bytes where no address of this host leads to them."""
        device, others = self._elsewhere
        if not len(device.starts) and not len(others.starts):
            return ()
        return self._chunks_of(Runs.merged(device.stretches, others))

    @cached_property
    def strays(self) -> tuple[int, ...]:
        """Of those, the chunks that have bytes outside of contiguous GPU memory."""
        return self._chunks_of(self._elsewhere[1])

    @cached_property
    def on_gpu(self) -> DeviceChunks:
        """The chunks that a GPU can hash."""
        return DeviceChunks(self._chunks, self.device if in_use() else Runs([], [], []))

    @property
    def device(self) -> Runs:
        """Contiguous memory of GPUs."""
        return self._elsewhere[0]

    @cached_property
    def _elsewhere(self) -> tuple[Runs, Runs]:
        """Contiguous memory of GPUs, and which bytes of the stream lie elsewhere."""
        found, others = [], []
        for at, region in self._stream.regions:
            run = region.run(0, region.nbytes) if region.keep.is_cuda else None
            if run is None:
                others.append((at, at, region.nbytes))
            else:
                found.append((at, run.data_ptr(), run.nbytes))
        known = self._stream.device
        return Runs.merged(known, Runs.of(found)) if found else known, Runs.of(others)

    def _chunks_of(self, memory: Runs) -> tuple[int, ...]:
        offsets = np.array(self._chunks.offsets, np.uint64)
        first = np.searchsorted(offsets, memory.starts, side="right") - 1
        last = np.searchsorted(offsets, memory.stops - np.uint64(1), side="right") - 1
        return tuple(np.flatnonzero(reached(first, last, len(offsets))).tolist())
