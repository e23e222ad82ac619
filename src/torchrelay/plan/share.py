"""What one rank takes of a recorded state, described as its own counterpart would send it.

A record tells of whole tensors, in the boxes that they were cut into where they come from. Here
each leaf is what its destination makes of it: a DTensor has a box of it, a plain tensor all of it,
whichever of the two it was. Each image of the manifest is one box of one stored tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.plan.in_rows import in_rows
from torchrelay.plan.offer import DestinationLayout, FittedShare
from torchrelay.plan.overlay import Overlay, pruned
from torchrelay.plan.selection import Selection
from torchrelay.plan.stored import Shard, StoredTensor
from torchrelay.record import manifest as m
from torchrelay.record.dtypes import itemsize
from torchrelay.record.manifest import parts, with_parts
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import ImageKind, Record
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import LocalBoxes, local_parts
from torchrelay.state.matching import Matched, Pair
from torchrelay.state.meshes import mesh_record
from torchrelay.state.paths import LeafPaths
from torchrelay.state.tree import check_types, show, slots

_WHOLE = (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)
_HELD = (m.TensorLeaf, m.QuantizedLeaf, m.SparseLeaf, m.SubclassLeaf)
_ODD = m.CONJ | m.NEG | m.META
_NOTHING = m.ValueLeaf("plain", None)  # in the place of leaves that nobody wants


class Portion(NamedTuple):
    """What an image of a share has: a box of a stored tensor. `layout` has its strides, unless they
    are row-major."""

    tensor: StoredTensor
    box: Box
    layout: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        return prod(self.box[1]) * itemsize(self.tensor.dtype)

    @property
    def shard(self) -> Shard | None:
        """The shard that is all of it, byte for byte; none where it has to be put together."""
        if self.layout is not None or not self.tensor.shards:
            return None
        found: Shard = self.tensor.shards[0]
        return found if (found.offsets, found.sizes) == self.box else None

    def over(self, storage: torch.UntypedStorage, offset: int = 0) -> torch.Tensor:
        """Its elements in the memory of an image."""
        record = m.TensorLeaf(self.tensor.dtype, self.box[1], None, 0)
        strides = self.layout or contiguous_strides(self.box[1])
        return t.over_storage(storage, offset, record, strides)


class RankShare:
    """One rank's share of a recorded state: of the leaves of these `ranks`, laid over each other,
    with the stored `tensors` by image. `include` chooses leaves by patterns of their paths.

    `look` is called with each stored tensor for which memory is going to be taken; `lend` may have
    memory with so many bytes of a shard in it already. `lent`: images that it had.
    `converts`: whoever reads may convert values to the dtype of their destination.
    """

    def __init__(
        self,
        ranks: Sequence[LeafRows],
        tensors: Sequence[StoredTensor],
        *,
        include: tuple[str, ...] = (),
        guessed: bool = False,
        converts: bool = False,
        look: Callable[[StoredTensor], None] = lambda stored: None,
        lend: Callable[[Shard, int], torch.Tensor | None] = lambda shard, nbytes: None,
    ) -> None:
        self._offer = Overlay(ranks)
        self._recorded = ranks[0].record
        self._boxes = LocalBoxes()
        self._tensors = list(tensors)
        self._converts = converts
        self._look, self._lend = look, lend
        self.lent: set[int] = set()
        self._numbers: dict[tuple[int, Box, tuple[int, ...]], int] = {}
        self._likes: dict[int, tuple[m.DTensorLeaf, t.DeviceMesh]] = {}
        self._first: dict[object, int] = {}  # by memory, the portion that goes there
        self.tree = self._offer.tree
        self.choice = Selection(
            include, len(self._offer.leaves), exact=self._offer.exact, guessed=guessed
        )
        self.portions: list[Portion] = []  # by image
        # Portions of two tensors for one place: their bytes must be the same.
        self.twins: list[tuple[Portion, Portion, Iterable[object]]] = []

    def whole(self, image: int, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """The tensor that the elements of an image in memory are of, distributed if it is."""
        tensor = self.portions[image].over(storage, offset)
        like = self._likes.get(image)
        return tensor if like is None else t.dtensor(tensor, like[0], like[1])

    def new(self) -> Record:
        check_types(self.tree)
        tree, leaves = self.tree, range(len(self._offer.leaves))
        wanted: Container[int] = leaves
        if self.choice.patterns:
            chosen = {index for path, index in slots(tree) if self.choice.takes(path)}
            wanted = chosen
            tree, _ = pruned(tree, dict.fromkeys(chosen))
        found = [self._made(index) if index in wanted else _NOTHING for index in leaves]
        return self._record(tree, [*found, _NOTHING])

    def filled(self, image: int) -> torch.Tensor | None:
        shard = self.portions[image].shard
        found = None if shard is None else self._lend(shard, self.portions[image].nbytes)
        if found is not None:
            self.lent.add(image)
        return found

    def fitted(
        self,
        leaves: Sequence[object],
        layout: DestinationLayout,
        matched: Matched,
        given: Mapping[int, torch.Tensor | None],
    ) -> FittedShare:
        found: list[m.Leaf] = [_NOTHING] * len(self._offer.leaves)
        for index, like in given.items():
            found[index] = self._given(index, like)
        late: set[int] = set()
        kept: list[Pair] | None = [] if matched.tree is None else None
        dropped: set[int] = set()
        for index, path, here in _pairs(matched, len(found)):
            mine = leaves[here]
            try:
                leaf, portion = self._local(index, mine, known=here in layout)
            except MismatchError as fault:
                fault.path = fault.path or show(_path(path, matched, index))
                raise
            if portion is not None:
                place = here if here in layout else _memory(mine)
                first = portion if place is None else self._first.setdefault(place, portion)
                if first != portion:
                    twins = self.portions[first], self.portions[portion]
                    self.twins.append((*twins, _path(path, matched, index)))
                    dropped.add(index)
                    continue
            if found[index] is not _NOTHING and found[index] != leaf:
                index = len(found)  # another part of the same tensor
                found.append(leaf)
            found[index] = leaf
            if portion is None and isinstance(leaf, _HELD):
                late.add(index)
            if kept is not None:
                kept.append((index, path, here))
        if kept is None and dropped:
            kept = [pair for pair in matched.pairs if pair[0] not in dropped]
        if kept is not None:
            matched = Matched(kept, matched.missing, matched.extra)
        return FittedShare(self._record(self.tree, found), matched, late)

    def _record(self, tree: m.Node, leaves: list[m.Leaf]) -> Record:
        """The leaves, and the portions as images."""
        dtypes = [portion.tensor.dtype for portion in self.portions]
        for leaf in leaves:
            if not isinstance(leaf, m.TensorLeaf) or leaf.storage < 0:
                continue
            if leaf.dtype != dtypes[leaf.storage] and self._is_portion(leaf):
                dtypes[leaf.storage] = leaf.dtype  # another one where values are converted
        images = [
            ImageKind(dtype, portion.box[1], portion.layout)
            for dtype, portion in zip(dtypes, self.portions, strict=True)
        ]
        return in_rows(tree, leaves, images)

    def _is_portion(self, leaf: m.TensorLeaf) -> bool:
        """Whether a tensor is all of a portion, as that is laid out."""
        if leaf.offset or leaf.flags & m.META:
            return False
        portion = self.portions[leaf.storage]
        return portion.box[1] == leaf.shape and portion.layout == leaf.strides

    def _portion(self, image: int, box: Box | None = None, strides: tuple[int, ...] = ()) -> int:
        """The number of a portion with this box of a stored tensor, or all of it."""
        stored = self._tensors[image]
        if box is None:
            box = (0,) * len(stored.shape), stored.shape
        key = image, box, strides
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.portions)
            is_layout = strides and strides != contiguous_strides(box[1])
            self.portions.append(Portion(stored, box, strides if is_layout else None))
        return number

    def _all_of(self, leaf: m.Leaf) -> int | None:
        """The image that is all of a leaf, element for element."""
        if not isinstance(leaf, _WHOLE):
            return None
        part = next(parts(leaf))
        if part.storage < 0 or part.strides is not None or part.offset:
            return None
        stored = self._tensors[part.storage]
        same = (stored.dtype, stored.shape) == (part.dtype, part.shape)
        return part.storage if same else None

    def _made(self, index: int) -> m.Leaf:
        """A leaf as it is made without the ranks that had it: distributed tensors are whole."""
        leaf = self._offer.leaves[index]
        if isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
            part = next(parts(leaf))
            leaf = m.TensorLeaf(part.dtype, part.shape, None, part.storage, 0, leaf.flags)
        return self._placed(leaf)

    def _placed(self, leaf: m.Leaf) -> m.Leaf:
        """A leaf over images of whole tensors, in the layout that they had in memory."""
        kinds, kind_of = self._recorded.image_kinds, self._recorded.image_kind

        def place(part: m.TensorLeaf) -> m.TensorLeaf:
            if part.storage < 0:
                return part
            stored = self._tensors[part.storage]
            self._look(stored)
            layout = kinds[int(kind_of[part.storage])].strides or ()
            number = self._portion(part.storage, None, layout)
            strides = part.strides
            if layout and strides is None and not part.offset and part.shape == stored.shape:
                strides = layout
            elif number == part.storage:
                return part
            return m.TensorLeaf(part.dtype, part.shape, strides, number, part.offset, part.flags)

        return with_parts(leaf, place)

    def _given(self, index: int, like: torch.Tensor | None) -> m.Leaf:
        """A leaf that is made for an object: distributed as `like` is, where that has its shape."""
        leaf = self._offer.leaves[index]
        image = self._all_of(leaf)
        if image is None or not t.is_dtensor(like):
            return self._made(index)
        stored = self._tensors[image]
        if not stored.shape or stored.shape != tuple(like.shape):
            return self._made(index)
        self._look(stored)
        return self._part_of(image, stored.dtype, like)[0]

    def _local(self, index: int, mine: object, *, known: bool) -> tuple[m.Leaf, int | None]:
        """A leaf as it goes to `mine`, and the image that is all of what goes there, if there is
        one. `known`: it is a plain tensor."""
        leaf = self._offer.leaves[index]
        if isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
            leaf = next(parts(leaf))
        if not isinstance(leaf, m.TensorLeaf) or not isinstance(mine, torch.Tensor):
            return self._placed(leaf), None
        image = self._all_of(leaf)
        if t.is_distributed(mine):
            if image is not None or 0 in leaf.shape:
                self._compare(leaf, mine)
                return self._part_of(image, leaf.dtype, mine)
        elif image is not None and not leaf.flags & _ODD and (known or _is_settable(mine)):
            self._compare(leaf, mine)
            number = self._portion(image)
            dtype = t.NAMES[mine.dtype] if self._converts else leaf.dtype
            if (number, dtype) == (leaf.storage, leaf.dtype):
                return leaf, number
            return m.TensorLeaf(dtype, leaf.shape, None, number, 0, leaf.flags), number
        return self._placed(leaf), None

    def _part_of(
        self, image: int | None, dtype: str, mine: torch.Tensor
    ) -> tuple[m.Leaf, int | None]:
        """The part of a tensor that a distributed one has in this process, described like it."""
        if self._converts:
            dtype = t.NAMES[mine.dtype]
        shape = tuple(mine.size())
        numbers, locals_ = [], []
        for part in local_parts(mine, self._boxes):
            number = -1
            if image is not None and part.tensor.numel():
                number = self._portion(image, part.box)
            numbers.append(number)
            locals_.append(m.TensorLeaf(dtype, tuple(part.tensor.shape), None, number))
        if isinstance(mine, t.ShardedTensor):
            _, boxes, all_boxes, _ = t.sharded_parts(mine)
            sharded = m.ShardedLeaf(tuple(locals_), boxes, all_boxes, shape, dtype)
            return sharded, max(numbers, default=-1)
        assert t.is_dtensor(mine)
        local, spec = t.dtensor_parts(mine)
        whole = locals_[0] if locals_ else m.TensorLeaf(dtype, tuple(local.shape), None, -1)
        coordinate = spec.mesh.get_coordinate()
        leaf = m.DTensorLeaf(
            whole,
            mesh_record(spec.mesh),
            tuple(t.placement_record(placement) for placement in spec.placements),
            shape,
            tuple(mine.stride()),
            None if coordinate is None else tuple(coordinate),
        )
        self._likes.update((number, (leaf, spec.mesh)) for number in numbers)
        return leaf, max(numbers, default=-1)

    def _compare(self, leaf: m.TensorLeaf, mine: torch.Tensor) -> None:
        dtype = leaf.dtype if self._converts else t.NAMES[mine.dtype]
        if leaf.shape == mine.size() and leaf.dtype == dtype and type(mine) is torch.Tensor:
            return
        facts: list[tuple[str, object, object]] = [("shape", leaf.shape, tuple(mine.size()))]
        if not self._converts:
            facts.insert(0, ("dtype", leaf.dtype, t.NAMES[mine.dtype]))
        for what, theirs, ours in facts:
            if theirs != ours:
                raise MismatchError(f"{what} differs: offered {theirs}, the destination has {ours}")
        if t.is_dtensor(mine) and any(p.is_partial() for p in mine.placements):
            raise MismatchError(
                f"a DTensor with a partial placement, {mine.placements}, takes no value"
            )


def _pairs(matched: Matched, count: int) -> Iterable[Pair]:
    """The pairs; without their paths where both sides have one tree."""
    return matched.pairs if matched.tree is None else ((n, (), n) for n in range(count))


def _path(path: Iterable[object], matched: Matched, index: int) -> Iterable[object]:
    return path if matched.tree is None else LeafPaths(matched.tree)[index]


def _is_settable(mine: torch.Tensor) -> bool:
    """Whether a tensor can be filled in place, element by element, from a whole stored one."""
    return t.is_plain(mine) and not mine.is_meta and not t.flags_of(mine) & _ODD


def _memory(mine: object) -> object:
    """What tells the memory of a tensor that is written in place from that of others."""
    if t.is_dtensor(mine):
        mine, _ = t.dtensor_parts(mine)
    if isinstance(mine, t.ShardedTensor) or not isinstance(mine, torch.Tensor) or not mine.numel():
        return None
    return mine.device, mine.data_ptr(), mine.dtype, mine.shape, mine.stride()
