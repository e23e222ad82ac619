"""Tensors of a recorded state: each is whole, and cut into boxes that lie in volumes.

A volume is a file of a checkpoint, or the memory of a live rank laid out in the same way.
"""

from __future__ import annotations

import msgspec


class _Stored(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Small records stand as arrays: field order is part of the format."""


class Shard(_Stored, frozen=True):
    """A box of a tensor: its elements, row-major, from byte `start` of a file on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    start: int


class StoredTensor(_Stored, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
