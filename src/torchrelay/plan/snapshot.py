"""A snapshot: a state's manifest and where its bytes are. Borrowed: valid while the caller keeps
the tensors alive and unchanged.
"""

from __future__ import annotations

import torch

from torchrelay.errors import StateError
from torchrelay.geometry import chunks as plan
from torchrelay.geometry.runs import Copy
from torchrelay.plan.blueprint import Blueprint, order_of
from torchrelay.plan.description import Others
from torchrelay.record.pause import gc_paused
from torchrelay.state.objects import flatten_objects
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tensors import flat_bytes, versions_of
from torchrelay.state.tree import Flat, flatten, show


class Snapshot:
    """`manifest` describes the state; `view` and `read` give its chunks, `stream` all its bytes.

    A snapshot keeps the tensors of the state alive. `plan` does not: keep that for the `like` of a
    later capture.
    """

    def __init__(
        self,
        flat: Flat,
        planned: Blueprint,
        others: Others,
        step: int | None,
        versions: list[int] | None,
    ) -> None:
        self.plan = planned
        self.manifest = planned.manifest(step)
        self.chunks = planned.chunks
        self._flat = flat
        self._others = others
        self._plain = planned.pieces.plains.of(flat.leaves)
        self.stream = planned.stream(others, self._plain)
        # Of the plain ones they may have been asked for with other things.
        plain = versions_of(self._plain) if versions is None else versions
        self._versions = plain, versions_of(others.images.tensors)
        self._images = dict(zip(planned.others_at, others.images.resolved, strict=True))

    def encoded(self) -> bytes:
        """The manifest in MessagePack, in columns; made once for all captures that share a plan."""
        return self.plan.encoded(self.manifest.step)

    def _now(self) -> tuple[list[int], list[int]]:
        return versions_of(self._plain), versions_of(self._others.images.tensors)

    def changed(self) -> str | None:
        """The path of a leaf that was written to since the capture, as far as autograd knows."""
        now = self._now()
        if now == self._versions:
            return None
        owners = (self.plan.pieces.plains.leaves, self._others.owners)
        leaf = min(
            leaf
            for column, before, after in zip(owners, self._versions, now, strict=True)
            for leaf, old, new in zip(column, before, after, strict=True)
            if old != new
        )
        return show(LeafPaths(self.manifest.tree)[leaf])

    def check_unchanged(self) -> None:
        """Raise `StateError` if a leaf was written to since the capture."""
        if (path := self.changed()) is not None:
            raise StateError(
                "changed while it was sent: keep the state as it is until send returns",
                step=self.manifest.step,
                phase="data",
                path=path,
            )

    def view(self, index: int, device: str = "cpu") -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they are one run of that device's memory."""
        whole = self.chunks.within_one(index) if self.chunks.sizes[index] >= plan.MIB else None
        if whole is None:
            return None
        storage, start, stop = whole
        image = self._images.get(storage)
        if image is None:
            piece = self.plan.large.get(storage)
            if piece is None or self._plain[piece].device.type != device:
                return None
            address, keep = self.plan.pieces.plains.addresses[piece], self._plain[piece]
        elif image.device != device:
            return None
        elif device != "cpu":
            return image.placed[0].region.run(start, stop) if len(image.placed) == 1 else None
        else:
            address, keep = image.address, image.keep
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
    like: Snapshot | Blueprint | None = None,
    objects: bool = False,
) -> Snapshot:
    """Describe a state without copying it. `UnsupportedLeafError` names what cannot travel. With
    `objects`, those that have a state dict are described by it.

    `like` is an earlier capture or its `plan`, of this state or of any other. What it found is used
    again if the state has the same tree, and tensors of the same kind in the same memory; plain
    values and what is no plain tensor are described anew. The result is as without `like`; its
    `plan` is that of `like` if no plain value changed either.
    """
    with gc_paused():
        flat = flatten_objects(state)[0] if objects else flatten(state)
        order = order_of(flat, receivers, chunk_bytes)
        before = like.plan if isinstance(like, Snapshot) else like
        versions: list[int] = []
        found = None if before is None else before.again(order, flat, versions)
        if found is None:
            versions.clear()
            found = Blueprint.draw(order, flat, versions)
        planned, others = found
        known = len(versions) == len(planned.pieces.plains)
        return Snapshot(flat, planned, others, step, versions if known else None)
