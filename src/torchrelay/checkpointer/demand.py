"""What a load wants of a committed step, for one rank: worked out against the commit record, and
refused here where it does not fit the destination. Nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from math import prod
from typing import TypeGuard

import numpy as np
import torch
from msgspec.structs import replace

from torchrelay.checkpointer.selection import Texts
from torchrelay.errors import MismatchError
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.landing.fit import ArrayFit, Fit, fit
from torchrelay.landing.handover import Handover, Pair
from torchrelay.landing.leaves import check_leaf, make_leaf
from torchrelay.landing.ties import check_ties
from torchrelay.plan.overlay import Overlay
from torchrelay.record import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.hints import with_hints
from torchrelay.state.leaves import parts
from torchrelay.state.matching import (
    Comparison,
    Difference,
    ends_of,
    listed,
    refuse_differences,
)
from torchrelay.state.objects import Held, parameter_of, unwrap
from torchrelay.state.paths import LeafPaths, Path
from torchrelay.state.tree import (
    check_types,
    flatten,
    grafted,
    inside_records,
    show,
    slots,
    subtree,
)
from torchrelay.stores.box_reads import by_name
from torchrelay.stores.reading import opened
from torchrelay.stores.records import Checkpoint, StoredTensor
from torchrelay.stores.seam import OpenStep

_WHOLE = (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)
Layers = list[dict[str, torch.Tensor]]


class Demand:
    """Which stored tensors go where, and what is made of them.

    `new` and `own` have what is read by name, into new tensors and into the caller's; a tensor that
    goes to several places has one in each layer.
    """

    def __init__(
        self,
        store: OpenStep,
        checkpoint: Checkpoint,
        *,
        rank: int,
        world: int,
        into: object,
        strict: bool,
        atomic: bool,
        only: tuple[str, ...],
        device: torch.device | None,
        converts: bool,
    ) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._rank = rank
        self._atomic = atomic
        self._only = only
        self._device = device or torch.device("cpu")
        self._converts = converts  # whether a planner of the user's may convert
        self._tensors = by_name(checkpoint)
        self._numbers = {name: number for number, name in enumerate(self._tensors)}
        self._homes: dict[str, torch.Tensor] = {}  # new tensors, by name
        self._seen: set[int] = set()  # files that are there, with their sizes
        self._claims: list[tuple[Fit | ArrayFit, Path]] = []
        self._first: dict[tuple[object, ...], StoredTensor] = {}
        self._inside: set[int] = set()  # leaves that registered types are made of
        self.offer = Overlay.of(checkpoint.outlines_for(rank, world))
        self._texts = Texts(len(self.offer.leaves))
        self.new: Layers = []
        self.own: Layers = []
        self.written: list[torch.Tensor] = []  # of the caller's
        # Tensors that are stored apart and share one place here: their bytes must be the same.
        self.twins: list[tuple[StoredTensor, StoredTensor, Path]] = []
        self.late: list[tuple[Fit | ArrayFit, int]] = []
        self.made: dict[int, Iterable[object]] = {}  # leaves that are built anew
        self.grown: dict[int, object] = {}  # new distributed ones that objects are told
        self.filled: dict[int, object] = {}  # leaves of told objects that are filled in place
        self.values: dict[int, int] = {}  # by leaf here, the one whose value it takes
        self.inside: list[Pair] = []
        self.missing: list[str] = []
        self.extra: list[str] = []
        self.handover: Handover | None = None
        if into is None:
            self._want_new()
        else:
            self._want_into(into, strict)

    def _want_new(self) -> None:
        check_types(self.offer.tree)
        paths = LeafPaths(self.offer.tree)
        leaves = (index for path, index in slots(self.offer.tree) if self._chosen(path))
        for index in leaves if self._only else paths:
            self._make(index, paths[index])

    def _chosen(self, path: Path) -> bool:
        if not self._only:
            return True
        name = self._texts.of(path)
        return any(fnmatchcase(name, pattern) for pattern in self._only)

    def _make(self, index: int, path: Iterable[object], like: torch.Tensor | None = None) -> None:
        if index in self.made:
            return
        leaf = self.offer.leaves[index]
        check_leaf(leaf, path)
        self.made[index] = path
        for part in parts(leaf):
            self._home(index, part, like)

    def _home(self, index: int, part: m.TensorLeaf, like: torch.Tensor | None = None) -> None:
        """A new tensor for the named one that a part of a leaf lies in, where `like` is."""
        if part.storage < 0:
            return
        outline = self.offer.homes[index]
        name = outline.names[part.storage]
        if name in self._homes:
            return
        stored = self._tensors[name]
        self.look_at_files(stored)
        leaf = self.offer.leaves[index]
        device = self._device if like is None or not part.shape else like.device
        if isinstance(leaf, m.ArrayLeaf):
            device = torch.device("cpu")
        strides = outline.strides.get(part.storage)
        if strides is None or len(strides) != len(stored.shape):
            strides = contiguous_strides(stored.shape)
        try:
            self._homes[name] = torch.empty_strided(
                stored.shape, strides, dtype=t.dtype_named(stored.dtype), device=device
            )
        except (
            RuntimeError,
            AssertionError,
        ) as fault:  # the latter: a device torch has no part for
            raise MismatchError(f"no memory for {name} on {device}: {fault}") from None
        _add(self.new, name, self._homes[name])

    def look_at_files(self, stored: StoredTensor) -> None:
        """No memory is taken for a tensor whose files are not as large as the record says."""
        for file in {shard.file for shard in stored.shards} - self._seen:
            opened(self._store, self._checkpoint, file).close()
            self._seen.add(file)

    def _want_into(self, into: object, strict: bool) -> None:
        state, objects = unwrap(into)
        flat = flatten(state)
        tree = self.offer.tree
        self._inside = inside_records(tree)
        told = self._told([path for path, held in objects.items() if not held.in_place])
        stubs = {
            path: -1 - n for n, (path, held) in enumerate(objects.items()) if not held.in_place
        }
        found = Comparison(grafted(tree, stubs), grafted(flat.tree, stubs))

        def missing() -> Iterator[Path]:
            for path, node in ends_of(found.missing):
                if path in told if _is_stub(node) else self._chosen(path):
                    yield path

        def extra() -> Iterator[Path]:
            for path, node in ends_of(found.extra):
                if self._checkpoint.planned and not isinstance(node, int):
                    continue
                if path in told or not self._only if _is_stub(node) else self._chosen(path):
                    yield path

        if strict:
            kinds = [] if self._only else self._known_kinds(found.kinds)
            with with_hints(tree, flat.tree):
                refuse_differences(missing() if self.offer.exact else (), extra(), kinds)
        self.missing, self.extra = listed(missing()), listed(extra())
        inside = []
        for index, path, place in found.pairs:
            if index >= 0 and self._chosen(path):
                self._fit(index, path, flat.leaves[place], place)
                inside += [(index, path, place)] if index in self._inside else []
        mine = {path: flat.leaves[place] for path, place in slots(flat.tree)}
        for root, branch in told.items():
            for below, index in slots(branch):
                path = (*root, *below)
                self._grow(index, path, objects[root], below, mine.get(path))
        sizes = [
            prod(tensor.shape) * t.dtype_named(tensor.dtype).itemsize
            for tensor in self._tensors.values()
        ]
        check_ties(self._claims, Chunks(sizes, ()))
        self.inside, self._leaves = inside, flat.leaves
        self.handover = Handover(into, flat, objects, tree, told, inside, before=self._atomic)

    def _known_kinds(self, kinds: list[Difference]) -> list[Difference]:
        """Those that are no guess of a planner's, which takes tuples of tensors for lists."""
        if not self._checkpoint.planned:
            return kinds
        return [kind for kind in kinds if (kind.offered, kind.here) != ("a list", "a tuple")]

    def _told(self, roots: list[Path]) -> dict[Path, m.Node]:
        """What is stored for each of these objects; one takes all of its state, or none."""
        found: dict[Path, m.Node] = {}
        for root in roots:
            branch = subtree(self.offer.tree, root)
            if branch is None:
                continue
            paths = [(*root, *below) for below, _ in slots(branch)]
            chosen = [self._chosen(path) for path in paths or [root]]
            if all(chosen):
                found[root] = branch
            elif any(chosen):
                raise MismatchError(
                    "an object takes all of its state or none, and `only` leaves this out",
                    path=show(paths[chosen.index(False)]),
                )
        return found

    def _grow(self, index: int, path: Path, held: Held, below: Path, mine: object) -> None:
        """What an object is told: like its own tensor, or its parameter, where that is distributed.

        Unless `atomic`, and where a tensor cannot be made anew, the object's own is filled."""
        if isinstance(mine, t.ShardedTensor) or (
            not self._atomic and isinstance(mine, (torch.Tensor, np.ndarray))
        ):
            self.filled[index] = mine
            self._fit(index, path, mine)
            return
        leaf = self.offer.leaves[index]
        stored = self._whole(index, leaf)
        like = mine if isinstance(mine, torch.Tensor) else parameter_of(held.object, below)
        if stored is None or like is None:
            self._make(index, path, like)
            return
        if like is mine and isinstance(held.object, torch.optim.Optimizer):
            self._fit_facts(stored, like, path)
        if isinstance(like, t.DTensor) and stored.shape and stored.shape == tuple(like.shape):
            new = torch.empty_like(like, dtype=t.dtype_named(stored.dtype)).detach()
            self.grown[index] = new
            _add(self.new, stored.name, new)
        else:
            self._make(index, path, like)

    def _fit(self, index: int, path: Path, mine: object, place: int = -1) -> None:
        leaf = self.offer.leaves[index]
        if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
            isinstance(leaf, m.ArrayLeaf) and leaf.scalar
        ):
            list(fit(leaf, mine, path))
            self._make(index, path)
            if place >= 0:
                self.values[place] = index
            return
        whole = self._whole(index, leaf)
        # What a registered type is made of is held back until all of them are known to be sound.
        at_once = index not in self._inside or _is_distributed(mine)
        if (
            whole is not None
            and at_once
            and isinstance(mine, torch.Tensor)
            and _is_settable(mine, leaf)
        ):
            self._fit_whole(whole, leaf, mine, path)
            return
        if isinstance(leaf, _WHOLE) and _is_distributed(mine) and 0 in next(parts(leaf)).shape:
            self._fit_facts(next(parts(leaf)), mine, path)
            return
        for pair in fit(_as_plain(leaf, mine), mine, path):
            self.late.append((pair, index))
            taken = next(parts(pair.leaf)) if isinstance(pair, ArrayFit) else pair.part
            self._home(index, taken)
            name = self.offer.homes[index].names[taken.storage]
            self._claim(pair, name, path)
            if isinstance(pair, Fit):
                self.written.append(pair.destination)

    def _claim(self, pair: Fit | ArrayFit, name: str, path: Path) -> None:
        if isinstance(pair, ArrayFit):
            pair = pair._replace(leaf=replace(pair.leaf, storage=self._numbers[name]))
        else:
            pair = pair._replace(part=replace(pair.part, storage=self._numbers[name]))
        self._claims.append((pair, path))

    def _whole(self, index: int, leaf: m.Leaf) -> StoredTensor | None:
        """The stored tensor that is all of a leaf, element for element."""
        if not isinstance(leaf, _WHOLE):
            return None
        part = next(parts(leaf))
        if part.storage < 0 or part.strides is not None or part.offset:
            return None
        stored = self._tensors[self.offer.homes[index].names[part.storage]]
        same = (stored.dtype, stored.shape) == (part.dtype, part.shape)
        return stored if same else None

    def _fit_whole(
        self, stored: StoredTensor, leaf: m.Leaf, mine: torch.Tensor, path: Path
    ) -> None:
        self._fit_facts(stored, mine, path)
        if not _is_distributed(mine):
            place = (mine.device, mine.data_ptr(), mine.dtype, mine.shape, mine.stride())
            first = self._first.setdefault(place, stored)
            if first is not stored:
                self.twins.append((first, stored, path))
                return
        _add(self.own, stored.name, mine)
        self.written.append(mine)
        if isinstance(leaf, m.TensorLeaf) and not _is_distributed(mine):
            part = m.TensorLeaf(stored.dtype, stored.shape, None, 0)
            self._claim(Fit(part, mine), stored.name, path)

    def _fit_facts(
        self, offered: StoredTensor | m.TensorLeaf, mine: torch.Tensor, path: Path
    ) -> None:
        facts: list[tuple[str, object, object]] = [("shape", offered.shape, tuple(mine.size()))]
        if not self._converts:  # a planner of the user's may well convert
            facts.insert(0, ("dtype", offered.dtype, t.NAMES[mine.dtype]))
        for what, theirs, ours in facts:
            if theirs != ours:
                raise MismatchError(
                    f"{what} differs: offered {theirs}, the destination has {ours}",
                    path=show(path),
                )
        if isinstance(mine, t.DTensor) and any(p.is_partial() for p in mine.placements):
            raise MismatchError(
                f"a DTensor with a partial placement, {mine.placements}, takes no value",
                path=show(path),
            )

    def _plainly(self, index: int) -> m.Leaf:
        """A leaf as it is built without the ranks that saved it: distributed tensors are whole."""
        leaf = self.offer.leaves[index]
        if isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
            part = next(parts(leaf))
            return m.TensorLeaf(part.dtype, part.shape, None, part.storage, 0, leaf.flags)
        return leaf

    def leaf(self, index: int, path: Iterable[object]) -> object:
        """A leaf of new tensors that have been read."""
        return make_leaf(self._plainly(index), path, self.part_of(index), self._rank)

    def stand_in(self, index: int, path: Path, place: int) -> object:
        """A leaf of a registered type as it will be; a distributed one as it is."""
        mine = self._leaves[place]
        return mine if _is_distributed(mine) else self.leaf(index, path)

    def part_of(self, index: int) -> Callable[[m.TensorLeaf], torch.Tensor]:
        outline = self.offer.homes[index]

        def part(leaf: m.TensorLeaf) -> torch.Tensor:
            strides = contiguous_strides(leaf.shape) if leaf.strides is None else leaf.strides
            if leaf.storage < 0:
                device = "meta" if leaf.flags & m.META else self._device
                return t.without_storage(leaf, strides, device)
            home = self._homes[outline.names[leaf.storage]]
            if leaf.strides is None and not leaf.offset and leaf.shape == tuple(home.shape):
                strides = home.stride()  # the layout in memory that the tensor had
            return t.over_storage(home.untyped_storage(), leaf.offset, leaf, strides)

        return part


def _add(layers: list[dict[str, torch.Tensor]], name: str, destination: torch.Tensor) -> None:
    for layer in layers:
        other = layer.setdefault(name, destination)
        if other is destination or _same_memory(other, destination):
            return
    layers.append({name: destination})


def _is_settable(mine: torch.Tensor, leaf: m.Leaf) -> bool:
    """Whether a tensor can be filled in place, element by element, from a whole stored one."""
    if isinstance(mine, (t.DTensor, t.ShardedTensor)):
        return True
    if not t.is_plain(mine) or mine.is_meta:
        return False
    part = next(parts(leaf))
    return not (t.flags_of(mine) | part.flags) & (m.CONJ | m.NEG | m.META)


def _as_plain(leaf: m.Leaf, mine: object) -> m.Leaf:
    """A distributed leaf as the whole tensor it is, for a destination that is not distributed."""
    if isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
        return next(parts(leaf))
    return leaf


def _is_stub(node: m.Node) -> bool:
    """Whether a node stands for an object that is told its state."""
    return isinstance(node, int) and node < 0


def _is_distributed(mine: object) -> TypeGuard[torch.Tensor]:
    return isinstance(mine, (t.DTensor, t.ShardedTensor))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether filling one fills the other just so."""
    if isinstance(one, t.DTensor) and isinstance(other, t.DTensor):
        (one, spec), (other, spec_other) = t.dtensor_parts(one), t.dtensor_parts(other)
        if (spec.mesh, spec.placements) != (spec_other.mesh, spec_other.placements):
            return False
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor:
        return False
    facts = [(x.data_ptr(), x.dtype, x.shape, x.stride(), x.device) for x in (one, other)]
    return facts[0] == facts[1]
