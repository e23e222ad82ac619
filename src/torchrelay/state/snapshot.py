"""A snapshot: a state's manifest and where its bytes are. Borrowed: valid while the caller keeps
the tensors alive and unchanged.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right

import torch

from torchrelay.state import manifest as m
from torchrelay.state import plan
from torchrelay.state.containers import flatten
from torchrelay.state.images import Image, Images
from torchrelay.state.leaves import describe, finished
from torchrelay.state.tensors import flat_bytes


class Snapshot:
    """`manifest` describes the state; `view` and `read` give its chunks."""

    def __init__(self, manifest: m.Manifest, images: list[Image]) -> None:
        self.manifest = manifest
        self.chunks = plan.Chunks([image.nbytes for image in images], manifest.chunks)
        self._images = images
        self._starts = [[placed.at for placed in image.placed] for image in images]

    def view(self, index: int) -> torch.Tensor | None:
        """The chunk's bytes where they lie, if they are one run of memory; else None."""
        extents = list(self.chunks.extents(index)) if self.chunks.sizes[index] >= plan.MIB else []
        if len(extents) != 1:
            return None
        storage, start, stop, _ = extents[0]
        placed = self._images[storage].placed
        if len(placed) != 1 or stop - start != self.chunks.sizes[index]:
            return None
        region = placed[0].region
        if not region.address:
            return None
        origin = region.keep.untyped_storage()
        return flat_bytes(origin, region.address - origin.data_ptr() + start, stop - start)

    def read(self, index: int, out: torch.Tensor) -> None:
        """Write the chunk's bytes to the host buffer `out`, zeros between storages."""
        base = out.data_ptr()
        for storage, start, stop, at in self.chunks.extents(index):
            image = self._images[storage]
            if len(image.placed) == 1 and (address := image.placed[0].region.address):
                ctypes.memmove(base + at, address + start, stop - start)
            else:
                self._read_image(storage, start, stop, out[at:])
            if stop % m.ALIGN:
                out[at + stop - start : at + m.aligned(stop) - start].zero_()

    def _read_image(self, storage: int, start: int, stop: int, out: torch.Tensor) -> None:
        placed = self._images[storage].placed
        index = max(bisect_right(self._starts[storage], start) - 1, 0)
        position = start
        for at, region in placed[index:]:
            low, high = max(start, at), min(stop, at + region.nbytes)
            if at >= stop:
                break
            if low < high:
                out[position - start : low - start].zero_()
                region.read(low - at, high - at, out[low - start :])
                position = high
        out[position - start : stop - start].zero_()


def capture(
    state: object,
    step: int | None = None,
    *,
    receivers: int = 1,
    chunk_bytes: int | None = None,
) -> Snapshot:
    """Describe a state without copying it. `UnsupportedLeafError` names what cannot travel."""
    flat = flatten(state)
    images = Images()
    paths: dict[int, tuple[object, ...]] = {}
    for path, index in flat.slots:
        paths.setdefault(index, path)
    described = [describe(leaf, paths[i], images.add) for i, leaf in enumerate(flat.leaves)]
    found = images.resolve()
    order = plan.stream_order([image.nbytes for image in found])
    position = [0] * len(found)
    for place, index in enumerate(order):
        position[index] = place
    ordered = [found[index] for index in order]

    def part(ticket: int) -> m.TensorLeaf:
        return images.leaf(ticket, position)

    sizes = [image.nbytes for image in ordered]
    stream = sum(map(m.aligned, sizes))
    manifest = m.Manifest(
        version=m.VERSION,
        step=step,
        tree=flat.tree,
        leaves=tuple([finished(item, part) for item in described]),
        storages=tuple([m.Storage(image.nbytes, image.device) for image in ordered]),
        chunks=plan.cut(sizes, chunk_bytes or plan.chunk_size(stream, receivers)),
    )
    return Snapshot(manifest, ordered)
