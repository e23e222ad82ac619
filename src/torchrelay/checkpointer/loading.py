"""A load, from a committed step to the caller's state.

What a rank wants is worked out against the commit record first, and refused there if it does not
fit. Then every digest is checked; only then is anything of the caller's written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch
from msgspec.structs import replace
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torchrelay.checkpointer.stateful import Unwrapped, can_grow, like, rewrap, unwrap
from torchrelay.errors import MismatchError
from torchrelay.state import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.building import check_leaf, copy_late, late_copy, make_leaf
from torchrelay.state.containers import (
    Path,
    check_types,
    flatten,
    match,
    show,
    slots,
    subtree,
    unflatten,
    write_back,
)
from torchrelay.state.fitting import ArrayFit, Fit, fit
from torchrelay.state.leaves import parts
from torchrelay.state.offer import Offer, pruned
from torchrelay.state.outline import dotted
from torchrelay.state.pause import gc_paused
from torchrelay.state.plan import Chunks
from torchrelay.state.spans import contiguous_strides
from torchrelay.state.ties import check_ties
from torchrelay.stores.metadata import metadata_of
from torchrelay.stores.placing import Wave, Wish, by_name, shard_at, waves
from torchrelay.stores.reading import Fetch, opened
from torchrelay.stores.records import Checkpoint, StoredTensor
from torchrelay.stores.seam import Store

_WHOLE = (m.TensorLeaf, m.DTensorLeaf, m.ShardedLeaf)


class Landed(NamedTuple):
    state: Any
    missing: list[str]
    extra: list[str]


class Loading:
    """One load on one rank: planned by the constructor, then `check`, `land` and `commit`."""

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        *,
        rank: int,
        world: int,
        into: object = None,
        strict: bool = True,
        only: tuple[str, ...] = (),
        device: torch.device | None = None,
        planner: LoadPlanner | None = None,
        coordinator: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._rank = rank
        self._device = device or torch.device("cpu")
        self._progress = progress
        self._tensors = by_name(checkpoint)
        self._numbers = {name: number for number, name in enumerate(self._tensors)}
        self._offer = Offer.of(checkpoint.outlines_for(rank, world))
        self._homes: dict[str, torch.Tensor] = {}  # new tensors, by name
        self._seen: set[int] = set()  # files that are there, with their sizes
        # What is read, by name; a tensor that goes to several places has one in each layer.
        self._layers: list[dict[str, torch.Tensor]] = [{}]
        self._written: list[torch.Tensor] = []  # of the caller's
        self._claims: list[tuple[Fit | ArrayFit, Path]] = []
        # Tensors that are stored apart and share one place here: their bytes must be the same.
        self._twins: list[tuple[StoredTensor, StoredTensor, Path]] = []
        self._first: dict[tuple[object, ...], StoredTensor] = {}
        self._late: list[tuple[Fit | ArrayFit, int]] = []
        self._made: dict[int, Path] = {}  # leaves that are built anew
        self._mine: dict[int, object] = {}  # leaves that the caller has
        self._missing: list[str] = []
        self._extra: list[str] = []
        self._only = only
        self._checked = False
        self._into: Unwrapped | None = None
        self._told: list[Path] = []  # objects that are told their state
        self._original = into
        self._planner = planner
        self._here: dict[Path, object] = {}  # what the caller has, by path
        with gc_paused():
            if into is None:
                self._want_new()
            else:
                self._want_into(unwrap(into), strict)
            self._waves = self._plan(coordinator)

    # What is wanted.

    def _want_new(self) -> None:
        check_types(self._offer.tree)
        for path, index in slots(self._offer.tree):
            if self._chosen(path):
                self._make(index, path)

    def _chosen(self, path: Path) -> bool:
        name = dotted(path)
        return not self._only or any(fnmatchcase(name, pattern) for pattern in self._only)

    def _make(self, index: int, path: Path) -> None:
        if index in self._made:
            return
        leaf = self._offer.leaves[index]
        check_leaf(leaf, path)
        self._made[index] = path
        for part in parts(leaf):
            self._home(index, part)

    def _home(self, index: int, part: m.TensorLeaf) -> None:
        """A new tensor for the named one that a part of a leaf lies in."""
        if part.storage < 0:
            return
        outline = self._offer.homes[index]
        name = outline.names[part.storage]
        if name in self._homes:
            return
        stored = self._tensors[name]
        self._look_at_files(stored)
        leaf = self._offer.leaves[index]
        device = torch.device("cpu") if isinstance(leaf, m.ArrayLeaf) else self._device
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
        self._read(name, self._homes[name])

    def _look_at_files(self, stored: StoredTensor) -> None:
        """No memory is taken for a tensor whose files are not as large as the record says."""
        for file in {shard.file for shard in stored.shards} - self._seen:
            opened(self._store, self._checkpoint, file).close()
            self._seen.add(file)

    def _read(self, name: str, destination: torch.Tensor) -> None:
        for layer in self._layers:
            other = layer.setdefault(name, destination)
            if other is destination or _same_memory(other, destination):
                return
        self._layers.append({name: destination})

    def _want_into(self, into: Unwrapped, strict: bool) -> None:
        self._into = into
        flat = flatten(into.state)
        self._here = {path: flat.leaves[place] for path, place in slots(flat.tree)}
        offered = [slot for slot in slots(self._offer.tree) if self._chosen(slot[0])]
        here = [slot for slot in slots(flat.tree) if self._chosen(slot[0])]
        matched = match(offered, here, strict=False)
        known, stored = {path for path, _ in here}, {path for path, _ in offered}
        lacking = [(path, index) for path, index in offered if path not in known]
        growing = [key for key, stateful in into.objects.items() if can_grow(stateful)]
        grown = [(path, index) for path, index in lacking if _below(path, growing)]
        kept = {path for path, _ in grown}
        self._missing = [show(path) for path, _ in lacking if path not in kept]
        self._extra = matched.extra
        if strict:
            unplaced = [(p, 0) for p, _ in lacking if p not in kept and self._offer.exact]
            match(
                unplaced,
                [(path, 0) for path, _ in here if path not in stored],
                strict=True,
            )
        for index, path, place in matched.pairs:
            self._fit(index, path, flat.leaves[place])
        for path, index in grown:
            self._grow(index, path)
        self._told = [key for key in into.objects if any(_below(p, [key]) for p, _ in offered)]
        for key in set(self._told).intersection(growing):
            self._check_object(key)
        sizes = [
            prod(tensor.shape) * t.dtype_named(tensor.dtype).itemsize
            for tensor in self._tensors.values()
        ]
        check_ties(self._claims, Chunks(sizes, ()))

    def _grow(self, index: int, path: Path) -> None:
        """What an object lacks: like one of its own tensors where those are distributed."""
        assert self._into is not None
        leaf = self._offer.leaves[index]
        stored = self._whole(index, leaf)
        mine = None if stored is None else like(self._into.objects, path, stored.shape)
        if stored is None or mine is None:
            self._make(index, path)
            return
        self._mine[index] = torch.empty_like(mine, dtype=t.dtype_named(stored.dtype)).detach()
        self._read(stored.name, self._mine[index])  # type: ignore[arg-type]

    def _check_object(self, key: Path) -> None:
        """An object that grows is told its whole state."""
        branch = subtree(self._offer.tree, key)
        for path, index in () if branch is None else slots(branch):
            path = (*key, *path)
            if index not in self._made and index not in self._mine and path not in self._here:
                raise MismatchError(
                    "an object takes all of its state or none, and `only` leaves this out",
                    path=show(path),
                )

    def _fit(self, index: int, path: Path, mine: object) -> None:
        leaf = self._offer.leaves[index]
        self._mine[index] = mine
        if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
            isinstance(leaf, m.ArrayLeaf) and leaf.scalar
        ):
            list(fit(leaf, mine, path))
            self._make(index, path)
            return
        whole = self._whole(index, leaf)
        if whole is not None and isinstance(mine, torch.Tensor) and _is_settable(mine, leaf):
            self._fit_whole(whole, leaf, mine, path)
            return
        if isinstance(leaf, _WHOLE) and _is_distributed(mine) and 0 in next(parts(leaf)).shape:
            self._fit_facts(next(parts(leaf)), mine, path)
            return
        for pair in fit(_as_plain(leaf, mine), mine, path):
            self._late.append((pair, index))
            taken = next(parts(pair.leaf)) if isinstance(pair, ArrayFit) else pair.part
            self._home(index, taken)
            name = self._offer.homes[index].names[taken.storage]
            self._claim(pair, name, path)
            if isinstance(pair, Fit):
                self._written.append(pair.destination)

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
        stored = self._tensors[self._offer.homes[index].names[part.storage]]
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
                self._twins.append((first, stored, path))
                return
        self._read(stored.name, mine)
        self._written.append(mine)
        if isinstance(leaf, m.TensorLeaf) and not _is_distributed(mine):
            part = m.TensorLeaf(stored.dtype, stored.shape, None, 0)
            self._claim(Fit(part, mine), stored.name, path)

    def _fit_facts(
        self, offered: StoredTensor | m.TensorLeaf, mine: torch.Tensor, path: Path
    ) -> None:
        facts: list[tuple[str, object, object]] = [("shape", offered.shape, tuple(mine.size()))]
        if self._planner is None:  # a planner of the user's may well convert
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

    # How it is read.

    def _plan(self, coordinator: bool) -> list[Wave]:
        planner = self._planner or DefaultLoadPlanner(flatten_state_dict=False)
        metadata = metadata_of(self._checkpoint)
        self._items: list[ReadItem] = []
        self._places: list[torch.Tensor] = []
        for layer in self._layers:
            planner.set_up_planner(dict(layer), metadata, coordinator)
            plan = planner.create_local_plan()
            plan = planner.finish_plan(planner.create_global_plan([plan])[0])
            items = [item for item in plan.items if item.type.name == "TENSOR"]
            self._items += items
            self._places += [planner.resolve_tensor(item).detach() for item in items]
        return waves(self._wishes())

    def _wishes(self) -> Iterator[Wish]:
        for item, place in zip(self._items, self._places, strict=True):
            index = item.storage_index
            stored = self._tensors[index.fqn]
            shard = shard_at(stored, index.offset or (), index.index)
            offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
            yield Wish(stored, shard, offsets, lengths, place)

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self._places)

    def check(self) -> None:
        """Raise `DamagedError` unless all that is wanted has its digest.

        Bytes that are costly to read are kept for `land`, in memory of their own.
        """
        self._checked = True
        for number, wave in enumerate(self._waves):
            if not self._store.costly_reads:
                self._fetch(wave).check()
                continue
            held = wave.held()
            self._fetch(held).land()
            self._waves[number] = held

    def compare_twins(self) -> None:
        """Raise `MismatchError` where a tensor here would have to hold two values."""
        for first, second, path in self._twins:
            one, other = self._bits_of(first), self._bits_of(second)
            if not torch.equal(one, other):
                raise MismatchError(
                    f"tied to another tensor here, and saved with another value than {first.name}",
                    path=show(path),
                )

    def _bits_of(self, stored: StoredTensor) -> torch.Tensor:
        self._look_at_files(stored)
        whole = torch.empty(stored.shape, dtype=t.dtype_named(stored.dtype))
        wishes = []
        for shard in stored.shards:
            place = whole
            for dim, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
                place = place.narrow(dim, offset, size)
            wishes.append(Wish(stored, shard, (0,) * whole.dim(), shard.sizes, place))
        for wave in waves(wishes):
            self._fetch(wave).land()
            wave.finish()
        return t.raw_of(whole)

    def land(self, *, verify: bool) -> None:
        """Read everything into its place."""
        while self._waves:
            wave = self._waves.pop(0)  # its buffers are freed with it
            if not wave.arrived:
                self._fetch(wave).land(verify=verify, checked=self._checked)
            wave.finish()

    def _fetch(self, wave: Wave) -> Fetch:
        return Fetch(self._store, self._checkpoint, wave.wanted, progress=self._progress)

    # The end.

    def commit(self) -> Landed:
        """Everything has arrived: finish the caller's state, or build a new one."""
        with gc_paused():
            return self._commit()

    def _commit(self) -> Landed:
        if self._planner is not None:
            for item, place in zip(self._items, self._places, strict=True):
                self._planner.commit_tensor(item, place)
        made = {
            index: make_leaf(self._plainly(index), path, self._part_of(index), self._rank)
            for index, path in self._made.items()
        }
        late = [late_copy(pair, self._part_of(index)) for pair, index in self._late]
        for destination, source in late:
            copy_late(destination, source)
        written = [x for x in self._written if not isinstance(x, t.ShardedTensor)]
        torch.autograd.graph.increment_version([x for x in written if not x.is_inference()])
        if self._into is None:
            return Landed(self._new_state(made), [], [])
        tree = self._offer.tree
        filled = {index for _, index in self._late}  # in place, whatever was made of them besides
        fresh = {index: value for index, value in made.items() if index not in filled}
        plain = write_back(self._into.state, tree, fresh)
        leaves = {**self._mine, **made}
        for key in self._told:
            stateful = self._into.objects[key]
            branch = subtree(tree, key)
            if branch is None or not can_grow(stateful):
                stateful.load_state_dict(plain[key[0]] if key else plain)  # type: ignore[index]
                continue
            for path, index in slots(branch):
                leaves.setdefault(index, self._here.get((*key, *path)))
            stateful.load_state_dict(unflatten(branch, leaves))
        return Landed(rewrap(self._original, self._into, plain), self._missing, self._extra)

    def _new_state(self, made: dict[int, object]) -> object:
        if not self._only:
            return unflatten(self._offer.tree, made)
        return unflatten(*pruned(self._offer.tree, made))

    def _plainly(self, index: int) -> m.Leaf:
        """A leaf as it is built without the ranks that saved it: distributed tensors are whole."""
        leaf = self._offer.leaves[index]
        if isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
            part = next(parts(leaf))
            return m.TensorLeaf(part.dtype, part.shape, None, part.storage, 0, leaf.flags)
        return leaf

    def _part_of(self, index: int) -> Callable[[m.TensorLeaf], torch.Tensor]:
        outline = self._offer.homes[index]

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


def _below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path[: len(root)] == root for root in roots)


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
