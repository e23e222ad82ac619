"""New tensors for a received state. Nobody sees them before `commit` returns.

Each has a storage of its own, unless they shared one where they come from: keeping one of them
never keeps the memory of another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
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
from torchrelay.landing.leaves import check_leaf, check_records, make_leaf, without_bytes
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.places import Landed, Places, chunks_of
from torchrelay.landing.workspace import LARGE_BYTES, Workspace, allocate
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.pause import gc_paused
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.leaves import is_plain
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import check_types, has_records, unflatten

_data_ptr = torch.Tensor.data_ptr
_HOST = torch.device("cpu")
_NOT_YET = object()
_PART = 2048  # storages that are made at a time
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
        check_types(rows.tree)
        check_records(rows.tree, rows)
        self._options = options
        self._copy = partial(workspace.copy, alone=False)
        self.chunks = chunks_of(record)
        self._ready: list[object] = [None] * len(rows)
        self._storages = _NewStorages(record)
        owner, hosted = self._owners()
        # The device of each storage is that of its first image.
        self._devices = [place_for(kind, options.device) for kind in record.devices] + [_HOST]
        self._where: Numbers = record.image_devices[self._storages.firsts]
        self._where[self._storages.numbers[list(hosted)]] = len(record.devices)
        self._far: Marks = np.array([one != _HOST for one in self._devices], bool)[self._where]
        self._buffers = self._large(filled, workspace)
        self._kinds = self._kind_of_each(owner)
        self._owner = owner
        self._held = held = HeldImages(self.chunks)
        firsts, held.numbers = self._storages.firsts, self._storages.numbers
        held.offsets = self.chunks.places - self.chunks.places[firsts[held.numbers]]
        # By a proxy: a landing that is given up goes at once, and its memory with it.
        coming = NewTensors._make_some(weakref.proxy(self))
        self._places = Places(coming, making=len(firsts) > _PART)
        if self._far.any():
            host = [self._places.host]
            self._places = Places(host, held.runs(far=True), held.far_bytes)

    def _owners(self) -> tuple[Numbers, set[int]]:
        """The row that each image is of, if it is of one alone; images of arrays."""
        rows, record = self._rows, self.record
        for number, kind in enumerate(record.kinds):
            if kind.dtype not in t.DTYPES:
                for row in np.flatnonzero(rows.kinds == number)[:1].tolist():
                    check_leaf(rows.row(row), self._paths[int(rows.leaves[row])])
        self._check_shards()
        owners: Numbers = np.full(record.images, _SEVERAL, np.int64)
        owners[rows.images] = np.arange(len(rows.images))
        if not (rows.images[1:] > rows.images[:-1]).all():  # ascending ones are different
            owners[np.bincount(rows.images, minlength=len(owners)) > 1] = _SEVERAL
        hosted = set()
        for index, leaf in rows.others.items():
            if is_plain(leaf):
                continue
            check_leaf(leaf, self._paths[index])
            check_shards(leaf, self._paths[index], self._options.shards)
            for part in parts(leaf):
                if part.storage >= 0:
                    owners[part.storage] = _SEVERAL
                    if isinstance(leaf, m.ArrayLeaf):
                        hosted.add(part.storage)
        return owners, hosted

    def _check_shards(self) -> None:
        """Whether parts of distributed tensors are this rank's; each kind of them once."""
        rows = self._rows
        if not rows.is_sharded.any():
            return
        some = np.flatnonzero(rows.is_sharded)
        count = len(self.record.image_kinds)
        kinds = rows.kinds[some] * count + self.record.image_kind[rows.images[some]]
        _, firsts = np.unique(kinds, return_index=True)
        for row in some[firsts].tolist():
            path = self._paths[int(rows.leaves[row])]
            check_shards(rows.row(row), path, self._options.shards)

    def _large(self, filled: Filled | None, workspace: Workspace) -> dict[int, torch.Tensor]:
        sizes = self._storages.sizes
        large = np.flatnonzero((sizes >= LARGE_BYTES) & ~self._far).tolist()
        ready: dict[int, torch.Tensor] = {}
        for home in large:
            room = None if filled is None else filled(int(self._storages.firsts[home]))
            if room is not None:
                ready[home] = room
        empty = [home for home in large if home not in ready]
        return {**ready, **dict(zip(empty, workspace.buffers(sizes[empty].tolist()), strict=True))}

    def _make_some(self) -> Iterator[Runs]:
        """Make storages, some at a time; gives those in host memory."""
        firsts, sizes = self._storages.firsts, self._storages.sizes
        for low in range(0, len(firsts), _PART):
            high = min(low + _PART, len(firsts))
            addresses = np.array(self._make(low, high), np.uint64)
            host = np.flatnonzero(addresses)
            starts = self.chunks.places[firsts[low:high][host]]
            yield Runs(starts, addresses[host], sizes[low:high][host].astype(np.uint64))

    @property
    def held(self) -> HeldImages:
        """Complete: what is left to make is made."""
        self._places.host  # noqa: B018
        return self._held

    def _make(self, low: int, high: int) -> list[int]:
        """Make these storages. The address of each, 0 for those on devices."""
        both = self._kinds[low:high] * len(self._devices) + self._where[low:high]
        ends = low + 1 + np.flatnonzero(np.diff(both))
        addresses: list[int] = []
        for start, stop in pairwise([low, *ends.tolist(), high]):
            device, far = self._devices[int(self._where[start])], bool(self._far[start])
            if self._kinds[start] >= 0:
                made = self._tensors(start, stop, device)
            else:
                made = [
                    self._buffers[home]
                    if home in self._buffers
                    else allocate(int(self._storages.sizes[home]), device)
                    for home in range(start, stop)
                ]
            self._held.memory += made
            self._held.far += [far] * len(made)
            addresses += [0] * len(made) if far else map(_data_ptr, made)
        return addresses

    def _kind_of_each(self, owner: Numbers) -> Numbers:
        """A number for the kinds of leaf and image of each storage that is one tensor; -1 where it
        takes a view to make a leaf of it.

        A tensor itself is cheaper than a view, and the common case by far.
        """
        record, rows, firsts = self.record, self._rows, self._storages.firsts
        if not len(rows.leaves) or not len(firsts):
            return np.full(len(firsts), _NONE, np.int64)
        plain = np.array([not kind.flags & (m.CONJ | m.NEG) for kind in record.kinds], bool)
        straight = np.array([kind.strides is None for kind in record.image_kinds], bool)
        row = np.maximum(owner[firsts], 0)
        kinds, images = rows.kinds[row], record.image_kind[firsts]
        fine = (owner[firsts] >= 0) & self._storages.alone & rows.is_image[row]
        fine &= plain[kinds] & straight[images]
        fine[list(self._buffers)] = False
        return np.where(fine, kinds * len(straight) + images, _NONE)

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

    @cached_property
    def _paths(self) -> LeafPaths:
        return LeafPaths(self._rows.tree)

    def arrived(self) -> None:
        with gc_paused():
            self._state  # noqa: B018

    @cached_property
    def _state(self) -> Any:
        """The state, where no byte of it has a say in what it is made of."""
        self._places.host  # noqa: B018
        # Tensors are not to be compared with None.
        if type(None) in set(map(type, self._ready)) or has_records(self._rows.tree):
            return _NOT_YET
        return unflatten(self._rows.tree, self._ready)

    def make(self) -> None:
        with gc_paused():
            state = self._state
            self._landed = Landed(self._built() if state is _NOT_YET else state, [], [])

    def finish(self) -> Landed:
        return self._landed

    def _built(self) -> object:
        leaves = self._ready
        missing = [index for index, leaf in enumerate(leaves) if leaf is None]
        records: Sequence[m.Leaf] = self._rows
        if len(missing) > _MANY:
            records = list(records)  # all at once are cheaper than one by one
        for index in missing:
            path = self._paths[index]
            leaves[index] = make_leaf(records[index], path, self._part, self._options.rank)
        return unflatten(self._rows.tree, leaves)

    def _part(self, part: m.TensorLeaf) -> torch.Tensor:
        if part.storage < 0:
            return without_bytes(part, self._place_of_empty(part.flags))
        number = int(self._held.numbers[part.storage])
        if self._kinds[number] != _NONE:
            return t.with_flags(self._held.memory[number], part.flags)
        return self._held.part(part)

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
