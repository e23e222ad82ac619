"""A state described: plain tensors as pieces of memory, and all other leaves one by one.

Everything that describes a live state begins here: the record of what is sent (`state_plan`), the
outline with its named tensors (`at_rest`), and the layout of a destination.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from torchrelay.describing.images import GeneralLeaves, LeafImages, stored_dtype
from torchrelay.describing.outline import OutlineBuilder, TensorRows
from torchrelay.describing.plain import PlainTensors, find_plain
from torchrelay.describing.sharded import ShardedKind, find_sharded
from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import reaching
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.rows import Marks
from torchrelay.record.schema import ImageKind, LeafKind, Record
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import tie_of
from torchrelay.state.paths import LeafPaths, Path, naming
from torchrelay.state.tree import Flat

Indices = np.ndarray[Any, np.dtype[np.intp]]


class Description:
    """A state in columns: its leaves, and its images in the order of `plain`, `wholes`, `images`.

    `plain` are tensors that reach into no other, each an image of its own; distributed tensors
    count as their local ones, which `locals` has in their places. `images` are those of all other
    leaves.

    At rest images are row-major and of no device, and a distributed tensor is an image that is
    whole, whatever lies here. `wholes` are the leaves of those that `plain` does not have.

    `UnsupportedLeafError` names what cannot be described.
    """

    def __init__(self, flat: Flat, *, at_rest: bool = False) -> None:
        self.flat, self._at_rest = flat, at_rest
        self.sharded = find_sharded(flat.leaves, self.path_of if at_rest else None)
        self.locals = self.sharded.local_leaves(flat.leaves)
        self.plain = find_plain(self.locals)
        self._describe_others()
        leave = _overlapping(self.plain, self.general)
        if leave.any():
            self.plain = self.plain.some(~leave)
            self._describe_others()
        self._leaf_images = LeafImages(self.general)
        self.images = self._leaf_images.images

    def path_of(self, leaf: int) -> Path:
        return LeafPaths(self.flat.tree)[leaf]

    @property
    def owners(self) -> Numbers:
        """The first leaf of each image."""
        more = [*self.wholes, *(image.leaf for image in self.images)]
        return np.append(self.plain.leaves, np.array(more, np.int64))

    def _describe_others(self) -> None:
        """Describe the leaves that are not plain tensors."""
        rest = np.ones(self.plain.count, bool)
        rest[self.plain.leaves] = False
        self.general = GeneralLeaves(self.flat.tree, at_rest=self._at_rest)
        self.wholes: list[int] = []
        self._whole_images: dict[int, int] = {}  # by leaf, in `wholes`; -1 if it has no bytes
        ties: dict[object, int] = {}
        for leaf in np.flatnonzero(rest).tolist():
            sharded = self.sharded.kind_of(leaf)
            if sharded is None or not self._at_rest:
                self.general.take(leaf, self.flat.leaves[leaf], sharded)
                continue
            with naming(partial(self.path_of, leaf)):
                tie = self._tie_of(leaf, sharded)
            image = -1 if tie is None else ties.setdefault(tie, len(self.wholes))
            if image == len(self.wholes):
                self.wholes.append(leaf)
            self._whole_images[leaf] = image

    def _tie_of(self, leaf: int, kind: ShardedKind) -> object | None:
        """A value that a whole tensor shares with those that are tied to it; None if it has no
        elements, or no memory."""
        local = self.sharded.locals.get(leaf)
        if local is not None and not t.is_plain(local):
            raise UnsupportedLeafError("the local part is not a plain strided tensor")
        if local is not None and any(t.lazy_bits(local)):
            raise UnsupportedLeafError(
                "the local part is lazily conjugated or negated: call resolve_conj() and "
                "resolve_neg() on it first"
            )
        if 0 in kind.shape or (local is not None and local.is_meta):
            return None
        tensor: Any = self.flat.leaves[leaf]
        return tie_of(tensor) or leaf

    def record(self, numbers: Indices, **fields: Any) -> Record:
        """The record of the state, with these `numbers` of images."""
        kinds, plain, found = KindTable(), self.plain, OutlineBuilder()
        count, first = len(plain), len(plain) + len(self.wholes)
        leaf_kinds, image_kinds = self._plain_kinds(kinds)
        zeros = np.zeros(count, np.int64)
        found.add_rows(TensorRows(plain.leaves, leaf_kinds, numbers[:count], zeros))
        rows, others = self._leaf_images.rows_and_others(kinds, numbers[first:].tolist())
        for leaf, other in others.items():
            found.add(leaf, other)
        for leaf, image in self._whole_images.items():
            kind = self.sharded.kinds[self.sharded.numbers[leaf]]
            if image >= 0:
                rows.append((leaf, kind.number_in(kinds), int(numbers[count + image]), 0))
            else:
                meta = leaf in self.sharded.locals and self.sharded.locals[leaf].is_meta
                found.add(leaf, kind.without_bytes(m.META if meta else 0))
        if rows:
            found.add_rows(TensorRows(*np.array(rows, np.int64).T))
        more = [self.sharded.kinds[self.sharded.numbers[leaf]].image for leaf in self.wholes]
        more += [image.kind for image in self.images]
        kind_of: Numbers = np.empty(len(numbers), np.int64)
        kind_of[numbers] = np.append(image_kinds, kinds.images.numbers(map(self._stored, more)))
        outline = found.build(self.flat.tree, len(self.flat.leaves))
        return kinds.record((outline,), kind_of, **fields)

    def _stored(self, kind: ImageKind) -> ImageKind:
        """The kind of an image in the record: at rest its boxes are not known yet."""
        return kind.without_boxes if self._at_rest else kind

    def _plain_kinds(self, kinds: KindTable) -> tuple[Numbers, Numbers]:
        """Of each plain tensor, the kind of its leaf and that of its image."""
        of = self.sharded.kinds_of(self.plain)
        count = len(self.plain.kinds)
        found: Numbers = np.zeros((2, count + len(self.sharded.kinds)), np.int64)
        for number in np.flatnonzero(np.bincount(of, minlength=1)).tolist() if len(of) else ():
            if number < count:
                kind = self.plain.kinds[number]
                leaf = kinds.leaves.number(LeafKind(kind.dtype, kind.shape, None, kind.flags))
                image = ImageKind(stored_dtype(kind.dtype), kind.shape)
            else:
                part = self.sharded.kinds[number - count]
                leaf, image = part.number_in(kinds), part.image
            found[:, number] = leaf, kinds.images.number(self._stored(image))
        return found[0][of], found[1][of]


def _overlapping(plain: PlainTensors, others: GeneralLeaves) -> Marks:
    """Marks plain tensors whose storage has bytes that several tensors, or `others`, have."""
    starts, lows = plain.origins, plain.addresses
    more_lows, more_highs = others.spans
    highs = np.concatenate([lows + plain.nbytes, more_highs])
    meet = reaching(np.concatenate([lows, more_lows]), highs)[: len(lows)]
    touched = np.concatenate([np.array(others.origins, np.uint64), starts[meet]])
    return np.isin(starts, touched) if len(touched) else meet
