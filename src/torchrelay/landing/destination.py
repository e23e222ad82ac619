"""A destination looked over before anything is offered for it.

A receiver waits for a record anyway. Meanwhile it inspects its own tensors, and `land` takes the
result instead of the destination itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Column, Runs
from torchrelay.pause import gc_paused
from torchrelay.plan.description import PlainLayout
from torchrelay.plan.images import reaching
from torchrelay.plan.plain import PlainTensors
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import MeshSharding
from torchrelay.state.matching import Matched
from torchrelay.state.objects import flatten_objects
from torchrelay.state.paths import Path
from torchrelay.state.tree import inside_records

JUST_NOW = 0.1  # seconds: what was looked at so lately is not looked at again
Indices = np.ndarray[Any, np.dtype[np.intp]]


class PreparedDestination:
    """What `land(record, into=PreparedDestination(into))` takes. Until the end of the landing the
    caller must not change containers: an object that is put in a slot meanwhile is not seen. A
    tensor with new memory is noticed.

    It keeps the destination alive. `UnsupportedLeafError` for a container that cannot be filled.
    """

    @gc_paused()
    def __init__(self, into: object) -> None:
        self.into = into
        self.flat, self.objects = flatten_objects(into)
        self.layout = PlainLayout(self.flat)
        self.inside_records = inside_records(self.flat.tree)  # the leaves that these are made of
        self._looked_at = time.monotonic()

    @property
    def moved(self) -> bool:
        """Whether a plain tensor no longer lies where it did, if there was time for that."""
        if time.monotonic() < self._looked_at + JUST_NOW:
            return False
        plain = self.layout.plain
        tensors = self.layout.sharded.local_leaves(self.flat.leaves, now=True)
        return not plain.lie_in_place(plain.of(tensors))


Pair = tuple[int, Path, int]


class Straight(NamedTuple):
    """Bytes that go to plain tensors as they are, in columns and in the order of the stream: where
    they are there, to which address and how many; image offered, leaf of the destination, and
    its GPU, or -1. Some bytes may go to several tensors."""

    at: Column
    address: Column
    nbytes: Column
    image: Indices
    leaf: Indices
    gpu: Numbers

    @classmethod
    def none(cls) -> Straight:
        lengths, indices = np.zeros(0, np.uint64), np.zeros(0, np.intp)
        return cls(lengths, lengths, lengths, indices, indices, np.zeros(0, np.int64))

    def meets(self, spans: Iterable[tuple[int, int]]) -> bool:
        """Whether a tensor has bytes at these addresses [low, high)."""
        lows, highs = np.array(list(spans), np.uint64).reshape(-1, 2).T
        lows = np.concatenate([self.address, lows])
        highs = np.concatenate([self.address + self.nbytes, highs])
        return bool(reaching(lows, highs)[: len(self.address)].any())

    @property
    def on_host(self) -> Marks:
        """Whether each goes to host memory."""
        marks: Marks = self.gpu < 0
        return marks

    @property
    def runs(self) -> Runs:
        """Where the bytes go that each go to one tensor."""
        return Runs(self.at, self.address, self.nbytes)

    def some(self, rows: Any) -> Straight:
        if rows.dtype == bool and rows.all():  # mostly
            return self
        return Straight._make(column[rows] for column in self)

    def in_order(self) -> Straight:
        """In the order of the stream."""
        if not (self.at[1:] < self.at[:-1]).any():
            return self
        return self.some(np.argsort(self.at, kind="stable"))

    def joined(self, more: Sequence[tuple[int, int, int, int, int, int]]) -> Straight:
        """With more rows; what goes to one address twice does so once."""
        if not more:
            return self
        columns = zip(self, zip(*more, strict=True), strict=True)
        both = Straight._make(np.append(old, np.array(new, old.dtype)) for old, new in columns)
        _, once = np.unique(np.stack(both[:3], axis=1), axis=0, return_index=True)
        return both.some(np.sort(once)).in_order()

    @property
    def several(self) -> Indices:
        """Images with bytes that go to several tensors."""
        ends = np.maximum.accumulate(self.at + self.nbytes)
        found: Indices = self.image[1:][self.at[1:] < ends[:-1]]
        return found


_ODD = m.CONJ | m.NEG | m.META


def split(
    matched: Matched,
    rows: LeafRows,
    layout: PlainLayout,
    chunks: Chunks,
) -> tuple[Straight, list[Pair]]:
    """The fast path of `fit`: a contiguous tensor that is offered to a plain one like it. Returns
    the bytes that go straight to plain tensors, and the pairs left for the general path.

    All are left for it if a tensor is offered several pieces, which is for `check_ties` to see.
    """
    plain = layout.plain
    here, there, numbers = _paired(matched, plain, rows)
    fits = _fitting(layout, here, rows, there)
    if not fits.all():
        here, there, numbers = here[fits], there[fits], numbers[fits]
    if matched.tree is None and len(here):  # a tied tensor is there more than once
        _, once = np.unique(here * len(rows.leaves) + there, return_index=True)
        here, there = here[once], there[once]
        if len(np.unique(here)) < len(here):
            return Straight.none(), matched.pairs
    images = rows.images[there]
    at = chunks.places[images] + rows.offsets[there].astype(np.uint64)
    pieces = Straight(
        at,
        plain.addresses[here],
        plain.nbytes[here],
        images,
        plain.leaves[here],
        plain.gpus[here],
    ).in_order()
    if matched.tree is not None and len(here) == len(rows):
        return pieces, []
    taken = set(numbers.tolist())
    if matched.tree is not None:
        return pieces, matched.some(set(range(len(rows))) - taken)
    return pieces, [pair for n, pair in enumerate(matched.pairs) if n not in taken]


def _paired(
    matched: Matched, plain: PlainTensors, rows: LeafRows
) -> tuple[Indices, Indices, Indices]:
    """Which of the plain tensors, which row it is offered, and the number of the pair: that of the
    leaf where both sides have one tree."""
    offered = mine = np.arange(len(rows))
    if matched.tree is not None and len(plain) == len(rows.leaves) == len(rows):
        return mine, mine, mine
    if matched.tree is None:
        offered = np.array([pair[0] for pair in matched.pairs], np.int64)
        mine = np.array([pair[2] for pair in matched.pairs], np.int64)
    there, here = _places(rows.leaves, len(rows), offered), _places(plain.leaves, plain.count, mine)
    numbers = np.flatnonzero((there >= 0) & (here >= 0))
    return here[numbers], there[numbers], numbers


def _places(leaves: Numbers, count: int, wanted: Numbers) -> Indices:
    """Where in a column of some of `count` leaves each of these is, or -1."""
    found: Indices = np.full(count, -1, np.intp)
    found[leaves] = np.arange(len(leaves))
    return found[wanted]


def _fitting(layout: PlainLayout, here: Indices, rows: LeafRows, there: Indices) -> Marks:
    """Whether what each plain tensor is offered can be copied to it as it is: all of an image, or
    row-major elements in one of bytes. Each combination of kinds is looked at once."""
    if not len(here):
        return np.zeros(0, bool)
    record = rows.record
    count, images = len(record.kinds), len(record.image_kinds)
    offered = rows.kinds[there] * images + record.image_kind[rows.images[there]]
    combined = layout.kinds[here] * (count * images) + offered
    found, combined = np.unique(combined, return_inverse=True)
    same: Marks = np.zeros(len(found), bool)
    for place, number in enumerate(found.tolist()):
        mine, rest = divmod(number, count * images)
        same[place] = _same(layout, mine, rows, *divmod(rest, images))
    fits: Marks = same[combined]
    return fits


def _same(layout: PlainLayout, mine: int, rows: LeafRows, leaf: int, image: int) -> bool:
    """Whether tensors of a kind here take leaves of a kind, in images of a kind, as they are."""
    record = rows.record
    kind, stored = record.kinds[leaf], record.image_kinds[image]
    if kind.flags & _ODD or stored.strides is not None:
        return False
    plain = layout.plain.kinds
    if mine < len(plain):
        same = (plain[mine].dtype, plain[mine].shape) == (kind.dtype, kind.shape)
        return same and kind.strides is None and kind.sharding < 0
    ours = layout.sharded.kinds[mine - len(plain)]
    if kind.sharding < 0 or (ours.dtype, ours.shape) != (kind.dtype, kind.shape):
        return False
    how = record.shardings[kind.sharding]
    if stored.boxes[0] != ours.box or isinstance(how, MeshSharding) != (ours.mesh is not None):
        return False
    if not isinstance(how, MeshSharding) or ours.mesh is None:
        return True
    return (
        record.meshes[how.mesh].shape == ours.mesh.shape
        and how.placements == ours.placements
        and how.coordinate == ours.coordinate
    )
