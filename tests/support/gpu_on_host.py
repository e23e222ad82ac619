"""What a GPU does, done by the CPU: memory of the host stands for that of a device."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import xxhash

from torchrelay.memory.gpu.chunk_table import ChunkTable


def hash_on_host(hashed: ChunkTable, device: int) -> torch.Tensor:
    """And copies first, as the kernel does."""
    rows = []
    for first, nbytes in hashed.chunks.tolist():
        digest, at = xxhash.xxh3_128(), 0
        while at < nbytes:
            base, end, to = hashed.segments[first].tolist()
            here = (base + at) % (1 << 64)
            if base and hashed.copies:
                there = (to + at) % (1 << 64)
                ctypes.memmove(there, here, end - at)
                here = there
            digest.update(ctypes.string_at(here, end - at) if base else bytes(end - at))
            first, at = first + 1, end
        rows.append(list(digest.digest()))
    return torch.tensor(rows, dtype=torch.uint8).view(-1, 16)


def landed(copied: ChunkTable) -> ChunkTable:
    """The chunks of a table where it has copied them to."""
    base, end, to = copied.segments.T
    segments = np.stack([to, end, np.zeros_like(base)], axis=1)
    numbers = np.concatenate((copied.chunks.ravel(), segments.ravel()))
    return ChunkTable(numbers, copied.count, False)
