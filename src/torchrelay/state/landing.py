"""Landing: the only code that writes into a caller's tensors.

Chunks come in any order, each once, by `write`. `commit` ends the receive and returns the state.
Three landings share that seam: new tensors, the caller's tensors all at once after everything has
arrived (weights are old or new), and the caller's tensors as the bytes come in (least memory).
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from torchrelay.errors import MismatchError, UnsupportedLeafError
from torchrelay.state import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.containers import (
    Path,
    check_types,
    leaf_paths,
    show,
    slots,
    unflatten,
    write_back,
)
from torchrelay.state.fitting import ArrayFit, Fit, fit
from torchrelay.state.leaves import Part, build, check_buildable, parts
from torchrelay.state.memory import Region
from torchrelay.state.pause import gc_paused
from torchrelay.state.plan import Chunks, aligned_sizes
from torchrelay.state.prepared import Pair, Prepared, prepare, split
from torchrelay.state.runs import Runs
from torchrelay.state.spans import contiguous_strides, packed
from torchrelay.state.ties import check_ties, host_spans


class Landed(NamedTuple):
    """The received state, and the paths that one side alone has (with `strict=False`)."""

    state: object
    missing: list[str]
    extra: list[str]


class Landing(Protocol):
    """What a transport needs of a place to land."""

    chunks: Chunks
    torn: bool  # whether the caller's tensors have been written to, but not all of them

    def write(self, index: int, data: torch.Tensor) -> None:
        """Take chunk `index`, whose bytes are in the buffer `data`, on the host or a device."""

    def commit(self) -> Landed:
        """All chunks have arrived and hold: make them the state."""


def land(
    manifest: m.Manifest,
    *,
    into: object = None,
    strict: bool = True,
    atomic: bool = True,
    device: torch.device | None = None,
    rank: int = 0,
    make_missing: bool = False,
) -> Landing:
    """The landing for an offered state. Everything that can be refused is refused here.

    `into=None` makes new tensors, on `device` or on the kind of device they come from. With
    `make_missing`, leaves that `into` lacks are made anew, and the state is a new tree of the
    offered containers around the caller's tensors and the new ones. `into` may be what `prepare`
    made of a destination, which leaves less to do here.
    """
    with gc_paused():
        if into is None:
            return _New(manifest, device, rank)
        if not isinstance(into, Prepared):
            into = prepare(into)
        elif into.moved:
            into = prepare(into.into)
        return _Existing(manifest, into, strict, atomic, rank, make_missing)


def _chunks(manifest: m.Manifest) -> Chunks:
    return Chunks([storage.nbytes for storage in manifest.storages], manifest.chunks)


def _strides(part: m.TensorLeaf) -> tuple[int, ...]:
    return contiguous_strides(part.shape) if part.strides is None else part.strides


def _allocate(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as fault:
        raise MismatchError(f"no memory for {nbytes} bytes on {device}: {fault}") from None


_UNBUILT = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)


def make_leaf(leaf: m.Leaf, path: Path, part: Part, rank: int) -> object:
    try:
        return build(leaf, part, rank)
    except _UNBUILT as fault:
        raise UnsupportedLeafError(f"cannot be rebuilt here: {fault}", path=show(path)) from fault


def check_leaf(leaf: m.Leaf, path: Path) -> None:
    try:
        check_buildable(leaf)
    except UnsupportedLeafError as fault:
        fault.path = show(path)
        raise


class _New:
    """New tensors, in storages of their own. Nobody sees them before `commit` returns."""

    torn = False

    def __init__(self, manifest: m.Manifest, device: torch.device | None, rank: int) -> None:
        check_types(manifest.tree)
        self._manifest = manifest
        self._rank = rank
        users = [0] * len(manifest.storages)
        hosted = set()
        owners = [-1] * len(manifest.storages)
        for index, leaf in enumerate(manifest.leaves):
            if isinstance(leaf, m.TensorLeaf):
                if leaf.dtype not in t.DTYPES:
                    check_leaf(leaf, self._paths[index])
                if leaf.storage >= 0:
                    users[leaf.storage] += 1
                    owners[leaf.storage] = index
                continue
            check_leaf(leaf, self._paths[index])
            for part in parts(leaf):
                if part.storage >= 0:
                    users[part.storage] += 2
                    if isinstance(leaf, m.ArrayLeaf):
                        hosted.add(part.storage)
        self.chunks = _chunks(manifest)
        self._homes: list[torch.Tensor] = []
        self._whole: set[int] = set()
        self._ready: list[object] = [None] * len(manifest.leaves)
        devices = {
            kind: device or _local_device(kind)
            for kind in {storage.device for storage in manifest.storages}
        }
        like: dict[object, torch.Tensor] = {}
        for index, storage in enumerate(manifest.storages):
            home = "cpu" if index in hosted else devices[storage.device]
            whole = manifest.leaves[owners[index]] if users[index] == 1 else None
            if not isinstance(whole, m.TensorLeaf) or not _fills_storage(whole):
                self._homes.append(_allocate(storage.nbytes, home))
                continue
            # The tensor itself: cheaper than a view, and the common case by far.
            tensor = _whole(whole, home, like)
            self._homes.append(tensor)
            self._whole.add(index)
            if whole.flags == 0:
                self._ready[owners[index]] = tensor
        host = [index for index, home in enumerate(self._homes) if home.is_cpu]
        self._host = Runs(
            [self.chunks.starts[index] for index in host],
            [self._homes[index].data_ptr() for index in host],
            [manifest.storages[index].nbytes for index in host],
        )
        self._all_on_host = len(host) == len(self._homes)

    @cached_property
    def _paths(self) -> dict[int, Path]:
        return leaf_paths(self._manifest.tree)

    def write(self, index: int, data: torch.Tensor) -> None:
        begin = self.chunks.offsets[index]
        end = begin + self.chunks.sizes[index]
        if self._host.reaches(begin, end):
            host = data.cpu()
            self._host.scatter(begin, end, host.data_ptr())
        if self._all_on_host:
            return
        for storage, start, stop, at in self.chunks.extents(index):
            home = self._homes[storage]
            if not home.is_cpu:
                piece = t.flat_bytes(home.untyped_storage(), start, stop - start)
                piece.copy_(data[at : at + stop - start])

    def commit(self) -> Landed:
        with gc_paused():
            leaves = self._ready
            for index, leaf in enumerate(self._manifest.leaves):
                if leaves[index] is None:
                    leaves[index] = make_leaf(leaf, self._paths[index], self._part, self._rank)
            return Landed(unflatten(self._manifest.tree, leaves), [], [])

    def _part(self, part: m.TensorLeaf) -> torch.Tensor:
        if part.storage < 0:
            device = "meta" if part.flags & m.META else "cpu"
            return t.without_storage(part, _strides(part), device)
        home = self._homes[part.storage]
        if part.storage in self._whole:
            return t.with_flags(home, part.flags)
        return t.over_storage(home.untyped_storage(), part.offset, part, _strides(part))


def _fills_storage(leaf: m.TensorLeaf) -> bool:
    return leaf.strides is None and leaf.offset == 0 and not leaf.flags & (m.CONJ | m.NEG)


def _whole(
    leaf: m.TensorLeaf, device: torch.device | str, like: dict[object, torch.Tensor]
) -> torch.Tensor:
    """A new tensor for the leaf. `like` keeps one of each kind: the next takes half the time."""
    kind = (leaf.dtype, leaf.shape, device)
    try:
        if kind in like:
            return torch.empty_like(like[kind])
        like[kind] = torch.empty(leaf.shape, dtype=t.DTYPES[leaf.dtype], device=device)
        return like[kind]
    except (RuntimeError, MemoryError) as fault:
        raise MismatchError(f"no memory for {leaf.dtype} {leaf.shape}: {fault}") from None


def _local_device(kind: str) -> str:
    """The same kind of device here if there is one, else host memory."""
    try:
        torch.device(kind)
    except RuntimeError:
        return "cpu"
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    return kind if available is not None and available() else "cpu"


class _Placed(NamedTuple):
    """A destination in image order: bytes [at, at + nbytes) of an image go to `region`."""

    at: int
    region: Region


class _Existing:
    """The caller's tensors: staged and written at once (`atomic`), or written as bytes arrive."""

    def __init__(
        self,
        manifest: m.Manifest,
        into: Prepared,
        strict: bool,
        atomic: bool,
        rank: int,
        make_missing: bool,
    ) -> None:
        self._manifest = manifest
        self._into = into
        self._rank = rank
        self._atomic = atomic
        self.torn = False
        self.chunks = _chunks(manifest)
        matched = into.match(manifest.tree, strict=strict)
        self._missing, self._extra = matched.missing, matched.extra
        self._mine: dict[int, object] = {}
        self._made: dict[int, Path] | None = None
        if make_missing:
            have = into.flat.leaves
            self._mine = {index: have[here] for index, _, here in reversed(matched.pairs)}
            offered = slots(manifest.tree)
            self._made = {index: path for path, index in offered if index not in self._mine}
            for index, path in self._made.items():
                check_leaf(manifest.leaves[index], path)
        self._plain: dict[int, Path] = {}
        self._direct: dict[int, list[_Placed]] = {}
        self._late: list[Fit | ArrayFit] = []
        self._written: list[torch.Tensor] = []
        self._wholes: dict[int, tuple[m.SparseLeaf, Path]] = {}
        plain, rest = split(matched.pairs, manifest, into, self.chunks.starts)
        fits = self._fits(rest)
        taken = {piece[4] for piece in plain} if fits else set()
        spans = host_spans(fits, self.chunks)
        if not all(taken.isdisjoint(into.reached(low, high)) for low, high in spans):
            # Plain tensors share memory with others: the check below has to see them all.
            plain, fits = [], self._fits(matched.pairs)
        check_ties(fits, self.chunks)
        # What goes to plain tensors is known by address; what goes to others, by region.
        self._host = Runs(*([piece[n] for piece in plain] for n in range(3)))
        mine: list[Any] = into.flat.leaves
        self._written += [mine[piece[4]] for piece in plain]
        for pair, path in fits:
            if isinstance(pair, ArrayFit):
                self._late.append(pair)
                continue
            self._written.append(pair.destination)
            placed = _in_image_order(pair)
            if placed is None:
                self._late.append(pair)
            else:
                self._direct.setdefault(pair.part.storage, []).append(placed)
            if pair.whole is not None:
                self._wholes[id(pair.whole)] = (pair.whole, path)
        held = {*self._direct, *[piece[3] for piece in plain]} if atomic else set()
        self._stage(manifest, held)

    def _fits(self, pairs: list[Pair]) -> list[tuple[Fit | ArrayFit, Path]]:
        fits: list[tuple[Fit | ArrayFit, Path]] = []
        for index, path, here in pairs:
            leaf = self._manifest.leaves[index]
            fits += [(pair, path) for pair in fit(leaf, self._into.flat.leaves[here], path)]
            if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
                isinstance(leaf, m.ArrayLeaf) and leaf.scalar
            ):
                check_leaf(leaf, path)
                self._plain[index] = path
        return fits

    def _stage(self, manifest: m.Manifest, held: set[int]) -> None:
        """Host memory for the images that are held back until `commit`: `held` and some more."""
        held.update(_storages(self._late))
        for index in (*self._plain, *(self._made or ())):
            held |= {part.storage for part in parts(manifest.leaves[index])} - {-1}
        order = sorted(held)
        sizes = aligned_sizes([manifest.storages[index].nbytes for index in order])
        places = list(accumulate(sizes, initial=0))
        self._slab = _allocate(places.pop())
        self._held = dict(zip(order, places, strict=True))
        self._homes: dict[int, torch.Tensor] = {}
        base = self._slab.data_ptr()
        # Images that follow each other in the stream do so in the slab: these are few runs.
        self._staged = Runs(
            [self.chunks.starts[index] for index in order], [base + at for at in places], sizes
        )

    def write(self, index: int, data: torch.Tensor) -> None:
        begin = self.chunks.offsets[index]
        end = begin + self.chunks.sizes[index]
        if self._staged.reaches(begin, end) or self._host.reaches(begin, end):
            host = data.cpu()
            self._staged.scatter(begin, end, host.data_ptr())
        if self._atomic:
            return
        if self._host.reaches(begin, end):
            self.torn = True
            self._host.scatter(begin, end, host.data_ptr())
        for storage, start, stop, at in self.chunks.extents(index) if self._direct else ():
            if storage in self._direct:
                self.torn = True
                self._pass_on(storage, start, stop, data[at:])

    def _pass_on(self, storage: int, start: int, stop: int, data: torch.Tensor) -> None:
        for at, region in self._direct.get(storage, ()):
            low, high = max(start, at), min(stop, at + region.nbytes)
            if low < high:
                region.write(low - at, high - at, data[low - start :])

    def commit(self) -> Landed:
        with gc_paused():
            return self._commit()

    def _commit(self) -> Landed:
        # Whatever can fail comes before the first write.
        plain: dict[int, object] = {
            index: make_leaf(self._manifest.leaves[index], path, self._held_part, self._rank)
            for index, path in self._plain.items()
        }
        made = {
            index: make_leaf(self._manifest.leaves[index], path, self._owned_part, self._rank)
            for index, path in (self._made or {}).items()
        }
        for whole, path in self._wholes.values():
            make_leaf(
                whole, path, self._held_part, self._rank
            )  # indices that point nowhere end here
        late = [late_copy(pair, self._held_part) for pair in self._late]
        self.torn = bool(self._written or late)
        if self._atomic:
            for start, address, nbytes in self._staged.within(0, self.chunks.stream_bytes):
                self._host.scatter(start, start + nbytes, address)
            for storage in self._direct:
                held = self._held_bytes(storage)
                self._pass_on(storage, 0, held.numel(), held)
        for destination, source in late:
            copy_late(destination, source)
        torch.autograd.graph.increment_version(
            [tensor for tensor in self._written if not tensor.is_inference()]
        )
        if self._made is None:
            state = write_back(self._into.into, self._manifest.tree, plain)
        else:
            leaves = {**self._mine, **plain, **made}
            state = unflatten(self._manifest.tree, [leaves[i] for i in range(len(leaves))])
        self.torn = False
        return Landed(state, self._missing, self._extra)

    def _owned_part(self, part: m.TensorLeaf) -> torch.Tensor:
        """Like `_held_part`, in a storage of its own that the caller may keep."""
        if part.storage < 0:
            return self._held_part(part)
        home = self._homes.get(part.storage)
        if home is None:
            home = self._homes[part.storage] = self._held_bytes(part.storage).clone()
        return t.over_storage(home.untyped_storage(), part.offset, part, _strides(part))

    def _held_part(self, part: m.TensorLeaf) -> torch.Tensor:
        if part.storage < 0:
            return t.without_storage(part, _strides(part), "cpu")
        offset = self._held[part.storage] + part.offset
        return t.over_storage(self._slab.untyped_storage(), offset, part, _strides(part))

    def _held_bytes(self, storage: int) -> torch.Tensor:
        at = self._held[storage]
        return self._slab[at : at + self._manifest.storages[storage].nbytes]


def _storages(pairs: list[Fit | ArrayFit]) -> list[int]:
    return [
        pair.leaf.storage if isinstance(pair, ArrayFit) else pair.part.storage for pair in pairs
    ]


def _in_image_order(pair: Fit) -> _Placed | None:
    """The destination as a region in the order of the image, or None where it takes more."""
    part, mine, whole = pair
    strides = _strides(part)
    layout = packed(part.shape, strides)
    here = tuple(mine.stride())
    if whole is not None or layout is None or layout.strides != strides:
        return None
    if (t.flags_of(mine) ^ part.flags) & (m.CONJ | m.NEG):
        return None
    if any(s > 1 and strides[d] == 0 and here[d] != 0 for d, s in enumerate(part.shape)):
        return None  # offered once and expanded, the destination has room for each
    return _Placed(part.offset, Region(mine, part.shape, here, layout.order))


def late_copy(
    pair: Fit | ArrayFit, part: Part
) -> tuple[torch.Tensor | np.ndarray[Any, Any], object]:
    if isinstance(pair, ArrayFit):
        return pair.destination, build(pair.leaf, part, 0)
    return pair.destination, part(pair.part)


def copy_late(destination: object, source: object) -> None:
    if isinstance(destination, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(destination, source, casting="no")
        return
    assert isinstance(destination, torch.Tensor) and isinstance(source, torch.Tensor)
    for dim, stride in enumerate(destination.stride()):
        if stride == 0:  # expanded on both sides: one element is all
            destination, source = destination.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    t.copy_bits(destination.detach(), source.detach())
