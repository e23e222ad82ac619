"""Landing: the only code that writes into a caller's tensors.

Chunks come in any order, each once, by `write`. `commit` ends the receive and returns the state.
Three landings share that seam: new tensors, the caller's tensors all at once after everything has
arrived (weights are old or new), and the caller's tensors as the bytes come in (least memory).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from torchrelay.errors import MismatchError, UnsupportedLeafError
from torchrelay.state import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.containers import (
    Path,
    check_types,
    flatten,
    match,
    show,
    slots,
    unflatten,
    write_back,
)
from torchrelay.state.fitting import ArrayFit, Fit, fit
from torchrelay.state.leaves import Part, build, check_buildable, parts
from torchrelay.state.memory import Region
from torchrelay.state.plan import Chunks
from torchrelay.state.spans import contiguous_strides, packed
from torchrelay.state.ties import check_ties


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
        """Take chunk `index`, whose bytes are in the host buffer `data`."""

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
    offered containers around the caller's tensors and the new ones.
    """
    if into is None:
        return _New(manifest, device, rank)
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


def _make(leaf: m.Leaf, path: Path, part: Part, rank: int) -> object:
    try:
        return build(leaf, part, rank)
    except _UNBUILT as fault:
        raise UnsupportedLeafError(f"cannot be rebuilt here: {fault}", path=show(path)) from fault


def _check_buildable(leaf: m.Leaf, path: Path) -> None:
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
        self._paths = {index: path for path, index in reversed(slots(manifest.tree))}
        users = [0] * len(manifest.storages)
        hosted = set()
        simple: dict[int, m.TensorLeaf] = {}
        for index, leaf in enumerate(manifest.leaves):
            if isinstance(leaf, m.TensorLeaf):
                if leaf.dtype not in t.DTYPES:
                    _check_buildable(leaf, self._paths[index])
                if leaf.storage >= 0:
                    users[leaf.storage] += 1
                    simple[leaf.storage] = leaf
                continue
            _check_buildable(leaf, self._paths[index])
            for part in parts(leaf):
                if part.storage >= 0:
                    users[part.storage] += 2
                    if isinstance(leaf, m.ArrayLeaf):
                        hosted.add(part.storage)
        self.chunks = _chunks(manifest)
        self._homes: list[torch.Tensor] = []
        self._whole: set[int] = set()
        for index, storage in enumerate(manifest.storages):
            home = "cpu" if index in hosted else device or _local_device(storage.device)
            whole = simple.get(index) if users[index] == 1 else None
            if whole is not None and whole.strides is None and whole.flags == whole.offset == 0:
                # The tensor itself: cheaper than a view, and the common case by far.
                self._homes.append(_whole(whole, home))
                self._whole.add(index)
            else:
                self._homes.append(_allocate(storage.nbytes, home))

    def write(self, index: int, data: torch.Tensor) -> None:
        base = data.data_ptr()
        for storage, start, stop, at in self.chunks.extents(index):
            home = self._homes[storage]
            if home.is_cpu:
                ctypes.memmove(home.data_ptr() + start, base + at, stop - start)
            else:
                piece = t.flat_bytes(home.untyped_storage(), start, stop - start)
                piece.copy_(data[at : at + stop - start])

    def commit(self) -> Landed:
        leaves = [
            _make(leaf, self._paths[index], self._part, self._rank)
            for index, leaf in enumerate(self._manifest.leaves)
        ]
        return Landed(unflatten(self._manifest.tree, leaves), [], [])

    def _part(self, part: m.TensorLeaf) -> torch.Tensor:
        if part.storage < 0:
            device = "meta" if part.flags & m.META else "cpu"
            return t.without_storage(part, _strides(part), device)
        home = self._homes[part.storage]
        if part.storage in self._whole:
            return home
        return t.over_storage(home.untyped_storage(), part.offset, part, _strides(part))


def _whole(leaf: m.TensorLeaf, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(leaf.shape, dtype=t.DTYPES[leaf.dtype], device=device)
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
        into: object,
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
        offered = slots(manifest.tree)
        matched = match(offered, flatten(into), strict=strict)
        self._missing, self._extra = matched.missing, matched.extra
        self._mine = {index: mine for index, _, mine in reversed(matched.pairs)}
        self._made: dict[int, Path] | None = None
        if make_missing:
            self._made = {index: path for path, index in offered if index not in self._mine}
            for index, path in self._made.items():
                _check_buildable(manifest.leaves[index], path)
        self._plain: dict[int, Path] = {}
        direct: dict[int, list[_Placed]] = {}
        self._late: list[Fit | ArrayFit] = []
        self._written: list[torch.Tensor] = []
        self._wholes: dict[int, tuple[m.SparseLeaf, Path]] = {}
        fits: list[tuple[Fit | ArrayFit, Path]] = []
        for index, path, mine in matched.pairs:
            leaf = manifest.leaves[index]
            found = list(fit(leaf, mine, path))
            if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
                isinstance(leaf, m.ArrayLeaf) and leaf.scalar
            ):
                _check_buildable(leaf, path)
                self._plain[index] = path
            fits.extend((pair, path) for pair in found)
        self.chunks = _chunks(manifest)
        check_ties(fits, self.chunks)
        for pair, path in fits:
            if isinstance(pair, ArrayFit):
                self._late.append(pair)
                continue
            self._written.append(pair.destination)
            placed = _in_image_order(pair)
            if placed is None:
                self._late.append(pair)
            else:
                direct.setdefault(pair.part.storage, []).append(placed)
            if pair.whole is not None:
                self._wholes[id(pair.whole)] = (pair.whole, path)
        self._direct = direct
        self._stage(manifest)

    def _stage(self, manifest: m.Manifest) -> None:
        """Host memory for the images that are held back until `commit`."""
        held = set(_storages(self._late))
        for index in (*self._plain, *(self._made or ())):
            held |= {part.storage for part in parts(manifest.leaves[index])} - {-1}
        if self._atomic:
            held |= set(self._direct)
        sizes = {index: m.aligned(manifest.storages[index].nbytes) for index in sorted(held)}
        slab = _allocate(sum(sizes.values()))
        self._held: dict[int, torch.Tensor] = {}
        self._homes: dict[int, torch.Tensor] = {}
        at = 0
        for index, size in sizes.items():
            self._held[index] = slab[at : at + size]
            at += size

    def write(self, index: int, data: torch.Tensor) -> None:
        base = data.data_ptr()
        for storage, start, stop, at in self.chunks.extents(index):
            held = self._held.get(storage)
            if held is not None:
                ctypes.memmove(held.data_ptr() + start, base + at, stop - start)
            if not self._atomic and storage in self._direct:
                self.torn = True
                self._pass_on(storage, start, stop, data[at:])

    def _pass_on(self, storage: int, start: int, stop: int, data: torch.Tensor) -> None:
        for at, region in self._direct.get(storage, ()):
            low, high = max(start, at), min(stop, at + region.nbytes)
            if low < high:
                region.write(low - at, high - at, data[low - start :])

    def commit(self) -> Landed:
        # Whatever can fail comes before the first write.
        plain: dict[int, object] = {
            index: _make(self._manifest.leaves[index], path, self._held_part, self._rank)
            for index, path in self._plain.items()
        }
        made = {
            index: _make(self._manifest.leaves[index], path, self._owned_part, self._rank)
            for index, path in (self._made or {}).items()
        }
        for whole, path in self._wholes.values():
            _make(whole, path, self._held_part, self._rank)  # indices that point nowhere end here
        late = [_late_copy(pair, self._held_part) for pair in self._late]
        self.torn = bool(self._written or late)
        if self._atomic:
            for storage in self._direct:
                held = self._held[storage]
                self._pass_on(storage, 0, self._manifest.storages[storage].nbytes, held)
        for destination, source in late:
            _copy_bits(destination, source)
        for tensor in self._written:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        if self._made is None:
            state = write_back(self._into, self._manifest.tree, plain)
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
            nbytes = self._manifest.storages[part.storage].nbytes
            home = self._homes[part.storage] = self._held[part.storage][:nbytes].clone()
        return t.over_storage(home.untyped_storage(), part.offset, part, _strides(part))

    def _held_part(self, part: m.TensorLeaf) -> torch.Tensor:
        if part.storage < 0:
            return t.without_storage(part, _strides(part), "cpu")
        held = self._held[part.storage]
        offset = t.byte_offset(held) + part.offset
        return t.over_storage(held.untyped_storage(), offset, part, _strides(part))


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


def _late_copy(
    pair: Fit | ArrayFit, part: Part
) -> tuple[torch.Tensor | np.ndarray[Any, Any], object]:
    if isinstance(pair, ArrayFit):
        return pair.destination, build(pair.leaf, part, 0)
    return pair.destination, part(pair.part)


def _copy_bits(destination: object, source: object) -> None:
    if isinstance(destination, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(destination, source, casting="no")
        return
    assert isinstance(destination, torch.Tensor) and isinstance(source, torch.Tensor)
    bits = m.CONJ | m.NEG
    for dim, stride in enumerate(destination.stride()):
        if stride == 0:  # expanded on both sides: one element is all
            destination, source = destination.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    with torch.no_grad():
        if t.flags_of(destination) & bits == t.flags_of(source) & bits:
            t.raw_of(destination).copy_(t.raw_of(source))
        else:
            destination.detach().copy_(source.detach())
