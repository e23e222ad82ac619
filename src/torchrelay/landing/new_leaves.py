"""New leaves: all of a state, what a destination lacks, or what its objects are given.

Their memory becomes the caller's, and bytes that arrive are written to it. Each has a storage of
its own, unless they shared one where they come from: keeping one of them never keeps the memory of
another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from typing import NamedTuple, Protocol

import numpy as np
import torch

from torchrelay.describing.pieces import HOST, device_number
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.landing.checks.fit import fit, mesh_of
from torchrelay.landing.checks.shards import check_shards
from torchrelay.landing.image_memory import ImageMemory
from torchrelay.landing.leaves import images_of, make_leaf
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.workspace import LARGE_BYTES, Workspace, allocate
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.state import tensors as t
from torchrelay.state.leaves import Part, check_buildable, is_plain
from torchrelay.state.paths import LeafPaths, Path, naming
from torchrelay.state.tree import check_types

_HOST = torch.device("cpu")
_MANY = 256  # leaves that are asked for one by one
_NONE, _SEVERAL = -1, -1  # no tensor is all of a storage; several leaves have an image


class StoredImages(Protocol):
    """Images whose bytes exist already, in files or in memory of another process."""

    def check(self, images: Numbers) -> None:
        """Raise an error unless the bytes of all of these can be there. Called before memory is
        taken for them."""

    def lend(self, image: int) -> torch.Tensor | None:
        """Memory with the bytes of an image, for a new tensor to keep."""


class ObjectLeaf(NamedTuple):
    """A leaf for `load_state_dict` of an object, and a tensor that it resembles: the object's own
    at its path, or its parameter. `fits`: a tensor has to be of the same kind."""

    leaf: int
    path: Path
    like: torch.Tensor | None
    fits: bool


class NewLeaves:
    """`marks` has the leaves that are made. A device is that of the tensor which a leaf resembles,
    the one asked for, or one of the kind that the leaf comes from."""

    def __init__(self, rows: LeafRows, options: LandingOptions) -> None:
        self._rows, self._options = rows, options
        self.marks: Marks = np.zeros(len(rows), bool)
        self._devices = [place_for(kind, options.device) for kind in rows.record.devices]
        self._where: Numbers = (
            rows.record.image_devices.copy()
        )  # of images, by number in `_devices`
        self._paths: dict[int, Path] = {}
        self._meshes: dict[int, t.DeviceMesh] = {}
        self._leaves: list[object] = [None] * len(rows)

    def add_for_object(self, wanted: ObjectLeaf) -> None:
        """Have a leaf made for an object, on the mesh of what it resembles if it is distributed. A
        value in the place of a tensor is the object's to judge: an optimizer has None where it has
        not come to yet."""
        index, path, like, fits = wanted
        leaf = self._rows[index]
        self.marks[index], self._paths[index] = True, path
        with naming(path):
            check_buildable(leaf)
            mesh = None if like is None else mesh_of(leaf, like)
            if mesh is not None:
                self._meshes[index] = mesh
            else:
                check_shards(leaf, self._options.shards)
        if fits and not isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)):
            list(fit(leaf, like, path))
        self._place(leaf, None if like is None else like.device)

    def add_all_but(self, leaves: Collection[int]) -> None:
        """Have all other leaves made. Each kind of tensors is checked once."""
        rows, record = self._rows, self._rows.record
        check_types(rows.tree)
        rest = ~self.marks
        rest[list(leaves)] = False
        self.marks |= rest
        some = np.flatnonzero(rest[rows.leaves])
        kinds = rows.kinds[some] * len(record.image_kinds) + record.image_kind[rows.images[some]]
        _, firsts = np.unique(kinds, return_index=True)
        alike = [(int(rows.leaves[row]), rows.row(row)) for row in some[firsts].tolist()]
        others = [(index, leaf) for index, leaf in rows.others.items() if rest[index]]
        for index, leaf in (*alike, *others):
            if not is_plain(leaf):
                with naming(self._path_of(index)):
                    check_buildable(leaf)
                    check_shards(leaf, self._options.shards)
                self._place(leaf, None)

    def _place(self, leaf: m.Leaf, device: torch.device | None) -> None:
        """Note the device of a leaf, where it is not that of the sender: arrays are on the host."""
        if isinstance(leaf, m.ArrayLeaf):
            device = _HOST
        if device is None:
            return
        if device not in self._devices:
            self._devices.append(device)
        for part in parts(leaf):
            if part.shape and part.storage >= 0:  # scalars are where they were at the sender
                self._where[part.storage] = self._devices.index(device)

    def _path_of(self, index: int) -> Callable[[], Path]:
        return lambda: self._paths.get(index) or LeafPaths(self._rows.tree)[index]

    @property
    def images(self) -> Marks:
        """The images that leaves are made of."""
        return images_of(self._rows, self.marks)

    # Memory for them.

    def take_memory(
        self,
        images: Numbers,
        memory: ImageMemory,
        chunks: Chunks,
        workspace: Workspace,
        stored: StoredImages | None,
    ) -> None:
        """Take memory for images that ascend, and that no leaf but those made here has. `stored`
        may lend memory that has the bytes of an image already.

        Images of one storage stay together. Of images 0 to 4, 1 and 2 share storage 7:

            run       first  last  bytes     becomes
            image 0   0      0     4 KB      a tensor of its kind, made with others of that kind
            1 and 2   1      2     12 KB     a buffer of bytes: both leaves are views of it
            image 3   3      3     2 MB      a buffer of the workspace, which reuses large ones
            image 4   4      4     8 KB      a tensor of another kind
        """
        if not len(images):
            return
        storage_of = self._rows.record.storage_of
        storages = images if storage_of is None else storage_of[images]
        is_first = np.append(True, (np.diff(storages) != 0) | (np.diff(images) != 1))
        firsts, lasts = images[is_first], images[np.append(is_first[1:], True)]
        starts = chunks.places[firsts]
        sizes = (chunks.places[lasts] - starts).astype(np.int64) + chunks.image_bytes[lasts]
        where = self._where[firsts]
        devices = np.array([device_number(one) for one in self._devices], np.int64)[where]
        large = np.flatnonzero((devices == HOST) & (sizes >= LARGE_BYTES)).tolist()
        lent = {} if stored is None else {n: stored.lend(int(firsts[n])) for n in large}
        buffers = {n: one for n, one in lent.items() if one is not None}
        empty = [n for n in large if n not in buffers]
        buffers.update(zip(empty, workspace.buffers(sizes[empty].tolist()), strict=True))
        kinds = self._kinds_of(firsts, firsts == lasts)
        kinds[large] = _NONE
        both = kinds * len(self._devices) + where
        bounds = np.flatnonzero(np.diff(both, prepend=both[0] - 1, append=both[-1] + 1))
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        for start, stop in pairwise(bounds.tolist()):
            device = self._devices[int(where[start])]
            if kinds[start] != _NONE:
                self._add_tensors(int(kinds[start]), firsts[start:stop], device, tensors, addresses)
                continue
            for n, nbytes in enumerate(sizes[start:stop].tolist(), start):
                tensors.append(buffers[n] if n in buffers else allocate(nbytes, device))
                addresses.append(tensors[-1].data_ptr())
        numbers = np.cumsum(is_first) - 1
        offsets = chunks.places[images] - starts[numbers]
        memory.add(images, tensors, numbers, offsets, sizes, addresses, devices)

    def _kinds_of(self, images: Numbers, alone: Marks) -> Numbers:
        """A number for the kinds of leaf and image of each storage that is one tensor; -1 where it
        takes a view to make a leaf of it.

        A tensor itself is cheaper than a view, and the common case by far.
        """
        rows, record = self._rows, self._rows.record
        owner = self._owners[images]
        if not len(rows.leaves):
            return owner
        row_major = np.array([kind.strides is None for kind in record.image_kinds], bool)
        row = np.maximum(owner, 0)
        kinds, stored = rows.kinds[row], record.image_kind[images]
        fine = (owner >= 0) & alone & rows.is_image[row] & row_major[stored]
        return np.where(fine, kinds * len(row_major) + stored, _NONE)

    @cached_property
    def _owners(self) -> Numbers:
        """The row that each image is of, if it is of one alone."""
        rows, images = self._rows, self._rows.record.images
        owners: Numbers = np.full(images, _SEVERAL, np.int64)
        owners[rows.images] = np.arange(len(rows.images))
        owners[np.bincount(rows.images, minlength=images) > 1] = _SEVERAL
        others = [part.storage for leaf in rows.others.values() for part in parts(leaf)]
        owners[[image for image in others if image >= 0]] = _SEVERAL
        return owners

    def _add_tensors(
        self,
        number: int,
        images: Numbers,
        device: torch.device,
        found: list[torch.Tensor],
        addresses: list[int],
    ) -> None:
        """Make the tensors of images, which are all of one kind: together they take half the time.
        Their addresses are asked for while they are in the processor's cache."""
        leaf, image = divmod(number, len(self._rows.record.image_kinds))
        kind = self._rows.record.kinds[leaf]
        shape = kind.shape
        if kind.sharding >= 0:
            shape = self._rows.record.image_kinds[image].boxes[0][1]
        try:
            one = torch.empty(shape, dtype=t.DTYPES[kind.dtype], device=device)
            tensors = [one]
            addresses.append(one.data_ptr())
            while rest := min(t.BLOCK, len(images) - len(tensors)):
                some = [*map(torch.empty_like, repeat(one, rest))]
                tensors += some
                addresses += map(torch.Tensor.data_ptr, some)
        except (RuntimeError, MemoryError, AssertionError) as fault:
            what = f"{kind.dtype} {shape} on {device}"
            raise MismatchError(f"no memory for {what}: {fault}") from None
        found += tensors
        if kind.flags == 0 and kind.sharding < 0:
            leaves = self._rows.leaves[self._owners[images]]
            for index, tensor in zip(leaves.tolist(), tensors, strict=True):
                self._leaves[index] = tensor

    # The leaves.

    def make(self, part: Part) -> list[object]:
        """The leaves that are made, each in its place among all of them. `part` makes tensors over
        images."""
        leaves, rank = self._leaves, self._options.rank
        missing = [n for n in np.flatnonzero(self.marks).tolist() if leaves[n] is None]
        records: Sequence[m.Leaf] = self._rows
        if len(missing) > _MANY:
            records = list(records)  # all at once are cheaper than one by one
        for n in missing:
            mesh = self._meshes.get(n)
            leaves[n] = make_leaf(records[n], self._path_of(n), part, rank, mesh)
        return leaves

    def place_of_empty(self, flags: int) -> torch.device | str:
        """Where a tensor without bytes goes."""
        if flags & m.META:
            return "meta"
        if self._options.device is not None:
            return self._options.device
        if not flags & m.ON_DEVICE:
            return _HOST
        kinds = self._rows.record.used_devices - {"cpu"}
        return _local_device(min(kinds, default="cuda"))


def place_for(kind: str, device: torch.device | None) -> torch.device:
    """Where a new tensor goes: to the device asked for, or to the kind that it comes from."""
    found = torch.device(device or _local_device(kind))
    return _HOST if found.type == "cpu" else found


def _local_device(kind: str) -> str:
    """The same kind of device here if there is one, else host memory."""
    try:
        torch.device(kind)
    except RuntimeError:
        return "cpu"
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    return kind if available is not None and available() else "cpu"
