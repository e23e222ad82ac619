"""The share that one rank takes of a recorded state, as a record of its own. Pure.

Each leaf is as its destination takes it: a DTensor takes a box of a tensor, anything else all of
it, whichever of the two it was. Each image of the share is one box of one recorded image, whether
that lies in files or on ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.numbered import Numbered
from torchrelay.plan.outline import TensorRows, laid_over, outline, pruned
from torchrelay.plan.sharded import PlainLayout, ShardedKind
from torchrelay.planning.selection import Selection
from torchrelay.planning.share_leaves import (
    NONE,
    LeafNumbers,
    Pairs,
    WholeLeaves,
    undistributed,
    whole_kinds,
)
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import ImageKind, Record
from torchrelay.state import tensors as t
from torchrelay.state.leaves import dtensor_leaf
from torchrelay.state.local_parts import LocalBoxes, local_parts
from torchrelay.state.matching import Matched
from torchrelay.state.objects import OfferedTensor
from torchrelay.state.paths import LeafPaths, naming
from torchrelay.state.tree import check_types, show, slots

PARTIAL = "a DTensor with a partial placement takes no value: redistribute it first"
_WIDE = 1 << 31  # more than there are boxes
_none: Numbers = np.zeros(0, np.int64)
_NOTHING = m.ValueLeaf("plain", None)  # in the place of leaves that are not wanted
_HELD = (m.TensorLeaf, m.SparseLeaf, m.SubclassLeaf)


class Twins(NamedTuple):
    """Two images of the share that go to one place: their bytes must be the same."""

    first: int
    second: int
    path: str


class _ShareRows(NamedTuple):
    """Leaves of the share in columns: number, kind, reference and offset of each."""

    leaves: Numbers
    kinds: Numbers
    refs: Numbers
    offsets: Numbers


class RankShare:
    """One rank's share of the leaves of these `ranks` of one record, laid over each other: where
    two have a path, the first counts. `include` chooses leaves by patterns of their paths;
    `guessed` is as for `Selection`.

    `new` or `fitted` is called once. After that the share is a `record`, each of whose images is
    all of a recorded image, or one box of it: `sources` has the number of that. `look` is called
    with the recorded images for which memory is going to be taken.

    Until then a reference stands for an image of the share: the recorded image, times `_WIDE`, and
    the box of it, by its number from 1 on, or 0 for all of it.
    """

    def __init__(
        self,
        ranks: Sequence[LeafRows],
        *,
        include: tuple[str, ...] = (),
        guessed: bool = False,
        look: Callable[[Numbers], None] | None = None,
    ) -> None:
        self._ranks = [ranks[0], *(rows for rows in ranks[1:] if rows.tree != ranks[0].tree)]
        self._recorded = ranks[0].record
        self._leaves = sum(map(len, self._ranks))
        self._wholes = WholeLeaves(self._ranks)
        self._look = look
        exact = len(self._ranks) == 1  # so everything in it was one state
        self.tree = laid_over([(rows.tree, len(rows)) for rows in self._ranks])
        self.choice = Selection(include, self._leaves, exact=exact, guessed=guessed)
        self.record: Record
        self.sources: Numbers = _none
        self.twins: list[Twins] = []
        self._local_boxes = LocalBoxes()
        self._boxes: Numbered[Box] = Numbered()
        self._kinds = KindTable()
        self._rows: list[_ShareRows] = []
        self._others: dict[int, m.Leaf] = {}  # their parts are numbered in `_parts`
        self._parts: list[int] = []  # the reference of each

    def tensor_of(self, leaf: int) -> OfferedTensor | None:
        """A leaf of `tree` that is a tensor."""
        shift = 0
        for rows in self._ranks:
            if leaf < shift + len(rows):
                break
            shift += len(rows)
        found = m.tensor_of(rows[leaf - shift])
        in_boxes = bool(self._wholes.sources[leaf] != NONE)
        return None if found is None else OfferedTensor(*found, in_boxes)

    def new(self) -> Record:
        """The share where all of it is made as new tensors."""
        check_types(self.tree)
        numbers, tree, leaves = LeafNumbers(self._leaves), self.tree, np.arange(self._leaves)
        if self.choice.patterns:
            chosen = {leaf for path, leaf in slots(tree) if self.choice.takes(path)}
            leaves = np.array(sorted(chosen), np.int64)
            # One more leaf: it takes the places of items that are not wanted.
            tree = pruned(tree, chosen, numbers.count)
            self._others[numbers.count] = _NOTHING
            numbers.count += 1
        elif not self.choice.exact:  # a leaf is not in the tree where another rank's has its path
            leaves = np.unique(np.array([leaf for _, leaf in slots(tree)], np.int64))
        self._add_leaves(leaves, numbers.take(leaves))
        return self._record(tree, numbers)

    def fitted(
        self,
        leaves: Sequence[object],
        layout: PlainLayout,
        matched: Matched,
        given: Mapping[int, torch.Tensor | None],
    ) -> tuple[Record, Matched, Set[int]]:
        """The share for the `leaves` of a destination. `given` has the leaves that are made for
        objects, each with the tensor that it resembles.

        Returns the record, the pairs of its leaves with those here, and the leaves that get their
        bytes by way of whole images, which are not written to the destination as they are.
        """
        pairs = Pairs(matched, self._leaves)
        kind_of: Numbers = np.full(len(leaves), NONE, np.int64)  # of distributed tensors here
        numbers_here = layout.sharded.numbers
        kind_of[[*numbers_here]] = [*numbers_here.values()]
        kinds = kind_of[pairs.here]
        slow = self._several_parts(leaves, pairs, kinds)
        plain, some = np.flatnonzero((kinds == NONE) & ~slow), np.flatnonzero((kinds >= 0) & ~slow)
        numbers = LeafNumbers(self._leaves)
        whole = self._add_given(given, numbers)
        wanted = np.unique(np.concatenate([pairs.offered[plain], whole]))
        at = numbers.take(wanted)
        self._add_leaves(wanted, at)
        pairs.leaf[plain] = at[np.searchsorted(wanted, pairs.offered[plain])]
        pairs.refs[plain] = self._wholes.sources[pairs.offered[plain]] * _WIDE
        pairs.leaf[some] = numbers.take(pairs.offered[some])
        self._add_sharded(pairs, some, kinds[some], layout.sharded.kinds)
        for row in np.flatnonzero(slow).tolist():
            pairs.leaf[row] = numbers.take(pairs.offered[row : row + 1])[0]
            self._add_parts(pairs, row, leaves[int(pairs.here[row])])
        alone = np.zeros(len(leaves), bool)  # those that share no memory with each other
        alone[layout.plain.leaves] = True
        twins = self._find_twins(pairs, leaves, alone)
        late = self._late(pairs, plain)
        compared = pairs.leaf[[*twins.keys(), *twins.values()]].tolist()
        record = self._record(self.tree, numbers, late.union(whole.tolist(), compared))
        for row, other in twins.items():
            first, second = np.searchsorted(self._refs, pairs.refs[[other, row]]).tolist()
            self.twins.append(Twins(first, second, pairs.path(row)))
        return record, pairs.matched(twins.keys()), late

    # Leaves that are not distributed here.

    def _add_leaves(self, leaves: Numbers, at: Numbers) -> None:
        """Recorded leaves, as leaves `at` of the share: distributed tensors are whole."""
        wholes = whole_kinds(self._recorded, self._kinds)
        shift = 0
        for rows in self._ranks:
            inside = (leaves >= shift) & (leaves < shift + len(rows))
            some, to = leaves[inside] - shift, at[inside]
            shift += len(rows)
            row = np.searchsorted(rows.leaves, some)
            is_row = row < len(rows.leaves)
            is_row[is_row] = rows.leaves[row[is_row]] == some[is_row]
            kinds, row = wholes[rows.kinds[row[is_row]]], row[is_row]
            refs, offsets = rows.images[row] * _WIDE, rows.offsets[row]
            self._rows.append(_ShareRows(to[is_row], kinds, refs, offsets))
            for leaf, number in zip(some[~is_row].tolist(), to[~is_row].tolist(), strict=True):
                self._others[number] = self._moved(rows.others[leaf])

    def _moved(self, found: m.Leaf) -> m.Leaf:
        """A leaf that is not a row, with its parts numbered here, in the layouts of their images
        in memory."""

        def moved(part: m.TensorLeaf) -> m.TensorLeaf:
            kind, strides = self._recorded.kind_of_image(part.storage), part.strides
            if strides is None and not part.offset and part.shape == kind.shape:
                strides = kind.strides
            return replace(part, storage=self._part(part.storage * _WIDE), strides=strides)

        return m.with_parts(undistributed(found), moved)

    def _part(self, ref: int) -> int:
        self._parts.append(ref)
        return len(self._parts) - 1

    def _late(self, pairs: Pairs, plain: Numbers) -> set[int]:
        """The leaves of the share that are not all of an image."""
        late = pairs.leaf[plain[pairs.refs[plain] < 0]].tolist()
        return {leaf for leaf in late if isinstance(self._others.get(leaf, _TENSOR), _HELD)}

    # Leaves that are distributed here.

    def _several_parts(self, leaves: Sequence[object], pairs: Pairs, kinds: Numbers) -> Marks:
        """The pairs with a distributed destination that has not one plain tensor here, or is
        offered what has no elements."""
        found = np.zeros(len(pairs.here), bool)
        types = {kind for kind in set(map(type, leaves)) if t.is_distributed_type(kind)}
        if types:
            found = (kinds >= 0) & (self._wholes.sources[pairs.offered] == NONE)
            for row in np.flatnonzero(kinds == NONE).tolist():
                found[row] = type(leaves[int(pairs.here[row])]) in types
        return found

    def _add_sharded(
        self, pairs: Pairs, some: Numbers, numbers: Numbers, kinds: Sequence[ShardedKind]
    ) -> None:
        """Leaves for distributed tensors with one plain part here, each as a box."""
        if not len(some):
            return
        offered = pairs.offered[some]
        facts, box_of, kind_of = (np.full(len(kinds), NONE, np.int64) for _ in range(3))
        for number in np.unique(numbers).tolist():
            kind = kinds[number]
            facts[number] = self._wholes.fact(kind.dtype, kind.shape)
            box_of[number] = self._box(kind.box, kind.shape)
            kind_of[number] = kind._replace(flags=0).number_in(self._kinds)
        for row in np.flatnonzero(self._wholes.facts[offered] != facts[numbers])[:1].tolist():
            kind, path = kinds[int(numbers[row])], pairs.path(int(some[row]))
            self._wholes.check(int(offered[row]), kind.dtype, kind.shape, path)
        partial = np.array([kind.is_partial for kind in kinds], bool)
        for row in some[partial[numbers]][:1].tolist():
            raise MismatchError(PARTIAL, path=pairs.path(row))
        pairs.refs[some] = refs = self._wholes.sources[offered] * _WIDE + box_of[numbers]
        columns = (kind_of[numbers], refs, np.zeros(len(some), np.int64))
        self._rows.append(_ShareRows(pairs.leaf[some], *columns))

    def _add_parts(self, pairs: Pairs, row: int, mine: Any) -> None:
        """A leaf for a distributed tensor that has several parts here, or none that is plain."""
        leaf, dtype, path = int(pairs.offered[row]), t.NAMES[mine.dtype], pairs.path(row)
        self._wholes.check(leaf, dtype, tuple(mine.size()), path)
        before = len(self._parts)
        self._others[int(pairs.leaf[row])] = self._like(leaf, dtype, mine, path)
        if len(self._parts) == before + 1:
            pairs.refs[row] = self._parts[before]

    def _like(self, leaf: int, dtype: str, mine: Any, path: str) -> m.Leaf:
        """The parts of a tensor that a distributed one has in this process, described like it."""
        source, shape = int(self._wholes.sources[leaf]), tuple(mine.size())
        locals_ = []
        with naming(path):
            parts = local_parts(mine, self._local_boxes)
        for part in parts:
            number = NONE
            if part.tensor.numel() and source != NONE:
                number = self._part(source * _WIDE + self._box(part.box, shape))
            locals_.append(m.TensorLeaf(dtype, tuple(part.tensor.shape), None, number))
        if t.is_sharded(mine):
            _, boxes, all_boxes, _ = t.sharded_parts(mine)
            return m.ShardedLeaf(tuple(locals_), boxes, all_boxes, shape, dtype)
        local, spec = t.dtensor_parts(mine)
        if any(placement.is_partial() for placement in spec.placements):
            raise MismatchError(PARTIAL, path=path)
        if len(locals_) > 1:
            boxes = tuple([m.Box(*part.box, None) for part in parts])
            return m.ShardedLeaf(tuple(locals_), boxes, boxes, shape, dtype)
        whole = locals_[0] if locals_ else m.TensorLeaf(dtype, tuple(local.shape), None, NONE)
        return dtensor_leaf(mine, whole)

    def _add_given(self, given: Mapping[int, torch.Tensor | None], numbers: LeafNumbers) -> Numbers:
        """Leaves that are made for objects: distributed as the tensors that they resemble, where
        those have their shape. Returns the ones that are made whole."""
        whole = []
        for leaf, like in given.items():
            facts = self._wholes.of(leaf) if t.is_dtensor(like) else None
            if facts is None or not facts[1] or like is None or facts[1] != tuple(like.shape):
                whole.append(leaf)
            else:
                numbers.take(np.array([leaf], np.int64))
                path = show(LeafPaths(self.tree)[leaf])
                made = self._others[leaf] = self._like(leaf, facts[0], like, path)
                if isinstance(made, m.ShardedLeaf):
                    raise MismatchError(
                        "this rank has several separate boxes of it, of which no new tensor can "
                        "be made: redistribute it first",
                        path=path,
                    )
        return np.array(whole, np.int64)

    def _box(self, box: Box, shape: tuple[int, ...]) -> int:
        return 0 if box == ((0,) * len(shape), shape) else self._boxes.number(box) + 1

    # Several tensors for one place.

    def _find_twins(self, pairs: Pairs, leaves: Sequence[object], alone: Marks) -> dict[int, int]:
        """The pairs whose destination another one fills already, with what should be the same; and
        those others."""
        suspect = ~alone[pairs.here]
        if pairs.tree is None:  # a leaf may be here at several paths
            suspect |= np.bincount(pairs.here, minlength=1)[pairs.here] > 1
        first: dict[object, int] = {}
        found = {}
        for row in np.flatnonzero(suspect & (pairs.refs >= 0)).tolist():
            here = int(pairs.here[row])
            place = here if alone[here] else _memory(leaves[here])
            both = [row, row if place is None else first.setdefault(place, row)]
            if np.ptp(pairs.refs[both]) and not np.ptp(self._wholes.facts[pairs.offered[both]]):
                found[row] = both[1]
        return found

    # The record of the share.

    def _record(self, tree: m.Node, numbers: LeafNumbers, taken: Set[int] | None = None) -> Record:
        """The record; memory is going to be taken for the leaves in `taken`, or all of them."""
        self._others |= dict.fromkeys(numbers.free(), _NOTHING)
        columns = zip(*self._rows, strict=True) if self._rows else [[_none]] * 4
        leaves, kinds, refs, offsets = (np.concatenate([*some]) for some in columns)
        parts = np.array(self._parts, np.int64)
        if self._look is not None:
            some = refs if taken is None else refs[np.isin(leaves, list(taken))]
            self._look(np.unique(np.concatenate([some, parts]) // _WIDE))
        self._refs, images = np.unique(np.concatenate([refs, parts]), return_inverse=True)
        self.sources = self._refs // _WIDE
        of_parts = images[len(leaves) :].tolist()

        def moved(part: m.TensorLeaf) -> m.TensorLeaf:
            return replace(part, storage=of_parts[part.storage])

        others = {
            leaf: found if found is _NOTHING else m.with_parts(found, moved)
            for leaf, found in self._others.items()
        }
        rows = TensorRows(leaves, kinds, images[: len(leaves)], offsets)
        found = outline(tree, numbers.count, others, rows)
        self.record = self._kinds.record((found,), self._image_kinds(), step=self._recorded.step)
        return self.record

    def _image_kinds(self) -> Numbers:
        """The kind of each image of the share."""
        codes = self._recorded.image_kind[self.sources] * _WIDE + self._refs % _WIDE
        found, inverse = np.unique(codes, return_inverse=True)
        kinds = []
        for code in found.tolist():
            number, box = divmod(code, _WIDE)
            kind = self._recorded.image_kinds[number]
            if box:
                made = ImageKind.of_boxes(kind.dtype, kind.shape, [self._boxes.found[box - 1]])
            else:
                made = ImageKind(kind.dtype, kind.shape, kind.strides)
            kinds.append(made)
        return self._kinds.images.numbers(kinds)[inverse]


_TENSOR = m.TensorLeaf("uint8", (), None, NONE)  # in the place of rows


def _memory(mine: object) -> object:
    """What tells the memory of a tensor that is written in place from that of others."""
    if t.is_dtensor(mine):
        mine, _ = t.dtensor_parts(mine)
    if not isinstance(mine, torch.Tensor) or not t.is_plain(mine) or not mine.numel():
        return None
    return mine.device, mine.data_ptr(), mine.dtype, mine.shape, mine.stride()
