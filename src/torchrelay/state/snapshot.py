"""A snapshot: a state's manifest and where its bytes are. Borrowed: valid while the caller keeps
the tensors alive and unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrelay.state import manifest as m
from torchrelay.state import plan
from torchrelay.state.containers import Path, flatten, leaf_paths, show
from torchrelay.state.images import Image, Images
from torchrelay.state.leaves import Finish, describe
from torchrelay.state.memory import Region
from torchrelay.state.pause import gc_paused
from torchrelay.state.plain import survey
from torchrelay.state.runs import Runs
from torchrelay.state.stream import Stream
from torchrelay.state.tensors import flat_bytes, version_of


class Snapshot:
    """`manifest` describes the state; `view` and `read` give its chunks."""

    def __init__(
        self, manifest: m.Manifest, images: list[Image], sources: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        self.manifest = manifest
        self._sources = sources  # index of a leaf, and a tensor that its bytes come from
        self._versions = [version_of(tensor) for _, tensor in sources]
        self.chunks = plan.Chunks([image.nbytes for image in images], manifest.chunks)
        self._images = images
        starts: list[int] = []
        addresses: list[int] = []
        sizes: list[int] = []
        elsewhere: list[tuple[int, Region]] = []  # not in host memory, or not in one run
        for start, image in zip(self.chunks.starts, images, strict=True):
            if image.address:
                starts.append(start)
                addresses.append(image.address)
                sizes.append(image.nbytes)
                continue
            for at, region in image.placed:
                if region.address:
                    starts.append(start + at)
                    addresses.append(region.address)
                    sizes.append(region.nbytes)
                else:
                    elsewhere.append((start + at, region))
        self._stream = Stream(Runs(starts, addresses, sizes), elsewhere, self.chunks.stream_bytes)

    def changed(self) -> str | None:
        """The path of a leaf that was written to since the capture, as far as autograd knows."""
        now = (version_of(tensor) for _, tensor in self._sources)
        for before, after, (leaf, _) in zip(self._versions, now, self._sources, strict=True):
            if before != after:
                return show(leaf_paths(self.manifest.tree)[leaf])
        return None

    def view(self, index: int, device: str = "cpu") -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they are one run of that device's memory."""
        extents = list(self.chunks.extents(index)) if self.chunks.sizes[index] >= plan.MIB else []
        if len(extents) != 1:
            return None
        storage, start, stop, _ = extents[0]
        image = self._images[storage]
        if image.device != device or stop - start != self.chunks.sizes[index]:
            return None
        if device != "cpu":
            return image.placed[0].region.run(start, stop) if len(image.placed) == 1 else None
        if not image.address:
            return None
        origin = image.keep.untyped_storage()
        return flat_bytes(origin, image.address - origin.data_ptr() + start, stop - start)

    def read(self, index: int, out: torch.Tensor) -> None:
        """Write the chunk's bytes to the buffer `out`, zeros where the stream has gaps."""
        start = self.chunks.offsets[index]
        self._stream.read(start, start + self.chunks.sizes[index], out)


def capture(
    state: object,
    step: int | None = None,
    *,
    receivers: int = 1,
    chunk_bytes: int | None = None,
) -> Snapshot:
    """Describe a state without copying it. `UnsupportedLeafError` names what cannot travel."""
    with gc_paused():
        return _capture(state, step, receivers, chunk_bytes)


def _capture(state: object, step: int | None, receivers: int, chunk_bytes: int | None) -> Snapshot:
    flat = flatten(state)
    images = Images()
    paths: dict[int, Path] = {}
    described: list[int | Finish] = []
    owners: list[int] = []  # of each tensor that was taken in, its leaf
    for index, (leaf, known) in enumerate(zip(flat.leaves, survey(flat.leaves), strict=True)):
        if known is not None:
            described.append(images.add_plain(leaf, known))
        else:
            paths = paths or leaf_paths(flat.tree)
            described.append(describe(leaf, paths[index], images.add))
        owners += [index] * (len(images) - len(owners))
    found = images.resolve()
    order = plan.stream_order([image.nbytes for image in found])
    position = [0] * len(found)
    for place, index in enumerate(order):
        position[index] = place
    ordered = [found[index] for index in order]

    def part(ticket: int) -> m.TensorLeaf:
        return images.leaf(ticket, position)

    sizes = [image.nbytes for image in ordered]
    stream = sum(plan.aligned_sizes(sizes))
    manifest = m.Manifest(
        version=m.VERSION,
        step=step,
        tree=flat.tree,
        leaves=tuple(
            [images.leaf(x, position) if isinstance(x, int) else x(part) for x in described]
        ),
        storages=tuple([m.Storage(image.nbytes, image.device) for image in ordered]),
        chunks=plan.cut(sizes, chunk_bytes or plan.chunk_size(stream, receivers)),
    )
    return Snapshot(manifest, ordered, list(zip(owners, images.tensors, strict=True)))
