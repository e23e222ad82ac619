"""What a landing gives: memory to write to while bytes come, and the state in the end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import torch

from torchrelay.state import manifest as m
from torchrelay.state.columns import sizes_of
from torchrelay.state.plan import Chunks
from torchrelay.state.runs import Runs


class Landed(NamedTuple):
    """The received state, and the paths that one side alone has (with `strict=False`)."""

    state: object
    missing: list[str]
    extra: list[str]


class Places(NamedTuple):
    """Memory that takes bytes of the stream as they are."""

    host: Runs
    device: list[tuple[int, torch.Tensor]]  # position in the stream, dense tensor on a device
    indirect: frozenset[int]  # chunks that go by `write` all the same
    live: bool = False  # the caller's own tensors: once one is written to, the landing is `torn`


def chunks_of(manifest: m.Manifest) -> Chunks:
    return Chunks(sizes_of(manifest.storages), manifest.chunks)


def reaching(manifest: m.Manifest, chunks: Chunks, storages: Iterable[int]) -> frozenset[int]:
    """The chunks that hold bytes of any of these storages."""
    found: set[int] = set()
    for storage in storages:
        start = chunks.starts[storage]
        stop = start + manifest.storages[storage].nbytes
        first = max(bisect_right(chunks.offsets, start) - 1, 0)
        found.update(range(first, bisect_left(chunks.offsets, stop)))
    return frozenset(found)
