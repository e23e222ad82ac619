"""New tensors for a received state. Nobody sees them before `commit` returns.

Each has a storage of its own, unless they shared one where they come from: keeping one of them
never keeps the memory of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Runs
from torchrelay.landing.checks.shards import check_shards
from torchrelay.landing.commit.ending import StateLanding
from torchrelay.landing.held import HeldImages
from torchrelay.landing.leaves import check_records, make_leaf, without_bytes
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.places import Landed, chunks_of
from torchrelay.landing.workspace import LARGE_BYTES, Workspace, allocate
from torchrelay.pause import gc_paused
from torchrelay.plan.region import Stream
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.leaves import check_buildable, is_plain
from torchrelay.state.paths import LeafPaths, Path, naming
from torchrelay.state.tree import check_types, unflatten

_HOST = torch.device("cpu")
_MANY = 256  # leaves that are asked for one by one
_NONE, _SEVERAL = -1, -1  # no tensor is all of a storage; several leaves have an image

Filled = Callable[[int], torch.Tensor | None]


class NewTensors(StateLanding):
    """`filled` may have memory that has the bytes of an image already, to be kept."""

    all_new = True

    def __init__(
        self,
        record: Record,
        options: LandingOptions,
        workspace: Workspace,
        filled: Filled | None = None,
    ) -> None:
        self.record = record
        self._rows = rows = LeafRows(record)
        self._options = options
        self._copy = partial(workspace.copy, alone=False)
        self.chunks = chunks = chunks_of(record)
        self._check()
        self._storages = storages = _NewStorages(record)
        # The device of each storage is that of its first image.
        self._devices = [place_for(kind, options.device) for kind in record.devices] + [_HOST]
        self._where: Numbers = record.image_devices[storages.firsts]
        arrays = [
            x.storage for x in rows.others.values() if isinstance(x, m.ArrayLeaf) and x.nbytes
        ]
        self._where[storages.numbers[arrays]] = len(record.devices)
        far: Marks = np.array([one != _HOST for one in self._devices], bool)[self._where]
        self._buffers = self._large(np.flatnonzero(~far), filled, workspace)
        self._owner = self._owners()
        self._kinds = self._kind_of_each()
        self._ready: list[object] = [None] * len(rows)
        self.held = held = HeldImages(chunks)
        held.memory, held.far, held.numbers = self._made(), far.tolist(), storages.numbers
        starts = chunks.places[storages.firsts]
        held.offsets = chunks.places - starts[held.numbers]
        near = ~far & (storages.sizes > 0)
        addresses = held.addresses(storages.firsts[near])
        host = Runs(starts[near], addresses, storages.sizes[near].astype(np.uint64))
        self.places = Stream(host, [], chunks.stream_bytes, held.runs(far=True), held.far_bytes)

    def _check(self) -> None:
        """Whether this process can make the leaves, and parts of distributed ones are its own;
        each kind of tensors once."""
        rows, record = self._rows, self.record
        check_types(rows.tree)
        check_records(rows.tree, rows)
        kinds = rows.kinds * len(record.image_kinds) + record.image_kind[rows.images]
        _, firsts = np.unique(kinds, return_index=True)
        alike = [(int(rows.leaves[row]), rows.row(row)) for row in firsts.tolist()]
        for index, leaf in (*alike, *rows.others.items()):
            if not is_plain(leaf):
                with naming(self._path(index)):
                    check_buildable(leaf)
                    check_shards(leaf, self._options.shards)

    def _path(self, index: int) -> Callable[[], Path]:
        return lambda: LeafPaths(self._rows.tree)[index]

    def _owners(self) -> Numbers:
        """The row that each image is of, if it is of one alone."""
        rows, images = self._rows, self.record.images
        owners: Numbers = np.full(images, _SEVERAL, np.int64)
        owners[rows.images] = np.arange(len(rows.images))
        owners[np.bincount(rows.images, minlength=images) > 1] = _SEVERAL
        others = [part.storage for leaf in rows.others.values() for part in parts(leaf)]
        owners[[image for image in others if image >= 0]] = _SEVERAL
        return owners

    def _large(
        self, near: Numbers, filled: Filled | None, workspace: Workspace
    ) -> dict[int, torch.Tensor]:
        """Memory for large storages of the host."""
        sizes = self._storages.sizes
        large = near[sizes[near] >= LARGE_BYTES].tolist()
        ready: dict[int, torch.Tensor] = {}
        for home in large:
            room = None if filled is None else filled(int(self._storages.firsts[home]))
            if room is not None:
                ready[home] = room
        empty = [home for home in large if home not in ready]
        return {**ready, **dict(zip(empty, workspace.buffers(sizes[empty].tolist()), strict=True))}

    def _kind_of_each(self) -> Numbers:
        """A number for the kinds of leaf and image of each storage that is one tensor; -1 where it
        takes a view to make a leaf of it.

        A tensor itself is cheaper than a view, and the common case by far.
        """
        record, rows, firsts = self.record, self._rows, self._storages.firsts
        if not len(rows.leaves) or not len(firsts):
            return np.full(len(firsts), _NONE, np.int64)
        plain = np.array([not kind.flags & (m.CONJ | m.NEG) for kind in record.kinds], bool)
        straight = np.array([kind.strides is None for kind in record.image_kinds], bool)
        row = np.maximum(self._owner[firsts], 0)
        kinds, images = rows.kinds[row], record.image_kind[firsts]
        fine = (self._owner[firsts] >= 0) & self._storages.alone & rows.is_image[row]
        fine &= plain[kinds] & straight[images]
        fine[list(self._buffers)] = False
        return np.where(fine, kinds * len(straight) + images, _NONE)

    def _made(self) -> list[torch.Tensor]:
        """The memory of every storage."""
        made: list[torch.Tensor] = []
        both = self._kinds * len(self._devices) + self._where
        starts = np.flatnonzero(np.diff(both, prepend=both[:1] - 1))
        for start, stop in pairwise([*starts.tolist(), len(both)]):
            device = self._devices[int(self._where[start])]
            if self._kinds[start] != _NONE:
                made += self._tensors(start, stop, device)
                continue
            for home, nbytes in enumerate(self._storages.sizes[start:stop].tolist(), start):
                buffer = self._buffers.get(home)
                made.append(allocate(nbytes, device) if buffer is None else buffer)
        return made

    def _tensors(self, start: int, stop: int, device: Any) -> list[torch.Tensor]:
        """The tensors of storages [start, stop), which are all of one kind: made together they take
        half the time."""
        leaf, image = divmod(int(self._kinds[start]), len(self.record.image_kinds))
        kind = self.record.kinds[leaf]
        shape = kind.shape
        if kind.sharding >= 0:
            shape = self.record.image_kinds[image].boxes[0][1]
        try:
            one = torch.empty(shape, dtype=t.DTYPES[kind.dtype], device=device)
            tensors = [one, *map(torch.empty_like, repeat(one, stop - start - 1))]
        except (RuntimeError, MemoryError, AssertionError) as fault:
            what = f"{kind.dtype} {shape} on {device}"
            raise MismatchError(f"no memory for {what}: {fault}") from None
        if kind.flags == 0 and kind.sharding < 0:
            leaves = self._rows.leaves[self._owner[self._storages.firsts[start:stop]]]
            for index, tensor in zip(leaves.tolist(), tensors, strict=True):
                self._ready[index] = tensor
        return tensors

    @gc_paused()
    def make(self) -> None:
        leaves, tree, rank = self._ready, self._rows.tree, self._options.rank
        missing = [index for index, leaf in enumerate(leaves) if leaf is None]
        records: Sequence[m.Leaf] = self._rows
        if len(missing) > _MANY:
            records = list(records)  # all at once are cheaper than one by one
        for index in missing:
            leaves[index] = make_leaf(records[index], self._path(index), self._part, rank)
        self._landed = Landed(unflatten(tree, leaves), [], [])

    def finish(self) -> Landed:
        return self._landed

    def _part(self, part: m.TensorLeaf) -> torch.Tensor:
        if part.storage < 0:
            return without_bytes(part, self._place_of_empty(part.flags))
        return self.held.part(part)

    def _place_of_empty(self, flags: int) -> torch.device | str:
        if flags & m.META:
            return "meta"
        if self._options.device is not None:
            return self._options.device
        if not flags & m.ON_DEVICE:
            return _HOST
        kinds = self.record.used_devices - {"cpu"}
        return _local_device(min(kinds, default="cuda"))


class _NewStorages:
    """The storages of a record's images, in order: the first image and the bytes of each, and
    whether it has no other. `numbers` has the storage of each image."""

    def __init__(self, record: Record) -> None:
        every: Numbers = np.arange(record.images)
        self.numbers = every if record.storage_of is None else record.storage_of
        self.firsts: Numbers = np.flatnonzero(np.diff(self.numbers, prepend=-1))
        lasts = np.append(self.firsts[1:], record.images)[: record.images] - 1
        starts = record.box_starts
        self.sizes: Numbers = starts[lasts] + record.box_bytes[lasts] - starts[self.firsts]
        self.alone: Marks = lasts == self.firsts


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
