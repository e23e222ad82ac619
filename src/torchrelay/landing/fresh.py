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
from torchrelay.landing.leaves import (
    check_leaf,
    check_records,
    make_leaf,
    strides_of,
    without_bytes,
)
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.places import ImageMemory, Landed, Places, chunks_of
from torchrelay.landing.workspace import LARGE_BYTES, Workspace, allocate
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.pause import gc_paused
from torchrelay.record.rows import LeafRows
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
        self._put = partial(workspace.copy, alone=False)
        self.chunks = chunks_of(record)
        self._ready: list[object] = [None] * len(rows)
        self._homes = _Homes(record)
        owner, hosted = self._owners()
        self._where = self._devices(hosted)
        self._on_host = self._where.count(_HOST) == len(self._where)
        self.on_device = not self._on_host
        self._buffers = self._large(filled, workspace)
        self._kinds = self._kind_of_each(owner)
        self._owner = owner
        self._whole: set[int] = set()  # storages that are a tensor of the state
        self._made: list[torch.Tensor] = []  # by storage
        # By a proxy: a landing that is given up goes at once, and its memory with it.
        coming = NewTensors._make_some(weakref.proxy(self))
        self._host = Places(coming, Runs([], [], []), making=len(self._homes) > _PART)
        if self.on_device:
            self._complete()

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

    def _devices(self, hosted: set[int]) -> list[torch.device]:
        """The device of each storage: that of its first image."""
        device, record = self._options.device, self.record
        names = [place_for(kind, device) for kind in record.devices]
        if record.device_of is None:
            where = [names[0]] * len(self._homes) if len(self._homes) else []
        else:
            numbers = record.image_devices[self._homes.firsts]
            where = [names[number] for number in numbers.tolist()]
        for image in hosted:
            where[self._homes.number(image)] = _HOST
        return where

    def _large(self, filled: Filled | None, workspace: Workspace) -> dict[int, torch.Tensor]:
        sizes = self._homes.sizes
        large = np.flatnonzero(sizes >= LARGE_BYTES).tolist()
        large = [home for home in large if self._where[home] == _HOST]
        ready: dict[int, torch.Tensor] = {}
        for home in large:
            room = None if filled is None else filled(int(self._homes.firsts[home]))
            if room is not None:
                ready[home] = room
        empty = {home: int(sizes[home]) for home in large if home not in ready}
        return {**ready, **workspace.large_buffers(empty)}

    def _make_some(self) -> Iterator[Runs]:
        """Make storages, some at a time; gives those in host memory."""
        homes = self._homes
        for low in range(0, len(homes), _PART):
            high = min(low + _PART, len(homes))
            addresses = np.array(self._make(low, high), np.uint64)
            host = np.flatnonzero(addresses)
            starts = self.chunks.places[homes.firsts[low:high][host]]
            yield Runs(starts, addresses[host], homes.sizes[low:high][host].astype(np.uint64))

    def _complete(self) -> Runs:
        """Make what is left to make; all that is in host memory."""
        return self._host.host

    def _make(self, low: int, high: int) -> list[int]:
        """Make these storages. The address of each, 0 for those on devices."""
        kinds, where = self._kinds[low:high], self._where[low:high]
        addresses: list[int] = []
        for start, stop in _runs(kinds, where):
            if kinds[start] >= 0:
                made = self._tensors(low + start, low + stop, where[start])
            else:
                made = [
                    self._buffers[home]
                    if home in self._buffers
                    else allocate(int(self._homes.sizes[home]), self._where[home])
                    for home in range(low + start, low + stop)
                ]
            self._made += made
            addresses += map(_data_ptr, made) if where[start] == _HOST else [0] * len(made)
        return addresses

    def _kind_of_each(self, owner: Numbers) -> Numbers:
        """A number for the kinds of leaf and image of each storage that is one tensor; -1 where it
        takes a view to make a leaf of it.

        A tensor itself is cheaper than a view, and the common case by far.
        """
        record, rows, homes = self.record, self._rows, self._homes
        if not len(rows.leaves) or not len(homes):
            return np.full(len(homes), _NONE, np.int64)
        plain = np.array([not kind.flags & (m.CONJ | m.NEG) for kind in record.kinds], bool)
        straight = np.array([kind.strides is None for kind in record.image_kinds], bool)
        row = np.maximum(owner[homes.firsts], 0)
        kinds, images = rows.kinds[row], record.image_kind[homes.firsts]
        fine = (owner[homes.firsts] >= 0) & homes.alone & rows.is_image[row]
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
        self._whole.update(range(start, stop))
        if kind.flags == 0 and kind.sharding < 0:
            leaves = self._rows.leaves[self._owner[self._homes.firsts[start:stop]]]
            first, last = int(leaves[0]), int(leaves[-1])
            if last - first == stop - start - 1 and (leaves[1:] > leaves[:-1]).all():
                self._ready[first : last + 1] = tensors
            else:
                for index, tensor in zip(leaves.tolist(), tensors, strict=True):
                    self._ready[index] = tensor
        return tensors

    @cached_property
    def _paths(self) -> LeafPaths:
        return LeafPaths(self._rows.tree)

    def places(self) -> Places:
        if self._on_host:
            return self._host
        host = self._complete()
        there = np.array([not made.is_cpu for made in self._made], bool)
        starts = self.chunks.places[self._homes.firsts]
        columns = (starts, list(map(_data_ptr, self._made)), self._homes.sizes)
        device = Runs.unordered(*(np.asarray(column, np.uint64)[there] for column in columns))
        return Places([host], device)

    def put(self, start: int, stop: int, data: torch.Tensor) -> None:
        places = self._complete()
        if places.reaches(start, stop):
            host = data.cpu()
            places.scatter(start, stop, host.data_ptr(), self._put)
        if self._on_host:
            return
        for image, first, last, at in self.chunks.within(start, stop):
            home, offset = self._home(image)
            if not home.is_cpu:
                piece = t.flat_bytes(home.untyped_storage(), offset + first, last - first)
                piece.copy_(data[at : at + last - first])

    def _home(self, image: int) -> tuple[torch.Tensor, int]:
        """The storage of an image, and where in it the image starts."""
        number = self._homes.number(image)
        first = int(self._homes.firsts[number])
        return self._made[number], self.chunks.start_of(image) - self.chunks.start_of(first)

    def arrived(self) -> None:
        with gc_paused():
            self._state  # noqa: B018

    @cached_property
    def _state(self) -> Any:
        """The state, where no byte of it has a say in what it is made of."""
        self._complete()
        # Tensors are not to be compared with None.
        if type(None) in set(map(type, self._ready)) or has_records(self._rows.tree):
            return _NOT_YET
        return unflatten(self._rows.tree, self._ready)

    def held(self) -> Iterator[ImageMemory]:
        self._complete()
        return map(self.memory_of, range(self.record.images))

    def memory_of(self, image: int) -> ImageMemory:
        self._complete()
        home, offset = self._home(image)
        return ImageMemory(image, home.untyped_storage(), offset)

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
        home, offset = self._home(part.storage)
        if self._homes.number(part.storage) in self._whole:
            return t.with_flags(home, part.flags)
        return t.over_storage(home.untyped_storage(), offset + part.offset, part, strides_of(part))

    def _place_of_empty(self, flags: int) -> torch.device | str:
        if flags & m.META:
            return "meta"
        if self._options.device is not None:
            return self._options.device
        if not flags & m.ON_DEVICE:
            return _HOST
        kinds = self.record.used_devices - {"cpu"}
        return _local_device(min(kinds, default="cuda"))


class _Homes:
    """The storages of a record's images, in order: the first image and the bytes of each."""

    def __init__(self, record: Record) -> None:
        self._storage_of = record.storage_of
        if record.storage_of is None or not record.images:
            self.firsts: Numbers = np.arange(record.images)
            self.sizes: Numbers = record.box_bytes
            self.alone: Any = np.ones(record.images, bool)
            return
        self.firsts = np.flatnonzero(np.diff(record.storage_of, prepend=-1))
        lasts = np.append(self.firsts[1:], record.images) - 1
        starts = record.box_starts
        self.sizes = starts[lasts] + record.box_bytes[lasts] - starts[self.firsts]
        self.alone = lasts == self.firsts

    def __len__(self) -> int:
        return len(self.firsts)

    def number(self, image: int) -> int:
        return image if self._storage_of is None else int(self._storage_of[image])


def _runs(kinds: Numbers, where: list[Any]) -> Iterator[tuple[int, int]]:
    """Storages [start, stop) that follow each other and are of one kind, on one device."""
    if not where:
        return
    ends = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    if where.count(where[0]) < len(where):  # mostly all are one object
        moves = [n for n in range(1, len(where)) if where[n] != where[n - 1]]
        ends = np.union1d(ends, np.array(moves, np.int64))
    yield from pairwise([0, *ends.tolist(), len(kinds)])


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
