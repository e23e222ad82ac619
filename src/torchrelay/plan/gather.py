"""The share that one rank takes of the states of several, as a record of its own. Pure.

Each leaf is as its destination takes it: a DTensor takes a box of a tensor, anything else all of
it, whichever way the senders have it. Each image of the share is one box of one *source*: an image
of one rank, or a distributed tensor that several ranks have boxes of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.plan.holders import NONE
from torchrelay.plan.offer import DestinationLayout, FittedShare
from torchrelay.plan.selection import Selection
from torchrelay.plan.sharded import ShardedKind
from torchrelay.plan.union import Union
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.manifest import with_parts
from torchrelay.record.schema import ImageKind, LeafKind, Record, StateOutline, column_of
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import local_parts
from torchrelay.state.matching import Matched
from torchrelay.state.meshes import mesh_record
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import check_types, show, slots

_encode = msgspec.msgpack.Encoder().encode
_NOTHING = m.ValueLeaf("plain", None)  # in the place of leaves that are not wanted
WHOLE = -1  # in place of the number of a box
PARTIAL = "a DTensor with a partial placement takes no value: redistribute it first"
_none = np.zeros(0, np.int64)


class Twins(NamedTuple):
    """Two images of the share that go to one place: their bytes must be the same."""

    first: int
    second: int
    path: str


class _ShareRows(NamedTuple):
    """Leaves of the share in columns: number, kind, source, box and offset of each."""

    leaves: Numbers
    kinds: Numbers
    sources: Numbers
    boxes: Numbers
    offsets: Numbers


class GatherShare:
    """This rank's share of a union, as a landing needs it (`OfferedShare`): `new` or `fitted` is
    called once. After that each image of the share is all, or one of the `boxes`, of a source:
    `sources` and `source_boxes`.
    """

    def __init__(self, union: Union) -> None:
        self.tree = union.joined.tree
        self.choice = Selection(exact=union.joined.exact)
        self.union = union
        self.boxes: list[Box] = []
        self.sources: Numbers = _none
        self.source_boxes: Numbers = _none
        self.twins: list[Twins] = []
        self._box_numbers: dict[bytes, int] = {}
        self._kinds = KindTable()
        self._rows: list[_ShareRows] = []
        self._others: dict[int, m.Leaf] = {}  # their parts are numbered in `_parts`
        self._parts: list[tuple[int, int]] = []  # source and box of each
        self._twin_sources: list[tuple[int, int, str]] = []

    def new(self) -> Record:
        check_types(self.tree)
        joined = self.union.joined
        leaves, numbers = np.arange(joined.leaves), _LeafNumbers(joined.leaves)
        if not joined.exact:  # a leaf is not in the tree where another rank's has its path
            leaves = np.unique(np.array([leaf for _, leaf in slots(self.tree)], np.int64))
        self._add_leaves(leaves, numbers.take(leaves))
        self._leave_out(numbers)
        return self._record(numbers.count)

    def filled(self, image: int) -> torch.Tensor | None:
        return None

    def fitted(
        self,
        leaves: Sequence[object],
        layout: DestinationLayout,
        matched: Matched,
        given: Mapping[int, torch.Tensor | None],
    ) -> FittedShare:
        pairs = _Pairs(matched, self.union.joined.leaves)
        kinds = _kinds_of(layout, len(leaves))[pairs.here] if len(pairs.here) else _none
        slow = _without_plain_part(leaves, pairs.here, kinds)
        plain = np.flatnonzero((kinds == NONE) & ~slow)
        numbers = _LeafNumbers(self.union.joined.leaves)
        whole = self._add_given(given, numbers)
        wanted = np.unique(np.concatenate([pairs.offered[plain], whole]))
        at = numbers.take(wanted)
        self._add_leaves(wanted, at)
        pairs.leaf[plain] = at[np.searchsorted(wanted, pairs.offered[plain])]
        some = np.flatnonzero(kinds != NONE)
        pairs.leaf[some] = numbers.take(pairs.offered[some])
        self._add_sharded(pairs, some, kinds[some], layout.sharded.kinds)
        for row in np.flatnonzero(slow).tolist():
            pairs.leaf[row] = numbers.take(pairs.offered[row : row + 1])[0]
            self._add_parts(pairs, row, leaves[int(pairs.here[row])])
        self._leave_out(numbers)
        dropped = self._find_twins(pairs, leaves, layout)
        record = self._record(numbers.count)
        return FittedShare(record, pairs.matched(dropped))

    def _leave_out(self, numbers: _LeafNumbers) -> None:
        for leaf in numbers.free():
            self._others[leaf] = _NOTHING

    # Leaves that are not distributed here.

    def _add_leaves(self, leaves: Numbers, at: Numbers) -> None:
        """Leaves of the union, as leaves `at` of the share: distributed tensors are whole."""
        for home in self.union.joined.homes:
            place, rows = home.members[0], self.union.joined.first(home)
            inside = (leaves >= home.shift) & (leaves < home.shift + len(rows))
            some, to = leaves[inside], at[inside]
            row = np.searchsorted(rows.leaves, some - home.shift)
            is_row = row < len(rows.leaves)
            is_row[is_row] = rows.leaves[row[is_row]] == (some - home.shift)[is_row]
            self._add_rows(place, some[is_row], row[is_row], to[is_row])
            for leaf, number in zip(some[~is_row].tolist(), to[~is_row].tolist(), strict=True):
                found = rows.others[leaf - home.shift]
                self._others[number] = self._moved(place, leaf, found)

    def _add_rows(self, place: int, leaves: Numbers, rows: Numbers, at: Numbers) -> None:
        if not len(rows):
            return
        union, there = self.union, self.union.joined.rows[place]
        kinds = there.record.kinds
        whole = [
            self._kinds.leaf(LeafKind(kind.dtype, kind.shape, None, kind.flags))
            if kind.sharding >= 0
            else self._kinds.leaf(kind)
            for kind in kinds
        ]
        tensors = union.tensor_of[leaves]
        sources = np.where(
            tensors >= 0, union.tensor_source(tensors), union.source(place, there.images[rows])
        )
        union.check_values(leaves)
        offsets, boxes = there.offsets[rows], np.full(len(rows), WHOLE, np.int64)
        kind_of = np.array(whole, np.int64)[there.kinds[rows]]
        self._rows.append(_ShareRows(at, kind_of, sources, boxes, offsets))

    def _moved(self, place: int, leaf: int, found: m.Leaf) -> m.Leaf:
        """A leaf that is not a row, with its parts numbered here."""
        union = self.union
        tensor = int(union.tensor_of[leaf])
        if tensor >= 0:
            assert isinstance(found, (m.DTensorLeaf, m.ShardedLeaf))
            facts = union.holders.tensors[tensor]
            if isinstance(found, m.DTensorLeaf) and found.local.flags & m.META:
                flags = found.flags | m.META
                return m.TensorLeaf(facts.dtype, facts.shape, None, NONE, 0, flags)
            union.check_values(np.array([leaf], np.int64))
            number = self._part(int(union.tensor_source(tensor)), WHOLE)
            return m.TensorLeaf(facts.dtype, facts.shape, None, number, 0, found.flags)

        def moved(part: m.TensorLeaf) -> m.TensorLeaf:
            if part.storage < 0:
                return part
            number = self._part(int(union.source(place, part.storage)), WHOLE)
            return msgspec.structs.replace(part, storage=number)

        return with_parts(found, moved)

    def _part(self, source: int, box: int) -> int:
        self._parts.append((source, box))
        return len(self._parts) - 1

    # Leaves that are distributed here.

    def _add_sharded(
        self, pairs: _Pairs, some: Numbers, numbers: Numbers, kinds: Sequence[ShardedKind]
    ) -> None:
        """Leaves for distributed tensors with one plain part here, each as a box."""
        if not len(some):
            return
        union, offered = self.union, pairs.offered[some]
        used = np.unique(numbers).tolist()
        facts, box_of, kind_of = (np.full(len(kinds), NONE, np.int64) for _ in range(3))
        for number in used:
            kind = kinds[number]
            facts[number] = union.fact(kind.dtype, kind.shape)
            box_of[number] = self._box(kind.box, kind.shape)
            kind_of[number] = kind._replace(flags=0).number_in(self._kinds)
        wrong = np.flatnonzero(union.fact_of[offered] != facts[numbers])
        for row in wrong[:1].tolist():
            kind = kinds[int(numbers[row])]
            self._refuse(int(offered[row]), kind.dtype, kind.shape, pairs.path(int(some[row])))
        for row, number in zip(some.tolist(), numbers.tolist(), strict=True):
            if kinds[number].is_partial:
                raise MismatchError(PARTIAL, path=pairs.path(row))
        union.check_values(offered)
        columns = (kind_of[numbers], union.source_of[offered], box_of[numbers])
        self._rows.append(_ShareRows(pairs.leaf[some], *columns, np.zeros(len(some), np.int64)))

    def _refuse(self, leaf: int, dtype: str, shape: tuple[int, ...], path: str) -> None:
        """Say how a leaf differs from a distributed destination of this dtype and shape."""
        offered = self.union.facts(leaf)
        if offered is None:
            raise MismatchError(
                "kind differs: offered something else, the destination has a distributed tensor",
                path=path,
            )
        theirs, ours = ("dtype", "shape"), (dtype, shape)
        for what, there, here in zip(theirs, offered, ours, strict=True):
            if there != here:
                raise MismatchError(
                    f"{what} differs: offered {there}, the destination has {here}", path=path
                )

    def _add_parts(self, pairs: _Pairs, row: int, mine: Any) -> None:
        """A leaf for a distributed tensor that has several parts here, or none that is plain."""
        leaf, (dtype, shape) = int(pairs.offered[row]), (t.NAMES[mine.dtype], tuple(mine.size()))
        if self.union.facts(leaf) != (dtype, shape):
            self._refuse(leaf, dtype, shape, pairs.path(row))
        self._others[int(pairs.leaf[row])] = self._like(leaf, dtype, mine, pairs.path(row))

    def _like(self, leaf: int, dtype: str, mine: Any, path: str) -> m.Leaf:
        """The parts of a tensor that a distributed one has in this process, described like it."""
        source, shape = int(self.union.source_of[leaf]), tuple(mine.size())
        locals_ = []
        for part in local_parts(mine):
            number = NONE
            if part.tensor.numel():
                number = self._part(source, self._box(part.box, shape))
            locals_.append(m.TensorLeaf(dtype, tuple(part.tensor.shape), None, number))
        if isinstance(mine, t.ShardedTensor):
            _, boxes, all_boxes, _ = t.sharded_parts(mine)
            return m.ShardedLeaf(tuple(locals_), boxes, all_boxes, shape, dtype)
        local, spec = t.dtensor_parts(mine)
        if any(placement.is_partial() for placement in spec.placements):
            raise MismatchError(PARTIAL, path=path)
        whole = locals_[0] if locals_ else m.TensorLeaf(dtype, tuple(local.shape), None, NONE)
        coordinate = spec.mesh.get_coordinate()
        return m.DTensorLeaf(
            whole,
            mesh_record(spec.mesh),
            tuple(map(t.placement_record, spec.placements)),
            shape,
            tuple(mine.stride()),
            None if coordinate is None else tuple(coordinate),
        )

    def _add_given(
        self, given: Mapping[int, torch.Tensor | None], numbers: _LeafNumbers
    ) -> Numbers:
        """Leaves that are made for objects: distributed as the tensors that they resemble, where
        those have their shape. Returns the ones that are made whole."""
        whole = []
        for leaf, like in given.items():
            facts = self.union.facts(leaf) if t.is_dtensor(like) else None
            if facts is None or not facts[1] or like is None or facts[1] != tuple(like.shape):
                whole.append(leaf)
            else:
                numbers.take(np.array([leaf], np.int64))
                self._others[leaf] = self._like(leaf, facts[0], like, self.union.joined.path(leaf))
        return np.array(whole, np.int64)

    def _box(self, box: Box, shape: tuple[int, ...]) -> int:
        if box == ((0,) * len(shape), shape):
            return WHOLE
        number = self._box_numbers.setdefault(_encode(box), len(self.boxes))
        if number == len(self.boxes):
            self.boxes.append(box)
        return number

    # Several tensors for one place.

    def _find_twins(
        self, pairs: _Pairs, leaves: Sequence[object], layout: DestinationLayout
    ) -> set[int]:
        """The pairs whose destination another one fills already, with what should be the same."""
        alone = np.zeros(len(leaves), bool)  # those that share no memory with each other
        alone[layout.plain.leaf_of] = True
        suspect = ~alone[pairs.here]
        if pairs.tree is None:  # a leaf may be here at several paths
            suspect |= np.bincount(pairs.here, minlength=1)[pairs.here] > 1
        first: dict[object, int] = {}
        found = set()
        for row in np.flatnonzero(suspect).tolist():
            here = int(pairs.here[row])
            place = here if alone[here] else _memory(leaves[here])
            other = row if place is None else first.setdefault(place, row)
            mine, theirs = (int(self.union.source_of[pairs.offered[n]]) for n in (row, other))
            if mine != theirs and NONE not in (mine, theirs):
                self._twin_sources.append((theirs, mine, pairs.path(row)))
                found.add(row)
        return found

    # The record of the share.

    def _record(self, count: int) -> Record:
        columns = zip(*self._rows, strict=True) if self._rows else [[_none]] * 5
        leaves, kinds, sources, boxes, offsets = (np.concatenate([*some]) for some in columns)
        twins = [(source, WHOLE) for pair in self._twin_sources for source in pair[:2]]
        more = np.array([*self._parts, *twins], np.int64).reshape(-1, 2)
        wide = len(self.boxes) + 1
        codes = np.concatenate([sources, more[:, 0]]) * wide
        codes += np.concatenate([boxes, more[:, 1]]) + 1
        refs, numbers = np.unique(codes, return_inverse=True)
        self.sources, self.source_boxes = refs // wide, refs % wide - 1
        order = np.argsort(leaves, kind="stable")
        parts = numbers[len(leaves) :].tolist()
        others = {leaf: _renumbered(found, parts) for leaf, found in self._others.items()}
        at = sorted(others)
        for number, (_, _, path) in enumerate(self._twin_sources):
            first, second = parts[len(self._parts) + 2 * number :][:2]
            self.twins.append(Twins(first, second, path))
        kind_of = self._image_kinds()
        outline = StateOutline(
            self.tree,
            count,
            tuple([others[leaf] for leaf in at]),
            column_of(np.array(at, np.int64)),
            column_of(kinds[order]),
            numbers[: len(leaves)][order],
            column_of(offsets[order]),
        )
        return self._kinds.record((outline,), kind_of, step=self.union.joined.records[0].step)

    def _image_kinds(self) -> Numbers:
        """The kind of each image of the share."""
        union = self.union
        found: Numbers = np.full(len(self.sources), NONE, np.int64)
        places, images = union.rank_images(self.sources)
        for place, record in enumerate(union.joined.records):
            mine = (places == place) & (self.source_boxes == WHOLE)
            if mine.any():
                kinds = np.array([*map(self._kinds.image, record.image_kinds)], np.int64)
                found[mine] = kinds[record.image_kind[images[mine]]]
        rest = np.flatnonzero(found == NONE)
        facts = union.source_facts(self.sources[rest])
        known: dict[tuple[int, int], int] = {}
        boxes = self.source_boxes[rest].tolist()
        for at, fact, box in zip(rest.tolist(), facts.tolist(), boxes, strict=True):
            if (fact, box) not in known:
                dtype, shape = union.fact_list[fact]
                whole = ((0,) * len(shape), shape)
                some = [whole if box == WHOLE else self.boxes[box]]
                kind = ImageKind.of_boxes(dtype, shape, some)
                known[fact, box] = self._kinds.image(kind)
            found[at] = known[fact, box]
        return found


class _Pairs:
    """Pairs of leaves in columns: the one offered, the one here, and that of the share."""

    def __init__(self, matched: Matched, leaves: int) -> None:
        self._matched = matched
        self.tree = matched.tree
        if matched.tree is not None:
            self.offered: Numbers = np.arange(leaves)
            self.here: Numbers = self.offered
        else:
            self.offered = np.array([pair[0] for pair in matched.pairs], np.int64)
            self.here = np.array([pair[2] for pair in matched.pairs], np.int64)
        self.leaf: Numbers = self.offered.copy()

    def path(self, row: int) -> str:
        if self.tree is None:
            return show(self._matched.pairs[row][1])
        return show(LeafPaths(self.tree)[int(self.offered[row])])

    def matched(self, dropped: set[int]) -> Matched:
        """The pairs with the leaves of the share, but for those that are dropped."""
        found = self._matched
        if not dropped and np.array_equal(self.leaf, self.offered):
            return found
        if self.tree is None:
            paths = [pair[1] for pair in found.pairs]
        else:
            steps = LeafPaths(self.tree)
            paths = [steps.steps(leaf) for leaf in self.offered.tolist()]
        rows = zip(self.leaf.tolist(), paths, self.here.tolist(), strict=True)
        pairs = [pair for row, pair in enumerate(rows) if row not in dropped]
        return Matched(pairs, found.missing, found.extra)


class _LeafNumbers:
    """The leaves of a share: those of the union, and more where one is needed in several forms."""

    def __init__(self, leaves: int) -> None:
        self.count = leaves
        self._taken = np.zeros(leaves, bool)

    def take(self, leaves: Numbers) -> Numbers:
        """A number for each of some leaves: its own, unless that is taken."""
        found: Numbers = leaves.copy()
        _, first = np.unique(leaves, return_index=True)
        again = np.ones(len(leaves), bool)
        again[first] = self._taken[leaves[first]]
        self._taken[leaves] = True
        more = int(again.sum())
        found[again] = np.arange(self.count, self.count + more)
        self.count += more
        return found

    def free(self) -> list[int]:
        found: list[int] = np.flatnonzero(~self._taken).tolist()
        return found


def _kinds_of(layout: DestinationLayout, leaves: int) -> Numbers:
    """Of each leaf of a destination, its kind of distributed tensor, or -1."""
    found: Numbers = np.full(leaves, NONE, np.int64)
    numbers = layout.sharded.numbers
    if numbers:
        found[np.array([*numbers], np.int64)] = np.array([*numbers.values()], np.int64)
    return found


def _without_plain_part(leaves: Sequence[object], here: Numbers, kinds: Numbers) -> Any:
    """Which pairs have a distributed destination that has not one plain tensor here."""
    found = np.zeros(len(here), bool)
    types = {kind for kind in set(map(type, leaves)) if t.is_distributed_type(kind)}
    if types:
        for row, leaf in enumerate(here.tolist()):
            found[row] = kinds[row] == NONE and type(leaves[leaf]) in types
    return found


def _renumbered(leaf: m.Leaf, numbers: Sequence[int]) -> m.Leaf:
    def moved(part: m.TensorLeaf) -> m.TensorLeaf:
        if part.storage < 0:
            return part
        return msgspec.structs.replace(part, storage=numbers[part.storage])

    return leaf if leaf is _NOTHING else with_parts(leaf, moved)


def _memory(mine: object) -> object:
    """What tells the memory of a tensor that is written in place from that of others."""
    if t.is_dtensor(mine):
        mine, _ = t.dtensor_parts(mine)
    if isinstance(mine, t.ShardedTensor) or not isinstance(mine, torch.Tensor) or not mine.numel():
        return None
    if not t.is_plain(mine):
        return None
    return mine.device, mine.data_ptr(), mine.dtype, mine.shape, mine.stride()
