"""A destination looked over before anything is offered for it.

A receiver waits for a manifest anyway. What depends on its own tensors alone is found out in that
time by `prepare`, and `landing.land` takes the result in place of the destination itself.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Container, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Column
from torchrelay.landing.checks.matching import match
from torchrelay.landing.places import chunks_of
from torchrelay.plan.plain import Plains, Sort, look
from torchrelay.plan.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.record.columns import Kind, Numbers, Table, table_of
from torchrelay.record.compact import KnownTree
from torchrelay.record.pause import gc_paused
from torchrelay.state.matching import Matched
from torchrelay.state.objects import Objects, flatten_objects
from torchrelay.state.paths import Path
from torchrelay.state.tree import Flat, inside_records

JUST_NOW = 0.1  # seconds: what was looked at so lately is not looked at again
Indices = np.ndarray[Any, np.dtype[np.intp]]
Marks = np.ndarray[Any, np.dtype[np.bool_]]
_encode = msgspec.msgpack.Encoder().encode


class PlainLayout:
    """Tree and plain tensors of a destination: kinds and addresses. Holds none of the tensors."""

    def __init__(self, flat: Flat) -> None:
        plains = look(flat.leaves, offsets=False)
        lows = plains.places
        highs = lows + plains.nbytes
        order = np.argsort(lows)
        if (lows[order][1:] < highs[order][:-1]).any():
            keep = _apart(lows, highs)
            plains = plains.some(keep.tolist(), flat.leaves)
            lows, highs = lows[keep], highs[keep]
            order = np.argsort(lows)
        # Those whose memory no other one of them shares.
        self.plains: Plains = plains
        plains.on_host, plains.leaf_of_each  # noqa: B018  # asked for while there is time
        self._spans = lows[order], highs[order], order
        self._tree = flat.tree

    @cached_property
    def known_tree(self) -> KnownTree:
        return KnownTree(_encode(self._tree), self._tree, self.plains.count)

    @cached_property
    def spans(self) -> tuple[list[int], list[int], list[int]]:
        """First and last address of each tensor and its leaf, in order of address."""
        lows, highs, order = self._spans
        places = self.plains.leaves
        return lows.tolist(), highs.tolist(), [places[n] for n in order.tolist()]

    def __contains__(self, leaf: object) -> bool:
        return leaf in self._leaves

    @cached_property
    def _leaves(self) -> Container[object]:
        plains = self.plains
        return range(plains.count) if len(plains) == plains.count else set(plains.leaves)


def _apart(lows: Column, highs: Column) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of these spans reach into no other."""
    order = np.lexsort((highs, lows))
    reach = np.maximum.accumulate(highs[order])
    group = np.zeros(len(order), np.intp)
    group[1:] = np.cumsum(lows[order][1:] >= reach[:-1])
    apart = np.empty(len(order), bool)
    apart[order] = np.bincount(group)[group] == 1
    return apart


class PreparedDestination:
    """What `prepare` found. Between it and the end of the landing the caller leaves the containers
    as they are: an object put in a slot meanwhile is not seen. A tensor that got other memory is.

    It keeps the destination alive; `plan` does not.
    """

    def __init__(self, into: object, objects: Objects, flat: Flat, plan: PlainLayout) -> None:
        self.into = into
        self.objects = objects
        self.flat = flat
        self.plan = plan
        self.inside_records = inside_records(flat.tree)  # the leaves that these are made of
        self._looked_at = time.monotonic()
        # Of a state that is expected: its leaves, which are the key, and where they go.
        self.expected: tuple[Sequence[m.Leaf], Split] | None = None
        self._same: m.Node = flat.tree  # or one that was found to be equal

    def expect(self, manifest: m.Manifest) -> None:
        """Work out ahead where a state goes: `split` knows it where the very same leaves come."""
        if self._has(manifest.tree):
            matched = Matched([], [], [], self.flat.tree)
            found = split(matched, manifest, self, chunks_of(manifest))
            self.expected = manifest.leaves, found

    def reached(self, low: int, high: int) -> list[int]:
        """The plain leaves that have some of the host's bytes [low, high)."""
        lows, highs, leaves = self.plan.spans
        return leaves[bisect_right(highs, low) : bisect_left(lows, high)]

    @property
    def moved(self) -> bool:
        """Whether a plain tensor no longer lies where it did, if there was time for that."""
        if time.monotonic() < self._looked_at + JUST_NOW:
            return False
        plains = self.plan.plains
        return not plains.lie(plains.of(self.flat.leaves))

    def match(
        self, tree: m.Node, choice: Selection, *, strict: bool
    ) -> tuple[Matched, dict[Path, m.Node]]:
        """Pair the slots of an offered tree with those here, as far as they are chosen. What is
        there for each object that is told its state anew comes apart: no slot of it is paired."""
        roots = [path for path, held in self.objects.items() if not held.in_place]
        if not roots and choice.plain and self._has(tree):
            return Matched([], [], [], self.flat.tree), {}
        return match(tree, self.flat.tree, roots, choice, strict=strict)

    def _has(self, tree: m.Node) -> bool:
        if tree is not self._same and tree == self.flat.tree:
            self._same = tree
        return tree is self._same


def prepare(into: object) -> PreparedDestination:
    """Look a destination over, for `land(manifest, into=prepare(into))`.

    `UnsupportedLeafError` for a container that cannot be filled.
    """
    with gc_paused():
        flat, objects = flatten_objects(into)
        return PreparedDestination(into, objects, flat, PlainLayout(flat))


Pair = tuple[int, Path, int]


class Straight(NamedTuple):
    """What goes to plain tensors as it is, in columns and in the order of the stream: where it is
    there, to which address and how many bytes; storage offered, leaf of the destination."""

    at: Column
    address: Column
    nbytes: Column
    storage: Indices
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
            self.storage[rows],
            self.leaf[rows],
            self.on_host[rows],
        )


class Split(NamedTuple):
    """What goes straight to plain tensors, and the pairs that are left for the general path."""

    pieces: Straight
    rest: list[Pair]


_ODD = m.CONJ | m.NEG | m.META


def split(
    matched: Matched,
    manifest: m.Manifest,
    prepared: PreparedDestination,
    chunks: Chunks,
    late: Collection[int] = (),
) -> Split:
    """The fast path of `fit`: a contiguous tensor that is offered to a plain one like it.

    The leaves in `late` are left for the general path; and all are if a piece of the stream has
    several places to go, or a place several pieces, which is for `check_ties` to look at.
    """
    expected = None if late or matched.tree is None else prepared.expected
    if expected is not None and expected[0] is manifest.leaves:
        return expected[1]
    plains, table = prepared.plan.plains, table_of(manifest.leaves)
    here, there, numbers = _paired(matched, plains, table)
    fits = _fitting(plains, here, table, there)
    if late:
        fits &= ~np.isin(table.rows[there], list(late))
    if not fits.all():
        here, there, numbers = here[fits], there[fits], numbers[fits]
    if matched.tree is None and len(here):  # a tied tensor is there more than once
        _, once = np.unique(here * len(table.rows) + there, return_index=True)
        here, there = here[once], there[once]
        if len(np.unique(here)) < len(here):
            return Split(Straight.none(), matched.pairs)
    storages = table.storages[there]
    at = chunks.places[storages] + table.offsets[there].astype(np.uint64)
    if (at[1:] < at[:-1]).any():
        order = np.argsort(at, kind="stable")
        here, at, storages = here[order], at[order], storages[order]
    pieces = Straight(
        at,
        plains.places[here],
        plains.nbytes[here],
        storages,
        plains.leaf_of_each[here],
        plains.on_host[here],
    )
    if (pieces.at[1:] < pieces.at[:-1] + pieces.nbytes[:-1]).any():
        return Split(Straight.none(), matched.pairs)
    if matched.tree is not None and len(here) == len(manifest.leaves):
        return Split(pieces, [])
    taken = set(numbers.tolist())
    if matched.tree is not None:
        return Split(pieces, matched.some(set(range(len(manifest.leaves))) - taken))
    return Split(pieces, [pair for n, pair in enumerate(matched.pairs) if n not in taken])


def _paired(matched: Matched, plains: Plains, table: Table) -> tuple[Indices, Indices, Indices]:
    """Which of the plain tensors, which row of the table it is offered, and the number of the pair:
    that of the leaf where both sides have one tree."""
    if matched.tree is not None:
        if len(plains) == plains.count == len(table.rows):
            every = np.arange(plains.count)
            return every, every, every
        both, here, there = np.intersect1d(
            plains.leaf_of_each, table.rows, assume_unique=True, return_indices=True
        )
        return here, there, both
    there = _places(table.rows, [pair[0] for pair in matched.pairs])
    here = _places(plains.leaf_of_each, [pair[2] for pair in matched.pairs])
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


def _fitting(plains: Plains, here: Indices, table: Table, there: Indices) -> Marks:
    """Whether what each plain tensor is offered can be copied to it as it is."""
    sorts, kinds = plains.sorts, table.kinds
    there_is: Marks = table.storages[there] >= 0
    if len(sorts) == len(kinds) == 1:
        return there_is if _same(sorts[0], kinds[0]) else np.zeros(len(here), bool)
    pairs = plains.sort_of_each[here] * len(kinds) + table.numbers[there]
    # Each pair of sort and kind is looked at once.
    if len(sorts) * len(kinds) > len(pairs):
        found, pairs = np.unique(pairs, return_inverse=True)
    else:
        found = np.arange(len(sorts) * len(kinds))
    marks = [_same(sorts[pair // len(kinds)], kinds[pair % len(kinds)]) for pair in found.tolist()]
    fits: Marks = np.array(marks, bool)[pairs]
    return fits & there_is


def _same(sort: Sort, kind: Kind) -> bool:
    return (
        kind.shape == sort.shape
        and kind.dtype == sort.dtype
        and kind.strides is None
        and not kind.flags & _ODD
    )
