"""The results of a landing: memory to write to while bytes come, and the state in the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Copy, Runs
from torchrelay.plan.region import Stream
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import show

_NAMED = 8  # tensors in a message
Far = Callable[[], Iterable[tuple[int, torch.Tensor]]]  # memory of devices, with positions


class Landed(NamedTuple):
    """The received state, and the paths that one side alone has (with `strict=False`)."""

    state: object
    missing: list[str]
    extra: list[str]


class OwnTensor(NamedTuple):
    """A tensor of the caller, or its local part, that takes the elements of an image."""

    image: int
    tensor: torch.Tensor


class Places:
    """Memory that takes bytes of the stream as they are: each of them has one place at most."""

    def __init__(
        self,
        host: Iterable[Runs],
        device: Runs | None = None,
        far: Far = tuple,
        live: bool = False,
        making: bool = False,
    ) -> None:
        self.device = device or Runs([], [], [])  # memory of GPUs, by address
        self._far = far  # gives the same memory as tensors
        self.live = live  # the caller's own tensors: once one is written to, the landing is `torn`
        self.making = making  # of host memory, while it is asked for, keeps a core busy
        self._made: list[Runs] = []
        self._coming = iter(host)

    def parts(self) -> Iterator[Runs]:
        """Host memory, in the order of the stream. Some is made only when it is asked for: by then
        bytes may come to what was there before."""
        yield from self._made
        for runs in self._coming:
            self._made.append(runs)
            yield runs

    @cached_property
    def host(self) -> Runs:
        """All of the host memory."""
        return Runs.merged(*self.parts())

    @cached_property
    def stream(self) -> Stream:
        """All of the memory."""
        return Stream(self.host, [], 0, self.device, self._far)


class Landing(ABC):
    """The side of a landing that a transport uses."""

    chunks: Chunks
    torn = False  # whether the caller's tensors have been written to, but not all of them
    _places: Places
    _copy: Copy  # copies to host memory, while other threads do

    @property
    def on_device(self) -> bool:
        """Whether any of it goes to a device."""
        return bool(len(self._places.device.starts))

    def write(self, index: int, data: torch.Tensor) -> None:
        """Take chunk `index`, whose bytes are in the buffer `data`, on the host or a device.

        Several threads may, each with another chunk, once `places().host` has been asked for.
        """
        begin = self.chunks.offsets[index]
        self.torn = self.torn or self._places.live
        self._places.stream.write(begin, begin + self.chunks.sizes[index], data, self._copy)

    def places(self) -> Places:
        """Where chunks go, for a transport that writes to memory itself instead of `write`."""
        return self._places

    def arrived(self) -> None:  # noqa: B027
        """All bytes have arrived and are not verified yet. Work that does not depend on the result
        is done here, while the transport waits for it."""

    @abstractmethod
    def commit(self) -> Landed:
        """All chunks have arrived and hold: make them the state."""


def chunks_of(record: Record) -> Chunks:
    """The chunks of a stream. A share of several ranks' records has none: it comes in parts."""
    cuts = record.volumes[0].cuts if record.volumes else None
    return Chunks(record.box_bytes, () if cuts is None else cuts.tolist())


def named(record: Record, chunks: Chunks, start: int, stop: int) -> str:
    """Bytes [start, stop) of the stream, by the tensors they are of, for a message."""
    first = max(bisect_right(chunks.starts, start) - 1, 0)
    images = range(first, max(first + 1, bisect_left(chunks.starts, stop)))
    leaves = LeafRows(record)
    paths = LeafPaths(leaves.tree)
    found = [
        show(paths[index])
        for index, leaf in enumerate(leaves)
        if index in paths and any(part.storage in images for part in parts(leaf))
    ]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    offset = start - chunks.starts[first] if first < len(chunks.starts) else start
    return f"{', '.join(found[:_NAMED])}{more} from byte {offset} on"
