"""Chunks whose bytes lie on a GPU, which hashes them there.

A sender has them hashed before they are copied to the host, a receiver after they have been copied
from it: the digests cover both copies and all between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu.kernels import by_device, digests_of


class DeviceChunks:
    """The chunks of a stream whose bytes all lie in `memory` of one GPU."""

    def __init__(self, chunks: Chunks, memory: Runs) -> None:
        self._chunks, self._memory = chunks, by_device(chunks.without_padding(memory))
        self._device: dict[int, int] = {}
        for device, runs in self._memory.items():
            there = chunks.shares_of(runs.starts, runs.stops - runs.starts)
            whole = np.flatnonzero((there == chunks.inside) & (there > 0)).tolist()
            self._device |= dict.fromkeys(whole, device)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._device

    def __iter__(self) -> Iterator[int]:
        return iter(self._device)

    def __len__(self) -> int:
        return len(self._device)

    def on(self, device: int) -> set[int]:
        """The chunks that lie on one GPU."""
        return {chunk for chunk, found in self._device.items() if found == device}

    def digests(self, wanted: Iterable[int]) -> dict[int, bytes]:
        """Of some of them, of what lies there now: whoever asks has waited for who writes there."""
        found: dict[int, bytes] = {}
        some = sorted(wanted)
        for device, memory in self._memory.items():
            mine = [chunk for chunk in some if self._device[chunk] == device]
            if mine:
                starts = [self._chunks.offsets[chunk] for chunk in mine]
                sizes = [self._chunks.sizes[chunk] for chunk in mine]
                made = digests_of(memory, starts, sizes, device)
                found |= zip(mine, made, strict=True)
        return found
