"""A recorded state that destinations take in boxes: several live ranks, or a step at rest.

Each leaf is as its destination takes it: a distributed tensor takes a box of a tensor, anything
else all of it, whichever of the two it was where it comes from. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.describing.outline import TensorRows, pruned
from torchrelay.describing.sharded import ShardedKind
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.planning.catalog import EqualImages, Likes, RankShare
from torchrelay.planning.destination import Destination
from torchrelay.planning.offered_leaves import NONE, OfferedLeaves
from torchrelay.planning.selection import Selection
from torchrelay.planning.share_builder import WHOLE, ShareBuilder
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows
from torchrelay.state import tensors as t
from torchrelay.state.leaves import dtensor_leaf
from torchrelay.state.local_parts import LocalBoxes, local_parts
from torchrelay.state.matching import Matched
from torchrelay.state.objects import OfferedTensor
from torchrelay.state.paths import LeafPaths, naming
from torchrelay.state.tree import check_types, show, slots

PARTIAL = "a DTensor with a partial placement takes no value: redistribute it first"
_COPIED = (m.TensorLeaf, m.SparseLeaf, m.SubclassLeaf)


class BoxCatalog:
    """The leaves of these `ranks` of one record; where two have a path, the first counts.

    `include` chooses leaves by patterns of their paths; `guessed` is as for `Selection`.
    """

    def __init__(
        self, ranks: Sequence[LeafRows], *, include: tuple[str, ...] = (), guessed: bool = False
    ) -> None:
        self._offered = found = OfferedLeaves(ranks)
        self.tree = found.tree
        self.selection = Selection(include, found.count, exact=found.one_state, guessed=guessed)

    def tensor_of(self, leaf: int) -> OfferedTensor | None:
        return self._offered.tensor_of(leaf)

    def whole_share(self) -> RankShare:
        check_types(self.tree)
        builder, tree, leaves = ShareBuilder(self._offered), self.tree, self._offered.count
        wanted: Numbers = np.arange(leaves)
        if self.selection.patterns:
            chosen = {leaf for path, leaf in slots(tree) if self.selection.takes(path)}
            wanted = np.array(sorted(chosen), np.int64)
            tree = pruned(tree, chosen, builder.add_nothing())
        elif not self.selection.exact:  # the paths of some leaves are those of another rank's
            wanted = np.unique(np.array([leaf for _, leaf in slots(tree)], np.int64))
        builder.add_offered(wanted)
        return RankShare(builder.record(tree), builder.images.sources, Matched([]))

    def share_for(self, destination: Destination, matched: Matched, likes: Likes) -> RankShare:
        return _ShareFit(self._offered, destination, matched).share(likes)


class _TakenAs(IntEnum):
    """How a leaf of the destination takes what it is offered."""

    WHOLE = 0  # it is not distributed
    BOX = 1  # it has one plain tensor here, which takes a box
    PARTS = 2  # it has several tensors here, or one that is not plain, or takes no elements


class _Pairs(NamedTuple):
    """Pairs of leaves in columns. `image` and `box` say what of the record the pair's one tensor
    takes; NONE where it is not made of one image, or not of all of it."""

    offered: Numbers
    here: Numbers
    form: Numbers
    leaf: Numbers  # of the share
    image: Numbers
    box: Numbers

    @classmethod
    def of(cls, matched: Matched, leaves: int) -> _Pairs:
        """The pairs of leaves; `leaves` is the number of those offered."""
        if matched.tree is not None:
            offered: Numbers = np.arange(leaves)
            here = offered
        else:
            offered = np.array([pair[0] for pair in matched.pairs], np.int64)
            here = np.array([pair[2] for pair in matched.pairs], np.int64)
        form, box = np.full((2, len(here)), WHOLE)
        return cls(offered, here, form, offered.copy(), np.full(len(here), NONE), box)

    def tensor(self, row: int) -> tuple[int, int]:
        """The image of the record that the tensor takes, and the box of it."""
        return int(self.image[row]), int(self.box[row])


class _ShareFit:
    """The share of a destination.

    Offered: leaf 0 `w` (8 x 4, image 0) and leaf 1 `b` (8, image 1). The destination has `w` as a
    DTensor whose upper half is here, and `b` as a plain tensor:

        pair   form    leaf   image   box               rows of the record: leaf, image
        w      BOX     0      0       ((0, 0), (4, 4))  0, 0: the upper half of image 0
        b      WHOLE   1      1       WHOLE             1, 1: all of image 1
    """

    def __init__(self, offered: OfferedLeaves, destination: Destination, matched: Matched) -> None:
        self._offered, self._matched, self._here = offered, matched, destination
        self._leaves = destination.flat.leaves
        self._builder = ShareBuilder(offered)
        self._pairs = _Pairs.of(matched, offered.count)
        self._local_boxes = LocalBoxes()

    def share(self, likes: Likes) -> RankShare:
        pairs, builder = self._pairs, self._builder
        kinds = self._find_forms()
        made_whole = self._add_likes(likes)
        self._add_wholes(made_whole)
        self._add_boxes(kinds)
        for row in np.flatnonzero(pairs.form == _TakenAs.PARTS).tolist():
            self._add_parts(row)
        images, again = self._equal_images()
        deferred, matched = self._deferred(), self._without(again)
        record = builder.record(self._offered.tree)
        return RankShare(record, builder.images.sources, matched, deferred, images)

    def _path(self, row: int) -> str:
        if self._matched.tree is None:
            return show(self._matched.pairs[row][1])
        return show(LeafPaths(self._matched.tree)[int(self._pairs.offered[row])])

    def _find_forms(self) -> Numbers:
        """Fill in the forms. Returns the kind of each pair's distributed destination, or NONE."""
        pairs, leaves = self._pairs, self._leaves
        sharded = self._here.layout.sharded.numbers
        kind_of: Numbers = np.full(len(leaves), NONE, np.int64)
        kind_of[[*sharded]] = [*sharded.values()]
        kinds: Numbers = kind_of[pairs.here]
        types = {kind for kind in set(map(type, leaves)) if t.is_distributed_type(kind)}
        if types:
            pairs.form[kinds >= 0] = _TakenAs.BOX
            no_image = self._offered.images[pairs.offered] == NONE
            pairs.form[(kinds >= 0) & no_image] = _TakenAs.PARTS
            for row in np.flatnonzero(kinds == NONE).tolist():
                if type(leaves[int(pairs.here[row])]) in types:
                    pairs.form[row] = _TakenAs.PARTS
        return kinds

    # Leaves that are not distributed here.

    def _add_wholes(self, more: Numbers) -> None:
        """Add the leaves that destinations take as they are, and `more`; each of them once."""
        pairs = self._pairs
        rows = np.flatnonzero(pairs.form == _TakenAs.WHOLE)
        wanted = np.unique(np.concatenate([pairs.offered[rows], more]))
        numbers = self._builder.add_offered(wanted)
        pairs.leaf[rows] = numbers[np.searchsorted(wanted, pairs.offered[rows])]
        pairs.image[rows] = self._offered.images[pairs.offered[rows]]

    def _deferred(self) -> set[int]:
        """The leaves that are not all of an image."""
        pairs, others = self._pairs, self._builder.others
        partial = (pairs.form == _TakenAs.WHOLE) & (pairs.image == NONE)
        leaves = pairs.leaf[partial].tolist()
        return {n for n in leaves if n not in others or isinstance(others[n], _COPIED)}

    def _add_likes(self, likes: Likes) -> Numbers:
        """Add leaves that are made for objects: distributed as the tensors that they resemble,
        where those have their shape. Returns the ones that are made whole."""
        whole = []
        for leaf, like in likes.items():
            facts = self._offered.facts_of(leaf) if t.is_dtensor(like) else None
            if facts is None or like is None or not facts.shape or facts.shape != tuple(like.shape):
                whole.append(leaf)
                continue
            path = show(LeafPaths(self._offered.tree)[leaf])
            made = self._like(leaf, facts.dtype, like, path)
            if isinstance(made, m.ShardedLeaf):
                raise MismatchError(
                    "this rank has several separate boxes of it, and no new tensor can be made "
                    "of those: redistribute it first",
                    path=path,
                )
            (number,) = self._builder.numbers_for(np.array([leaf], np.int64)).tolist()
            self._builder.add(number, made)
        return np.array(whole, np.int64)

    # Leaves that are distributed here.

    def _add_boxes(self, kinds: Numbers) -> None:
        """Add leaves for distributed tensors with one plain part here, each as a box."""
        pairs, builder, offered = self._pairs, self._builder, self._offered
        rows = np.flatnonzero(pairs.form == _TakenAs.BOX)
        pairs.leaf[rows] = builder.numbers_for(pairs.offered[rows])
        pairs.image[rows] = offered.images[pairs.offered[rows]]
        for number in np.unique(kinds[rows]).tolist():
            kind = self._here.layout.sharded.kinds[number]
            some = rows[kinds[rows] == number]
            self._check_boxes(kind, some)
            box = pairs.box[some] = builder.images.number_of(kind.box, kind.shape)
            leaf_kind = kind._replace(flags=0).number_in(builder.kinds)
            images = builder.images.take(pairs.image[some], box)
            columns = np.broadcast_arrays(pairs.leaf[some], leaf_kind, images, 0)
            builder.add_rows(TensorRows(*columns))

    def _check_boxes(self, kind: ShardedKind, rows: Numbers) -> None:
        """`MismatchError` where these pairs, whose destinations are of one kind, do not fit."""
        offered = self._pairs.offered[rows]
        wrong = rows[self._offered.facts[offered] != self._offered.fact(kind.dtype, kind.shape)]
        if len(wrong):
            row = int(wrong[0])
            leaf, path = int(self._pairs.offered[row]), self._path(row)
            self._offered.check(leaf, kind.dtype, kind.shape, path)
        if kind.is_partial:
            raise MismatchError(PARTIAL, path=self._path(int(rows[0])))

    def _add_parts(self, row: int) -> None:
        """Add a leaf for a distributed tensor that has several parts here, or none that is
        plain."""
        pairs = self._pairs
        mine: Any = self._leaves[int(pairs.here[row])]
        leaf, dtype, path = int(pairs.offered[row]), t.NAMES[mine.dtype], self._path(row)
        self._offered.check(leaf, dtype, tuple(mine.size()), path)
        made = self._like(leaf, dtype, mine, path, row)
        (pairs.leaf[row],) = self._builder.numbers_for(np.array([leaf], np.int64))
        self._builder.add(int(pairs.leaf[row]), made)

    def _like(self, leaf: int, dtype: str, mine: Any, path: str, row: int | None = None) -> m.Leaf:
        """The parts of a tensor that a distributed one has in this process, described like it. The
        pair in `row` takes it."""
        source, shape, images = int(self._offered.images[leaf]), tuple(mine.size()), []
        with naming(path):
            parts = local_parts(mine, self._local_boxes)
        locals_ = []
        for part in parts:
            image = NONE
            if part.tensor.numel() and source != NONE:
                box = self._builder.images.number_of(part.box, shape)
                image = self._builder.images.take_one(source, box)
                images.append((source, box))
            locals_.append(m.TensorLeaf(dtype, tuple(part.tensor.shape), None, image))
        if row is not None and len(images) == 1:
            self._pairs.image[row], self._pairs.box[row] = images[0]
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

    # Several tensors for one destination.

    def _equal_images(self) -> tuple[list[EqualImages], set[int]]:
        """The images that must be equal, and the rows of pairs whose memory another pair fills."""
        pairs, leaves, take = self._pairs, self._leaves, self._builder.images.take_one
        alone = np.zeros(len(leaves), bool)  # leaves that share no memory with others
        alone[self._here.layout.plain.leaves] = True
        suspect = ~alone[pairs.here]
        if self._matched.tree is None:  # a leaf may be here at several paths
            suspect |= np.bincount(pairs.here, minlength=1)[pairs.here] > 1
        first_of: dict[object, int] = {}
        found, again = [], set()
        for row in np.flatnonzero(suspect & (pairs.image != NONE)).tolist():
            here = int(pairs.here[row])
            memory = here if alone[here] else _memory(leaves[here])
            first = row if memory is None else first_of.setdefault(memory, row)
            facts = self._offered.facts[pairs.offered[[row, first]]]
            one, other = pairs.tensor(first), pairs.tensor(row)
            if one != other and facts[0] == facts[1]:
                found.append(EqualImages(take(*one), take(*other), self._path(row)))
                again.add(row)
        return found, again

    def _without(self, dropped: Set[int]) -> Matched:
        """The pairs with the leaves of the share, but for those in `dropped` rows."""
        found, pairs = self._matched, self._pairs
        if not dropped and np.array_equal(pairs.leaf, pairs.offered):
            return found
        if found.tree is None:
            paths = [pair[1] for pair in found.pairs]
        else:
            paths = list(map(LeafPaths(found.tree).__getitem__, pairs.offered.tolist()))
        rows = zip(pairs.leaf.tolist(), paths, pairs.here.tolist(), strict=True)
        return Matched([pair for row, pair in enumerate(rows) if row not in dropped])


def _memory(mine: object) -> object:
    """What tells the memory of a tensor that is written in place from that of others."""
    if t.is_dtensor(mine):
        mine, _ = t.dtensor_parts(mine)
    if not isinstance(mine, torch.Tensor) or not t.is_plain(mine) or not mine.numel():
        return None
    return mine.device, mine.data_ptr(), mine.dtype, mine.shape, mine.stride()
