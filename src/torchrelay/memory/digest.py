"""The digest of a chunk. It guards against corruption, not forgery.

It is xxh3-128 over the bytes. Where the sender uses a device, a chunk has that of the digests of
its cells instead: a device hashes these side by side, and one long run of bytes slowly.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import xxhash

from torchrelay.geometry import DIGEST_BYTES

CELL_BYTES = 1 << 20


def digest(chunk: torch.Tensor, *, cells: bool = False) -> bytes:
    """Digest of a uint8 tensor; a tensor on a device is copied to the host for it."""
    data: Any = chunk.cpu().numpy()
    if not cells:
        return xxhash.xxh3_128_digest(data)
    running = _RunningCells()
    running.update(data)
    return running.digest()


def joined(cells: bytes) -> bytes:
    """The digest of a chunk whose cells have these, one after the other."""
    return cells if len(cells) == DIGEST_BYTES else xxhash.xxh3_128_digest(cells)


def running_digest() -> Any:
    """The digest of bytes that are given to `update` one after the other; `digest` has it."""
    return xxhash.xxh3_128()


class _RunningCells:
    """As `running_digest`, of cells."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._hash, self._left = running_digest(), CELL_BYTES

    def update(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while len(rest):
            some, rest = rest[: self._left], rest[self._left :]
            self._hash.update(some)
            self._left -= len(some)
            if not self._left:
                self._done.append(self._hash.digest())
                self._hash, self._left = running_digest(), CELL_BYTES

    def digest(self) -> bytes:
        begun = [self._hash.digest()] if self._left < CELL_BYTES else []
        return joined(b"".join([*self._done, *begun]))


class RollingDigest:
    """The digest of a stretch of the stream, of bytes that lie here and there in host memory.

    Bytes between them in the stream are zeros.
    """

    def __init__(self, begin: int, *, cells: bool = False) -> None:
        self._at = begin
        self._hash = _RunningCells() if cells else running_digest()

    def add(self, positions: list[int], places: list[list[int]]) -> None:
        """Bytes at each (address, size) of `places`, at these positions; in the stream's order."""
        update = self._hash.update
        for position, (address, nbytes) in zip(positions, places, strict=True):
            if position > self._at:
                update(bytes(position - self._at))
            update((ctypes.c_ubyte * nbytes).from_address(address))
            self._at = position + nbytes

    def end(self, stop: int) -> bytes:
        if stop > self._at:
            self._hash.update(bytes(stop - self._at))
        return bytes(self._hash.digest())
