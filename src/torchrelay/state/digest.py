"""The digest of a chunk: xxh3-128 over its bytes. Guards against corruption, not forgery."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

DIGEST_BYTES = 16


def digest(chunk: torch.Tensor) -> bytes:
    """Digest of a uint8 tensor; a tensor on a device is copied to the host for it."""
    data: Any = chunk.cpu().numpy()
    return xxhash.xxh3_128_digest(data)
