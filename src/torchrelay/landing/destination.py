"""A destination looked over before anything is offered for it.

A receiver waits for a record anyway. Meanwhile `prepare` inspects its own tensors, and `land`
takes the result instead of the destination itself.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Column
from torchrelay.landing.checks.matching import match
from torchrelay.plan.images import reaching
from torchrelay.plan.plain import PlainTensors, find_plain
from torchrelay.plan.selection import Selection
from torchrelay.plan.sharded import find_sharded
from torchrelay.record import manifest as m
from torchrelay.record.pause import gc_paused
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import MeshSharding
from torchrelay.state.matching import Matched
from torchrelay.state.objects import Objects, flatten_objects
from torchrelay.state.optimizers import check_kind
from torchrelay.state.paths import Path
from torchrelay.state.tree import Flat, inside_records
from torchrelay.state.wrappers import without_wrappers

JUST_NOW = 0.1  # seconds: what was looked at so lately is not looked at again
Indices = np.ndarray[Any, np.dtype[np.intp]]
Marks = np.ndarray[Any, np.dtype[np.bool_]]


class PlainLayout:
    """The plain tensors of a destination, and the local parts of its distributed ones that are
    plain: kinds and addresses. Holds none of the tensors but local parts."""

    def __init__(self, flat: Flat) -> None:
        self.sharded = find_sharded(flat.leaves)
        self.locals = self.sharded.local_leaves(flat.leaves)
        nothing_else = self.sharded.nothing_else
        plain = find_plain(self.locals, offsets=False, nothing_else=nothing_else)
        lows = plain.address_of
        highs = lows + plain.nbytes
        order = np.argsort(lows)
        if (lows[order][1:] < highs[order][:-1]).any():
            keep = ~reaching(lows, highs)
            plain = plain.some(keep.tolist())
            lows, highs = lows[keep], highs[keep]
            order = np.argsort(lows)
        # Tensors that share no memory with each other.
        self.plain: PlainTensors = plain
        plain.on_host, plain.leaf_of  # noqa: B018  # asked for while there is time
        self._spans = lows[order], highs[order], order

    @cached_property
    def kinds(self) -> Numbers:
        """The kind of each: of a plain tensor that in `plain`, of a distributed one that in
        `sharded`, counted from there on."""
        return self.sharded.kinds_of(self.plain)

    @cached_property
    def spans(self) -> tuple[list[int], list[int], list[int]]:
        """First and last address of each tensor and its leaf, in order of address."""
        lows, highs, order = self._spans
        leaves = self.plain.leaves
        return lows.tolist(), highs.tolist(), [leaves[n] for n in order.tolist()]


class PreparedDestination:
    """The result of `prepare`. Until the end of the landing the caller must not change containers:
    an object that is put in a slot meanwhile is not seen. A tensor with new memory is noticed.

    It keeps the destination alive.
    """

    def __init__(self, into: object, objects: Objects, flat: Flat, layout: PlainLayout) -> None:
        self.into = into
        self.objects = objects
        self.flat = flat
        self.layout = layout
        self.inside_records = inside_records(flat.tree)  # the leaves that these are made of
        self._looked_at = time.monotonic()

    def reached(self, low: int, high: int) -> list[int]:
        """The plain leaves that have some of the host's bytes [low, high)."""
        lows, highs, leaves = self.layout.spans
        return leaves[bisect_right(highs, low) : bisect_left(lows, high)]

    @property
    def moved(self) -> bool:
        """Whether a plain tensor no longer lies where it did, if there was time for that."""
        if time.monotonic() < self._looked_at + JUST_NOW:
            return False
        plain = self.layout.plain
        return not plain.lie_in_place(plain.of(self.layout.sharded.locals_of(self.flat.leaves)))

    def match(
        self, tree: m.Node, choice: Selection, *, strict: bool, whole: bool = True
    ) -> tuple[Matched, dict[Path, m.Node]]:
        """Pair the slots of an offered tree with those here, as far as they are chosen. The offered
        state of each object that takes its own comes apart: no slot of it is paired. `whole`: the
        tree has all leaves that are offered."""
        roots = [path for path, held in self.objects.items() if not held.in_place]
        if whole and not roots and choice.plain and tree == self.flat.tree:
            return Matched([], [], [], self.flat.tree), {}
        modules = [path for path, held in self.objects.items() if held.in_place]
        tree = without_wrappers(tree, self.flat.tree, modules)
        return match(tree, self.flat.tree, roots, choice, strict=strict)

    def check_optimizers(self, offered: Mapping[Path, m.Node]) -> None:
        """`MismatchError` where an optimizer is offered the state of another kind."""
        for path, branch in offered.items():
            optimizer = self.objects[path].object
            if isinstance(optimizer, torch.optim.Optimizer):
                check_kind(optimizer, branch, path)


def prepare(into: object) -> PreparedDestination:
    """Look a destination over, for `land(record, into=prepare(into))`.

    `UnsupportedLeafError` for a container that cannot be filled.
    """
    with gc_paused():
        flat, objects = flatten_objects(into)
        return PreparedDestination(into, objects, flat, PlainLayout(flat))


Pair = tuple[int, Path, int]


class Straight(NamedTuple):
    """Bytes that go to plain tensors as they are, in columns and in the order of the stream: where
    they are there, to which address and how many; image offered, leaf of the destination."""

    at: Column
    address: Column
    nbytes: Column
    image: Indices
    leaf: Indices
    on_host: Marks

    @classmethod
    def none(cls) -> Straight:
        lengths, indices = np.zeros(0, np.uint64), np.zeros(0, np.intp)
        return cls(lengths, lengths, lengths, indices, indices, np.zeros(0, bool))

    def some(self, rows: Marks) -> Straight:
        return Straight(
            self.at[rows],
            self.address[rows],
            self.nbytes[rows],
            self.image[rows],
            self.leaf[rows],
            self.on_host[rows],
        )


_ODD = m.CONJ | m.NEG | m.META
_FEW_KINDS = 1 << 16  # combinations of kinds for which a table is small


def split(
    matched: Matched,
    rows: LeafRows,
    layout: PlainLayout,
    chunks: Chunks,
    late: Collection[int] = (),
) -> tuple[Straight, list[Pair]]:
    """The fast path of `fit`: a contiguous tensor that is offered to a plain one like it. Returns
    the bytes that go straight to plain tensors, and the pairs left for the general path.

    The leaves in `late` are left for the general path; and all are if a piece of the stream has
    several places to go, or a place several pieces, which is for `check_ties` to look at.
    """
    plain = layout.plain
    here, there, numbers = _paired(matched, plain, rows)
    fits = _fitting(layout, here, rows, there)
    if late:
        fits &= ~np.isin(rows.leaves[there], list(late))
    if not fits.all():
        here, there, numbers = here[fits], there[fits], numbers[fits]
    if matched.tree is None and len(here):  # a tied tensor is there more than once
        _, once = np.unique(here * len(rows.leaves) + there, return_index=True)
        here, there = here[once], there[once]
        if len(np.unique(here)) < len(here):
            return Straight.none(), matched.pairs
    images = rows.images[there]
    at = chunks.places[images] + rows.offsets[there].astype(np.uint64)
    if (at[1:] < at[:-1]).any():
        order = np.argsort(at, kind="stable")
        here, at, images = here[order], at[order], images[order]
    pieces = Straight(
        at,
        plain.address_of[here],
        plain.nbytes[here],
        images,
        plain.leaf_of[here],
        plain.on_host[here],
    )
    if (pieces.at[1:] < pieces.at[:-1] + pieces.nbytes[:-1]).any():
        return Straight.none(), matched.pairs
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
    if matched.tree is not None:
        if len(plain) == plain.count == len(rows.leaves):
            every = np.arange(plain.count)
            return every, every, every
        both, here, there = np.intersect1d(
            plain.leaf_of, rows.leaves, assume_unique=True, return_indices=True
        )
        return here, there, both
    there = _places(rows.leaves, [pair[0] for pair in matched.pairs])
    here = _places(plain.leaf_of, [pair[2] for pair in matched.pairs])
    numbers = np.flatnonzero((there >= 0) & (here >= 0))
    return here[numbers], there[numbers], numbers


def _places(ascending: Numbers, wanted: Sequence[int]) -> Indices:
    """Where in a column each number is, or -1."""
    numbers = np.array(wanted, np.int64)
    found = np.searchsorted(ascending, numbers)
    found[found == len(ascending)] = 0
    if not len(ascending):
        return np.full(len(numbers), -1, np.intp)
    return np.where(ascending[found] == numbers, found, -1)


def _fitting(layout: PlainLayout, here: Indices, rows: LeafRows, there: Indices) -> Marks:
    """Whether what each plain tensor is offered can be copied to it as it is: all of an image, or
    row-major elements in one of bytes. Each combination of kinds is looked at once."""
    if not len(here):
        return np.zeros(0, bool)
    record = rows.record
    count, images = len(record.kinds), len(record.image_kinds)
    ours = layout.kinds[here]
    offered = rows.kinds[there] * images + record.image_kind[rows.images[there]]
    combined = ours * (count * images) + offered
    most = int(combined.max()) + 1
    if most > _FEW_KINDS:
        found, combined = np.unique(combined, return_inverse=True)
    else:
        found = np.flatnonzero(np.bincount(combined))
    same: Marks = np.zeros(len(found) if most > _FEW_KINDS else most, bool)
    for place, number in enumerate(found.tolist()):
        mine, rest = divmod(number, count * images)
        at = place if most > _FEW_KINDS else number
        same[at] = _same(layout, mine, rows, *divmod(rest, images))
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
        here = plain[mine]
        return (here.dtype, here.shape, None, -1) == (
            kind.dtype,
            kind.shape,
            kind.strides,
            kind.sharding,
        )
    ours = layout.sharded.kinds[mine - len(plain)]
    if kind.sharding < 0 or (ours.dtype, ours.shape) != (kind.dtype, kind.shape):
        return False
    how = record.shardings[kind.sharding]
    if not isinstance(how, MeshSharding) or ours.mesh is None:
        return (
            not isinstance(how, MeshSharding) and ours.mesh is None and ours.box == stored.boxes[0]
        )
    return (
        record.meshes[how.mesh].shape == ours.mesh.shape
        and how.placements == ours.placements
        and how.coordinate == ours.coordinate
        and stored.boxes[0] == ours.box
    )
