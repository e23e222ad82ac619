"""New tensors for a received state. Nobody sees them before `commit` returns.

Each has a storage of its own, unless they were ties where they come from: keeping one of them never
keeps the memory of another.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.runs import Runs
from torchrelay.landing.checks.shards import check_shards
from torchrelay.landing.commit.ending import LandingEnd
from torchrelay.landing.leaves import check_leaf, check_records, make_leaf, strides_of
from torchrelay.landing.places import ImageMemory, Landed, OwnTensor, Places, chunks_of
from torchrelay.landing.terms import Terms
from torchrelay.landing.workspace import LARGE_BYTES, Workspace, allocate, large_rooms
from torchrelay.plan.offer import OfferedState
from torchrelay.record import manifest as m
from torchrelay.record.columns import Numbers, by_device, devices_of, others_of, sizes_of, table_of
from torchrelay.record.manifest import parts
from torchrelay.record.pause import gc_paused
from torchrelay.state import tensors as t
from torchrelay.state.leaves import is_plain
from torchrelay.state.paths import LeafPaths, Path
from torchrelay.state.tree import check_types, has_records, unflatten

_data_ptr = torch.Tensor.data_ptr
_HOST = torch.device("cpu")
_NOT_YET = object()
_PART = 2048  # storages whose homes are made at a time
_MANY = 256  # leaves that are asked for one by one
_SHARED = -1  # storages of several leaves, or of parts of one


class NewTensors(LandingEnd):
    anew = True

    def __init__(
        self,
        offer: OfferedState,
        terms: Terms,
        means: Workspace,
    ) -> None:
        self._manifest = manifest = offer.anew()
        check_types(manifest.tree)
        check_records(manifest.tree, manifest.leaves)
        self._shards = terms.shards
        self._rank = terms.rank
        self._device = device = terms.device
        self._put = partial(means.copy, alone=False)
        self.chunks = chunks_of(manifest)
        self._ready: list[object] = [None] * len(manifest.leaves)
        self._table = table_of(manifest.leaves)
        self._sizes = sizes_of(manifest.storages)
        self._owner, hosted = self._owners()
        where = by_device(manifest.storages, lambda kind: _place(device or _local_device(kind)))
        for index in hosted:
            where[index] = _HOST
        self._where = where
        self._on_host = where.count(_HOST) == len(where)
        self.on_device = not self._on_host
        self._rooms = self._large_rooms(offer, means)
        self._kinds = self._kind_of_each()
        self._whole: set[int] = set()
        self._homes: list[torch.Tensor] = []
        # By a proxy: a landing that is given up goes at once, and its memory with it.
        coming = NewTensors._made_by_and_by(weakref.proxy(self))
        self._host = Places(coming, Runs([], [], []), making=len(self._sizes) > _PART)
        if self.on_device:
            self._complete()

    def _owners(self) -> tuple[Numbers, set[int]]:
        """The tensor (its row) that each storage is of, if of one alone; storages of arrays."""
        table, leaves = self._table, self._manifest.leaves
        for number, kind in enumerate(table.kinds):
            if kind.dtype not in t.DTYPES:
                for row in np.flatnonzero(table.numbers == number)[:1].tolist():
                    check_leaf(table.record(row), self._paths[int(table.rows[row])])
        rows = np.flatnonzero(table.storages >= 0)
        storages = table.storages[rows]
        owners: Numbers = np.full(len(self._sizes), _SHARED, np.int64)
        owners[storages] = rows
        owners[np.bincount(storages, minlength=len(owners)) > 1] = _SHARED
        hosted = set()
        for index, leaf in others_of(leaves).items():
            if is_plain(leaf):
                continue
            check_leaf(leaf, self._paths[index])
            check_shards(leaf, self._paths[index], self._shards)
            for part in parts(leaf):
                if part.storage >= 0:
                    owners[part.storage] = _SHARED
                    if isinstance(leaf, m.ArrayLeaf):
                        hosted.add(part.storage)
        return owners, hosted

    def _large_rooms(self, offer: OfferedState, means: Workspace) -> dict[int, torch.Tensor]:
        large = np.flatnonzero(self._sizes >= LARGE_BYTES).tolist()
        large = [index for index in large if self._where[index] == _HOST]
        found = {index: offer.filled(index) for index in large}
        filled = {index: room for index, room in found.items() if room is not None}
        empty = {index: int(self._sizes[index]) for index in large if index not in filled}
        return {**filled, **large_rooms(empty, means)}

    def _made_by_and_by(self) -> Iterator[Runs]:
        """Make the homes of storages, some at a time; tells of those in host memory."""
        for low in range(0, len(self._sizes), _PART):
            high = min(low + _PART, len(self._sizes))
            addresses = np.array(self._make(low, high), np.uint64)
            host = np.flatnonzero(addresses)
            sizes = self._sizes[low:high].astype(np.uint64)
            yield Runs(self.chunks.places[low:high][host], addresses[host], sizes[host])

    def _complete(self) -> Runs:
        """Make what is left to make; all that is in host memory."""
        return self._host.host

    def _make(self, low: int, high: int) -> list[int]:
        """Make the homes of these storages. The address of each, 0 for those on devices."""
        kinds, where = self._kinds[low:high], self._where[low:high]
        addresses: list[int] = []
        for start, stop in _runs(kinds, where):
            if kinds[start] >= 0:
                homes = self._tensors(low + start, low + stop, int(kinds[start]), where[start])
            else:
                homes = [self._room(index) for index in range(low + start, low + stop)]
            self._homes += homes
            addresses += map(_data_ptr, homes) if where[start] == _HOST else [0] * len(homes)
        return addresses

    def _room(self, index: int) -> torch.Tensor:
        room = self._rooms.get(index)
        return allocate(int(self._sizes[index]), self._where[index]) if room is None else room

    def _kind_of_each(self) -> Numbers:
        """The kind of tensor that each storage is, -1 where it takes a view to make one of it.

        A tensor itself is cheaper than a view, and the common case by far.
        """
        table, odd = self._table, m.CONJ | m.NEG
        plain = np.array([k.strides is None and not k.flags & odd for k in table.kinds], bool)
        row = np.maximum(self._owner, 0)
        if not len(table.rows):
            return np.full(len(row), -1, np.int64)
        number = table.numbers[row]
        fine = (self._owner >= 0) & plain[number] & (table.offsets[row] == 0)
        fine[list(self._rooms)] = False
        return np.where(fine, number, -1)

    def _tensors(self, start: int, stop: int, number: int, device: Any) -> list[torch.Tensor]:
        """The tensors of storages [start, stop), which are all of one kind: made together they take
        half the time."""
        kind = self._table.kinds[number]
        try:
            one = torch.empty(kind.shape, dtype=t.DTYPES[kind.dtype], device=device)
            tensors = [one, *map(torch.empty_like, repeat(one, stop - start - 1))]
        except (RuntimeError, MemoryError, AssertionError) as fault:
            what = f"{kind.dtype} {kind.shape} on {device}"
            raise MismatchError(f"no memory for {what}: {fault}") from None
        self._whole.update(range(start, stop))
        if kind.flags == 0:
            leaves = self._table.rows[self._owner[start:stop]]
            first, last = int(leaves[0]), int(leaves[-1])
            if last - first == stop - start - 1 and (leaves[1:] > leaves[:-1]).all():
                self._ready[first : last + 1] = tensors
            else:
                for leaf, tensor in zip(leaves.tolist(), tensors, strict=True):
                    self._ready[leaf] = tensor
        return tensors

    @cached_property
    def _paths(self) -> LeafPaths:
        return LeafPaths(self._manifest.tree)

    def places(self) -> Places:
        if self._on_host:
            return self._host
        host = self._complete()
        there = np.array([not home.is_cpu for home in self._homes], bool)
        columns = (self.chunks.places, list(map(_data_ptr, self._homes)), self._sizes)
        device = Runs.unordered(*(np.asarray(column, np.uint64)[there] for column in columns))
        return Places([host], device)

    def write(self, index: int, data: torch.Tensor) -> None:
        begin = self.chunks.offsets[index]
        end = begin + self.chunks.sizes[index]
        places = self._complete()
        if places.reaches(begin, end):
            host = data.cpu()
            places.scatter(begin, end, host.data_ptr(), self._put)
        if self._on_host:
            return
        for storage, start, stop, at in self.chunks.extents(index):
            home = self._homes[storage]
            if not home.is_cpu:
                piece = t.flat_bytes(home.untyped_storage(), start, stop - start)
                piece.copy_(data[at : at + stop - start])

    def arrived(self) -> None:
        with gc_paused():
            self._state  # noqa: B018

    @cached_property
    def _state(self) -> Any:
        """The state, where no byte of it has a say in what it is made of."""
        self._complete()
        # Tensors are not to be compared with None.
        if type(None) in set(map(type, self._ready)) or has_records(self._manifest.tree):
            return _NOT_YET
        return unflatten(self._manifest.tree, self._ready)

    def own(self) -> Iterator[OwnTensor]:
        return iter(())

    def held(self) -> Iterator[ImageMemory]:
        self._complete()
        return (
            ImageMemory(image, home.untyped_storage(), 0) for image, home in enumerate(self._homes)
        )

    def make(self) -> None:
        with gc_paused():
            state = self._state
            self._landed = Landed(self._built() if state is _NOT_YET else state, [], [])

    def tell(self) -> None:
        pass

    def take_back(self) -> list[Path]:
        return []

    def finish(self) -> Landed:
        return self._landed

    def _built(self) -> object:
        leaves = self._ready
        missing = [index for index, leaf in enumerate(leaves) if leaf is None]
        records: Sequence[m.Leaf] = self._manifest.leaves
        if len(missing) > _MANY:
            records = tuple(records)  # all at once are cheaper than each by itself
        for index in missing:
            leaves[index] = make_leaf(records[index], self._paths[index], self._part, self._rank)
        return unflatten(self._manifest.tree, leaves)

    def _part(self, part: m.TensorLeaf) -> torch.Tensor:
        if part.storage < 0:
            return t.without_storage(part, strides_of(part), self._place_of_empty(part.flags))
        home = self._homes[part.storage]
        if part.storage in self._whole:
            return t.with_flags(home, part.flags)
        return t.over_storage(home.untyped_storage(), part.offset, part, strides_of(part))

    def _place_of_empty(self, flags: int) -> torch.device | str:
        if flags & m.META:
            return "meta"
        if self._device is not None:
            return self._device
        if not flags & m.ON_DEVICE:
            return _HOST
        kinds = devices_of(self._manifest.storages) - {"cpu"}
        return _local_device(min(kinds, default="cuda"))


def _runs(kinds: Numbers, where: list[Any]) -> Iterator[tuple[int, int]]:
    """Storages [start, stop) that follow each other and are of one kind, on one device."""
    if not where:
        return
    ends = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    if where.count(where[0]) < len(where):  # mostly all are one object
        moves = [n for n in range(1, len(where)) if where[n] != where[n - 1]]
        ends = np.union1d(ends, np.array(moves, np.int64))
    yield from pairwise([0, *ends.tolist(), len(kinds)])


def _place(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return _HOST if device.type == "cpu" else device


def place_for(storage: m.Storage, device: torch.device | None) -> torch.device:
    """Where a new tensor goes: to the device asked for, or to the kind that it comes from."""
    return _place(device or _local_device(storage.device))


def _local_device(kind: str) -> str:
    """The same kind of device here if there is one, else host memory."""
    try:
        torch.device(kind)
    except RuntimeError:
        return "cpu"
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    return kind if available is not None and available() else "cpu"
