"""Bytes that are sent: where they lie in this process, and its chunks as they leave it.

A digest is made once and kept. A chunk that is sent again goes with the digest of the first time,
so a state that changes while it is sent does not arrive as a mixture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

import numpy as np
import torch

from torchrelay.describing.snapshot import Sendable
from torchrelay.geometry.runs import Runs, reached
from torchrelay.memory import vectors
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import CudaError, digest_of
from torchrelay.memory.gpu.side import in_use, on_side_stream
from torchrelay.transports.resources import Member
from torchrelay.transports.routes.cuda.handles import Exported, Exports


class Outgoing:
    """A state that is sent, or the parts of it that a receiver asked for. Threads may share it."""

    def __init__(self, snapshot: Sendable, member: Member, verify: bool | None) -> None:
        self.snapshot, self.member, self.verify = snapshot, member, verify
        self._stream, self._chunks = snapshot.stream, snapshot.chunks
        self._digests: dict[int, bytes] = {}
        self._device_lock = threading.Lock()
        self._hashed_there = False

    @cached_property
    def from_gpu(self) -> bool:
        """Whether some of it lies on a GPU."""
        return in_use() and "cuda" in self.snapshot.devices

    # Where the bytes lie

    @cached_property
    def host(self) -> bytes:
        """The table of host memory, packed."""
        return self._stream.host.pack()

    @property
    def device(self) -> Runs:
        """Contiguous memory of GPUs."""
        return self._not_on_host[0]

    @cached_property
    def elsewhere(self) -> tuple[int, ...]:
        """The chunks that have bytes where no address of this host leads to them."""
        device, others = self._not_on_host
        if not len(device.starts) and not len(others.starts):
            return ()
        return self._chunks_of(Runs.merged(device.stretches, others))

    @cached_property
    def exported(self) -> Exported:
        """Contiguous memory of GPUs for another process of this machine to open; `CudaError` where
        that cannot be."""
        if not self.from_gpu or not len(self.device.starts):
            raise CudaError("no contiguous tensor of the state is on a GPU")
        return self.member.resources.of(Exports).of(self.device)

    def get_ready(self) -> None:
        """Make the tables that receivers of this machine need, before one asks. A table that fails
        here fails again for each of them, which gets the reason."""
        with suppress(Exception):
            self.host, self.elsewhere, self.exported  # noqa: B018

    @property
    def unexported(self) -> tuple[int, ...]:
        """Of those, the chunks that have bytes in no contiguous GPU memory, which no export has."""
        return self._chunks_of(self._not_on_host[1])

    @cached_property
    def on_gpu(self) -> DeviceChunks:
        """The chunks that a GPU can hash."""
        return DeviceChunks(self._chunks, self.device if in_use() else Runs([], [], []))

    @cached_property
    def _not_on_host(self) -> tuple[Runs, Runs]:
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

    # Chunks and their digests

    @property
    def hashes(self) -> bool:
        """Whether digests are made while chunks leave, where they are not known by then."""
        return self.verify is not False

    @contextmanager
    def borrow(self, index: int) -> Iterator[tuple[torch.Tensor, bytes]]:
        """Within: a chunk in host memory, and its digest where that is known."""
        with self._bytes(index) as data:
            if self.verify is not False and index in self.on_gpu:
                self.hash_on_devices()
            yield data, self._digests.get(index, b"")

    def note_digest(self, index: int, digest: bytes) -> None:
        self._digests.setdefault(index, digest)

    def digest(self, index: int) -> bytes:
        """The digest of a chunk, made if it is not known."""
        if index in self.on_gpu:
            self.hash_on_devices()
        if known := self._digests.get(index, b""):
            return known
        with self._bytes(index) as data:
            return self._digests.setdefault(index, digest_of(data))

    def hash_on_devices(self) -> None:
        """Have GPUs make the digests of all chunks that lie there."""
        with self._device_lock:
            if not self._hashed_there:
                for index, digest in self.on_gpu.digests(self.on_gpu).items():
                    self._digests.setdefault(index, digest)
                self._hashed_there = True

    @contextmanager
    def _bytes(self, index: int) -> Iterator[torch.Tensor]:
        """Within: a chunk where it lies, or packed into a buffer."""
        data = self.snapshot.view(index)
        if data is not None:
            yield data
            return
        buffer = self.member.buffer(max(self._chunks.sizes), pinned=self.from_gpu)
        data = buffer[: self._chunks.sizes[index]]
        with on_side_stream():
            self.snapshot.read(index, data, vectors.copy)
        yield data
