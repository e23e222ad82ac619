"""A snapshot: the record of a state and where its bytes are.

It is borrowed: valid while the caller keeps the tensors alive and unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from torchrelay.errors import StateError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import MIB, Chunks
from torchrelay.geometry.runs import Column, Copy, Runs
from torchrelay.plan.description import Others, taken_apart
from torchrelay.plan.region import Region
from torchrelay.plan.sharded import ShardedLeaves, find_sharded
from torchrelay.plan.state_plan import StatePlan
from torchrelay.plan.stream import Stream
from torchrelay.record.encoding import encode
from torchrelay.record.pause import gc_paused
from torchrelay.record.rows import Marks
from torchrelay.state.objects import flatten_objects
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tensors import flat_bytes, versions_of
from torchrelay.state.tree import Flat, flatten, show


class Sendable(ABC):
    """A state as a transport sends it: a snapshot, or a part of one."""

    chunks: Chunks
    stream: Stream
    step: int | None
    devices: set[str]  # the kinds of devices that have some of its bytes

    @abstractmethod
    def encoded(self) -> bytes:
        """The record in MessagePack."""

    @abstractmethod
    def region(self, number: int) -> Region:
        """The bytes of an image of the stream, as they lie."""

    @abstractmethod
    def changed(self) -> str | None:
        """The path of a leaf that was written to since the capture, as far as autograd knows."""

    def check_unchanged(self) -> None:
        """Raise `StateError` if a leaf was written to since the capture."""
        if (path := self.changed()) is not None:
            raise StateError(
                "changed while it was sent: keep the state as it is until send returns",
                step=self.step,
                phase="data",
                path=path,
            )

    def view(self, index: int, device: str = "cpu") -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they are one run of that device's memory."""
        whole = self.chunks.within_one(index) if self.chunks.sizes[index] >= MIB else None
        if whole is None:
            return None
        number, start, stop = whole
        region = self.region(number)
        if region.keep.device.type != device:
            return None
        if device != "cpu":
            return region.run(start, stop)
        if not region.address:
            return None
        origin = region.keep.untyped_storage()
        return flat_bytes(origin, region.address - origin.data_ptr() + start, stop - start)

    def read(self, index: int, out: torch.Tensor, copy: Copy | None = None) -> None:
        """Write the chunk's bytes to the buffer `out`, zeros where the stream has gaps.

        `copy` is as for `Stream.read`.
        """
        start = self.chunks.offsets[index]
        self.stream.read(start, start + self.chunks.sizes[index], out, copy)


class Snapshot(Sendable):
    """`record` describes the state; `view` and `read` give its chunks, `stream` all its bytes.

    A snapshot keeps the tensors of the state alive.
    """

    def __init__(
        self,
        flat: Flat,
        planned: StatePlan,
        others: Others,
        sharded: ShardedLeaves,
        versions: list[int],
    ) -> None:
        self.record = planned.record
        self.step, self.devices = self.record.step, self.record.used_devices
        self.chunks = planned.chunks
        self._plan = planned
        self._others = others
        self._plain = planned.pieces.plain.of(sharded.local_leaves(flat.leaves))
        self._versions = versions, versions_of(others.images.tensors)
        self._images = dict(zip(planned.other_numbers, planned.others, strict=True))
        self.stream = self._memory()

    def encoded(self) -> bytes:
        return encode(self.record)

    def _memory(self) -> Stream:
        """The bytes, as they lie in memory now."""
        plain, places = self._plan.pieces.plain, self.chunks.places
        columns = (places[self._plan.piece_images], plain.address_of, plain.nbytes)
        host = Runs.unordered(*(column[plain.on_host] for column in columns))
        device = Runs.unordered(*(column[~plain.on_host] for column in columns))
        images = [(self.chunks.start_of(n), self._images[n].region) for n in sorted(self._images)]
        runs = [(at, one.address, one.nbytes) for at, one in images if one.address]
        if runs:
            host = Runs.merged(host, Runs.of(runs))
        regions = [(at, one) for at, one in images if not one.address]
        far = partial(_far, columns[0], ~plain.on_host, self._plain)  # it must not keep `self`
        return Stream(host, regions, self.chunks.stream_bytes, device, far)

    @cached_property
    def addresses(self) -> Numbers:
        """Where each image lies in host memory in one run; else 0."""
        plain = self._plan.pieces.plain
        found: Numbers = np.zeros(self.record.images, np.int64)
        found[self._plan.piece_images] = np.where(plain.on_host, plain.address_of, 0)
        for number, image in self._images.items():
            found[number] = image.region.address
        return found

    def tensor(self, image: int) -> torch.Tensor:
        """The tensor whose elements an image has; of an image of bytes, their memory."""
        found = self._images.get(image)
        return self._plain[self._pieces[image]] if found is None else found.region.keep

    def region(self, number: int) -> Region:
        found = self._images.get(number)
        return Region.row_major(self.tensor(number)) if found is None else found.region

    @cached_property
    def _pieces(self) -> dict[int, int]:
        """By image, the piece that it is."""
        images = self._plan.piece_images.tolist()
        return {image: piece for piece, image in enumerate(images)}

    def changed(self) -> str | None:
        now = versions_of(self._plain), versions_of(self._others.images.tensors)
        if now == self._versions:
            return None
        owners = (self._plan.pieces.plain.leaves, self._others.owners)
        leaf = min(
            leaf
            for column, before, after in zip(owners, self._versions, now, strict=True)
            for leaf, old, new in zip(column, before, after, strict=True)
            if old != new
        )
        return show(LeafPaths(self.record.outlines[0].tree)[leaf])


def _far(places: Column, marks: Marks, tensors: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
    """The tensors that are marked, with their places."""
    return [(int(places[row]), tensors[row]) for row in np.flatnonzero(marks).tolist()]


def capture(
    state: object,
    step: int | None = None,
    *,
    receivers: int = 1,
    chunk_bytes: int | None = None,
    objects: bool = False,
) -> Snapshot:
    """Describe a state without copying it. `UnsupportedLeafError` names what cannot travel.

    With `objects`, those that have a state dict are described by it.
    """
    with gc_paused():
        flat = flatten_objects(state)[0] if objects else flatten(state)
        versions: list[int] = []
        sharded = find_sharded(flat.leaves)
        pieces, others = taken_apart(flat, versions, sharded=sharded)
        planned = StatePlan(flat, pieces, others, sharded, step, receivers, chunk_bytes)
        return Snapshot(flat, planned, others, sharded, versions)
