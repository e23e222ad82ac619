"""The digest of a chunk: xxh3-128 over its bytes. Guards against corruption, not forgery."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import xxhash


def digest(chunk: torch.Tensor) -> bytes:
    """Digest of a uint8 tensor; a tensor on a device is copied to the host for it."""
    data: Any = chunk.cpu().numpy()
    return xxhash.xxh3_128_digest(data)


def running_digest() -> Any:
    """The digest of bytes that are given to `update` one after the other; `digest` has it."""
    return xxhash.xxh3_128()


class RollingDigest:
    """The digest of a stretch of the stream, of bytes that lie here and there in host memory.

    What lies between them in the stream is zeros.
    """

    def __init__(self, begin: int) -> None:
        self._at = begin
        self._hash = running_digest()

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
