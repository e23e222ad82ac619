"""The chunks of a snapshot as they leave this process: their bytes in host memory, their digests.

A digest is made once and kept. A chunk that is sent again goes with the digest of the first time,
so a state that changes while it is sent does not arrive as a mixture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchrelay.memory import vectors
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import Tables, digest_of
from torchrelay.memory.gpu.side import on_side_stream
from torchrelay.plan.snapshot import Sendable
from torchrelay.transports.streams.buffers import BufferPool
from torchrelay.transports.streams.chunk_sender import LentChunk


class OutgoingChunks:
    """Threads may share it."""

    def __init__(
        self,
        snapshot: Sendable,
        on_gpu: DeviceChunks,
        buffers: BufferPool,
        *,
        verify: bool,
        cells: bool,
        pinned: bool,
        tables: Tables | None = None,
    ) -> None:
        self._snapshot, self._on_gpu, self._buffers = snapshot, on_gpu, buffers
        self._verify, self._cells, self._pinned, self._tables = verify, cells, pinned, tables
        self.hashes = verify and not cells  # digests of cells are not made on the way
        self._digests: dict[int, bytes] = {}
        self._device_lock = threading.Lock()
        self._hashed_there = False

    @contextmanager
    def borrow(self, index: int) -> Iterator[LentChunk]:
        with self._bytes(index) as data:
            known = self._digests.get(index, b"")
            if self._verify and self._cells and not known:
                known = self._made(index, data)
            yield LentChunk(data, known)

    def note_digest(self, index: int, digest: bytes) -> None:
        self._digests.setdefault(index, digest)

    def digest(self, index: int) -> bytes:
        """The digest of a chunk, made if it is not known."""
        known = self._digests.get(index, b"")
        if known:
            return known
        if index in self._on_gpu:
            return self._on_device(index)
        with self._bytes(index) as data:
            return self._made(index, data)

    def _made(self, index: int, data: torch.Tensor) -> bytes:
        if index in self._on_gpu:
            return self._on_device(index)
        return self._digests.setdefault(index, digest_of(data, cells=self._cells))

    def _on_device(self, index: int) -> bytes:
        self.hash_on_devices()
        return self._digests[index]

    def hash_on_devices(self) -> None:
        """Have GPUs make the digests of all chunks that lie there."""
        with self._device_lock:
            if not self._hashed_there:
                for index, digest in self._on_gpu.digests(self._on_gpu, self._tables).items():
                    self._digests.setdefault(index, digest)
                self._hashed_there = True

    @contextmanager
    def _bytes(self, index: int) -> Iterator[torch.Tensor]:
        """Within: a chunk where it lies, or packed into a buffer."""
        data = self._snapshot.view(index)
        if data is not None:
            yield data
            return
        sizes = self._snapshot.chunks.sizes
        buffer = self._buffers.take(max(sizes), pinned=self._pinned)
        try:
            data = buffer[: sizes[index]]
            with on_side_stream():
                self._snapshot.read(index, data, vectors.copy)
            yield data
        finally:
            self._buffers.give(buffer)
