"""Digests of the chunks of a share's files to be, of the memory that they would be written from.

The memory does not change meanwhile: the caller of the save waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise

import torch

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.digest import ChunkDigests
from torchrelay.memory.pages import host_view
from torchrelay.memory.pool import cores
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.shares.share import Share

BATCH = 64  # chunks that are hashed before they are compared
TASK_BYTES = 8 << 20  # that a thread takes at once
THREADS = 8  # more do not read memory faster


class FileHashing:
    """The chunks of one file, hashed as far as is asked for. GPUs have hashed theirs before."""

    def __init__(self, share: Share, number: int) -> None:
        self._file, self._stream = share.files[number], share.streams[number]
        self.chunks = -(-self._file.nbytes // self._file.chunk_bytes)
        self._digests = bytearray(self._file.digests or DIGEST_BYTES * self.chunks)

    def all(self) -> bytes:
        self._hash(range(self.chunks))
        return bytes(self._digests)

    def find(self, candidates: Sequence[bytes], first: int) -> tuple[int | None, int]:
        """Which of several files has these digests, if one has; else a chunk that none of them has.
        Chunk `first` is looked at first, and the search ends with a chunk that differs."""
        left = list(range(len(candidates)))
        order = iter([first, *[n for n in range(self.chunks) if n != first]])
        batch = [next(order)]
        while batch:
            self._hash(batch)
            for chunk in batch:
                at = slice(chunk * DIGEST_BYTES, (chunk + 1) * DIGEST_BYTES)
                left = [n for n in left if candidates[n][at] == self._digests[at]]
                if not left:
                    return None, chunk
            batch = list(islice(order, BATCH))
        return left[0], first

    def some(self, chunks: Iterable[int]) -> bytes:
        """The digests of these chunks, in their places among those of all; zeros for others."""
        self._hash(chunks)
        return bytes(self._digests)

    def _hash(self, chunks: Iterable[int]) -> None:
        unknown = [
            n for n in chunks if not any(self._digests[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES])
        ]
        each = max(1, TASK_BYTES // self._file.chunk_bytes)
        tasks = [unknown[at : at + each] for at in range(0, len(unknown), each)]
        run_on_threads(tasks, self._worker, min(THREADS, cores()))

    def _worker(self) -> Callable[[list[int]], None]:
        buffer = None
        if not self._stream.on_host:
            buffer = torch.empty(self._file.chunk_bytes, dtype=torch.uint8, device="cpu")
        return partial(self._do, buffer)

    def _do(self, buffer: torch.Tensor | None, chunks: list[int]) -> None:
        size, nbytes = self._file.chunk_bytes, self._file.nbytes
        digests = ChunkDigests(nbytes, size, self._digests)
        for first, stop in _stretches(chunks):
            start, end = first * size, min(stop * size, nbytes)
            if buffer is None:
                for position, address, some in self._stream.host.within(start, end):
                    digests.add(position, host_view(address, some))
                continue
            for at in range(start, end, buffer.numel()):
                until = min(at + buffer.numel(), end)
                self._stream.read(at, until, buffer)
                digests.add(at, host_view(buffer.data_ptr(), until - at))


def _stretches(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Chunks in ascending order that follow each other: the first, and the one behind the last."""
    first = chunks[0]
    for one, other in pairwise([*chunks, -1]):
        if other != one + 1:
            yield first, one + 1
            first = other
