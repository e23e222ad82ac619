"""Tensor leaves and storages in columns.

A state may have tens of thousands of small tensors, of few kinds. A record for each costs more than
moving its bytes, so where they come from columns they stay in them: `Leaves` and `Storages` are the
tuples of a `Manifest`, and make a record when somebody asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, overload

import msgspec
import numpy as np

from torchrelay.record import manifest as m

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Record = TypeVar("Record")
_encode = msgspec.msgpack.Encoder().encode


class Kind(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What tensor leaves have in common apart from where they lie. As in `TensorLeaf`."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    flags: int


class Table(NamedTuple):
    """Tensor leaves: which leaves of the state they are, in order, and what each consists of."""

    rows: Numbers
    kinds: Sequence[Kind]
    numbers: Numbers  # of each, its kind
    storages: Numbers
    offsets: Numbers

    def record(self, at: int) -> m.TensorLeaf:
        kind = self.kinds[int(self.numbers[at])]
        storage, offset = int(self.storages[at]), int(self.offsets[at])
        return m.TensorLeaf(kind.dtype, kind.shape, kind.strides, storage, offset, kind.flags)

    def records(self) -> list[m.TensorLeaf]:
        Leaf = m.TensorLeaf
        columns = (self.numbers.tolist(), self.storages.tolist(), self.offsets.tolist())
        return [
            Leaf(kind.dtype, kind.shape, kind.strides, storage, offset, kind.flags)
            for kind, storage, offset in zip(
                map(self.kinds.__getitem__, columns[0]), *columns[1:], strict=True
            )
        ]


class RecordSequence(Sequence[Record]):
    """A sequence that is equal to a tuple of the same records."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, (tuple, RecordSequence)):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | Sequence[Record]:
        if isinstance(index, slice):
            return tuple(self)[index]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._record(index % len(self))

    def _record(self, index: int) -> Record:
        raise NotImplementedError


class Leaves(RecordSequence[m.Leaf]):
    """Tensors in a table, and the other leaves by their numbers."""

    def __init__(self, table: Table, others: Mapping[int, m.Leaf]) -> None:
        self.table = table
        self.others = others

    @classmethod
    def of(cls, table: Table, records: Mapping[int, m.Leaf]) -> Leaves:
        """The table with those of the records that are tensors, and the others."""
        tensors = {n: leaf for n, leaf in records.items() if type(leaf) is m.TensorLeaf}
        if not tensors:
            return cls(table, records)
        others = {n: leaf for n, leaf in records.items() if n not in tensors}
        return cls(_merged(table, np.array(list(tensors)), list(tensors.values())), others)

    def __len__(self) -> int:
        return len(self.table.rows) + len(self.others)

    def __iter__(self) -> Iterator[m.Leaf]:
        return iter(self._all)

    @cached_property
    def _all(self) -> tuple[m.Leaf, ...]:
        records: list[Any] = self.table.records()
        if not self.others:
            return tuple(records)
        found: list[Any] = [None] * len(self)
        for index, record in zip(self.table.rows.tolist(), records, strict=True):
            found[index] = record
        for index, other in self.others.items():
            found[index] = other
        return tuple(found)

    def _record(self, index: int) -> m.Leaf:
        if index in self.others:
            return self.others[index]
        return self.table.record(int(np.searchsorted(self.table.rows, index)))


class Storages(RecordSequence[m.Storage]):
    """Sizes, and devices by number; all are on the first one where there are no numbers."""

    def __init__(self, sizes: Numbers, devices: Sequence[str], numbers: Numbers | None) -> None:
        self.sizes = sizes
        self.devices = devices
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[m.Storage]:
        return map(self._record, range(len(self)))

    def _record(self, index: int) -> m.Storage:
        device = 0 if self.numbers is None else int(self.numbers[index])
        return m.Storage(int(self.sizes[index]), self.devices[device])


def table_of(leaves: Sequence[m.Leaf]) -> Table:
    """The tensor leaves among these."""
    if isinstance(leaves, Leaves):
        return leaves.table
    if {m.TensorLeaf}.issuperset(map(type, leaves)):
        return _table(np.arange(len(leaves)), leaves)
    rows = [n for n, leaf in enumerate(leaves) if type(leaf) is m.TensorLeaf]
    return _table(np.array(rows, np.int64), [leaves[n] for n in rows])


def _table(rows: Numbers, tensors: Sequence[Any]) -> Table:
    kinds = [Kind(leaf.dtype, leaf.shape, leaf.strides, leaf.flags) for leaf in tensors]
    known: dict[bytes, int] = {}  # by their encoding: a peer's numbers may hash alike
    keys = map(_encode, kinds)
    numbers = np.array([known.setdefault(key, len(known)) for key in keys], np.int64)
    firsts = dict(zip(reversed(numbers.tolist()), reversed(kinds), strict=True))
    storages = np.array([leaf.storage for leaf in tensors], np.int64)
    offsets = np.array([leaf.offset for leaf in tensors], np.int64)
    return Table(rows, [firsts[n] for n in range(len(known))], numbers, storages, offsets)


def _merged(table: Table, rows: Numbers, tensors: Sequence[Any]) -> Table:
    more = _table(rows, tensors)
    order = np.argsort(np.concatenate([table.rows, rows]), kind="stable")
    columns = (
        (table.rows, rows),
        (table.numbers, more.numbers + len(table.kinds)),
        (table.storages, more.storages),
        (table.offsets, more.offsets),
    )
    where, numbers, storages, offsets = (np.concatenate(pair)[order] for pair in columns)
    return Table(where, [*table.kinds, *more.kinds], numbers, storages, offsets)


def others_of(leaves: Sequence[m.Leaf]) -> Mapping[int, m.Leaf]:
    """The leaves that are no tensors in the table, by their numbers."""
    if isinstance(leaves, Leaves):
        return leaves.others
    return {n: leaf for n, leaf in enumerate(leaves) if type(leaf) is not m.TensorLeaf}


def sizes_of(storages: Sequence[m.Storage]) -> Numbers:
    if isinstance(storages, Storages):
        return storages.sizes
    return np.array([storage.nbytes for storage in storages], np.int64)


def devices_of(storages: Sequence[m.Storage]) -> set[str]:
    """The kinds of devices that the storages come from."""
    if isinstance(storages, Storages):
        numbers = storages.numbers
        used = range(min(len(storages), 1)) if numbers is None else np.unique(numbers).tolist()
        return {storages.devices[number] for number in used}
    return {storage.device for storage in storages}


def by_device(storages: Sequence[m.Storage], of: Callable[[str], Record]) -> list[Record]:
    """What `of` says of the device of each storage; it is asked once for each device."""
    if isinstance(storages, Storages):
        numbers = storages.numbers
        if numbers is None:
            return [of(storages.devices[0])] * len(storages) if len(storages) else []
        found = {number: of(storages.devices[number]) for number in np.unique(numbers).tolist()}
        return [found[number] for number in numbers.tolist()]
    known = {device: of(device) for device in devices_of(storages)}
    return [known[storage.device] for storage in storages]
