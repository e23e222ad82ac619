"""A snapshot: the record of a state and where its bytes are.

It is borrowed: valid while the caller keeps the tensors alive and unchanged.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from torchrelay.errors import StateError
from torchrelay.geometry import chunks as plan
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Copy
from torchrelay.plan.description import Others
from torchrelay.plan.region import Region
from torchrelay.plan.sharded import ShardedLeaves
from torchrelay.plan.state_plan import StatePlan
from torchrelay.plan.stream import Stream
from torchrelay.record.encoding import encode
from torchrelay.record.pause import gc_paused
from torchrelay.state.objects import flatten_objects
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tensors import flat_bytes, versions_of
from torchrelay.state.tree import Flat, flatten, show


class Sendable(Protocol):
    """A state as a transport sends it: a snapshot, or a part of one."""

    chunks: Chunks
    stream: Stream

    @property
    def step(self) -> int | None: ...
    @property
    def devices(self) -> set[str]: ...
    def encoded(self) -> bytes: ...
    def view(self, index: int, device: str = "cpu") -> torch.Tensor | None: ...
    def read(self, index: int, out: torch.Tensor, copy: Copy | None = None) -> None: ...
    def changed(self) -> str | None: ...
    def check_unchanged(self) -> None: ...


class Snapshot:
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
        self.chunks = planned.chunks
        self._plan = planned
        self._others = others
        self._plain = planned.pieces.plain.of(sharded.local_leaves(flat.leaves))
        self.stream = planned.stream(self._plain)
        self._versions = versions, versions_of(others.images.tensors)
        self._images = dict(zip(planned.other_numbers, planned.others, strict=True))

    @property
    def step(self) -> int | None:
        return self.record.step

    @property
    def devices(self) -> set[str]:
        """The kinds of devices that have some of its bytes."""
        return self.record.used_devices

    def encoded(self) -> bytes:
        """The record in MessagePack."""
        return encode(self.record)

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

    def region(self, image: int) -> Region:
        """The bytes of an image as they lie."""
        found = self._images.get(image)
        return Region.row_major(self.tensor(image)) if found is None else found.region

    @cached_property
    def _pieces(self) -> dict[int, int]:
        """By image, the piece that it is."""
        images = self._plan.piece_images.tolist()
        return {image: piece for piece, image in enumerate(images)}

    def changed(self) -> str | None:
        """The path of a leaf that was written to since the capture, as far as autograd knows."""
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
        whole = self.chunks.within_one(index) if self.chunks.sizes[index] >= plan.MIB else None
        if whole is None:
            return None
        number, start, stop = whole
        image = self._images.get(number)
        if image is None:
            piece = self._plan.large.get(number)
            if piece is None or self._plain[piece].device.type != device:
                return None
            address, keep = self._plan.pieces.plain.addresses[piece], self._plain[piece]
        elif image.device != device:
            return None
        elif device != "cpu":
            return image.region.run(start, stop)
        else:
            address, keep = image.region.address, image.region.keep
        if not address:
            return None
        origin = keep.untyped_storage()
        return flat_bytes(origin, address - origin.data_ptr() + start, stop - start)

    def read(self, index: int, out: torch.Tensor, copy: Copy | None = None) -> None:
        """Write the chunk's bytes to the buffer `out`, zeros where the stream has gaps.

        `copy` is as for `Stream.read`.
        """
        start = self.chunks.offsets[index]
        self.stream.read(start, start + self.chunks.sizes[index], out, copy)


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
        planned = StatePlan.build(
            flat, versions, step=step, receivers=receivers, chunk_bytes=chunk_bytes
        )
        return Snapshot(flat, *planned, versions)
