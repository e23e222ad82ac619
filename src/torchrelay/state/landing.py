"""Landing: the only code that writes into a caller's tensors.

Chunks come in any order, each once, by `write`. `commit` ends the receive and returns the state.
Three landings share that seam: new tensors, the caller's tensors all at once after everything has
arrived (weights are old or new), and the caller's tensors as the bytes come in (least memory).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

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
from torchrelay.state.images import mark_touched
from torchrelay.state.leaves import Part, build, check_buildable, parts
from torchrelay.state.memory import Region
from torchrelay.state.plan import Chunks
from torchrelay.state.spans import contiguous_strides, extent, overlapping, packed


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
) -> Landing:
    """The landing for an offered state. Everything that can be refused is refused here.

    `into=None` makes new tensors, on `device` or on the kind of device they come from.
    """
    if into is None:
        return _New(manifest, device, rank)
    return _Existing(manifest, into, strict, atomic, rank)


def _chunks(manifest: m.Manifest) -> Chunks:
    return Chunks([storage.nbytes for storage in manifest.storages], manifest.chunks)


def _strides(part: m.TensorLeaf) -> tuple[int, ...]:
    return contiguous_strides(part.shape) if part.strides is None else part.strides


def _allocate(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as fault:
        raise MismatchError(f"no memory for {nbytes} bytes on {device}: {fault}") from None


def _make(leaf: m.Leaf, path: Path, part: Part, rank: int) -> object:
    try:
        return build(leaf, part, rank)
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as fault:
        raise UnsupportedLeafError(f"cannot be rebuilt here: {fault}", path=show(path)) from fault


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
                t.dtype_named(leaf.dtype)
                if leaf.storage >= 0:
                    users[leaf.storage] += 1
                    simple[leaf.storage] = leaf
                continue
            try:
                check_buildable(leaf)
            except UnsupportedLeafError as fault:
                fault.path = show(self._paths[index])
                raise
            for part in parts(leaf):
                if part.storage >= 0:
                    users[part.storage] += 2
                    if isinstance(leaf, m.ArrayLeaf):
                        hosted.add(part.storage)
        self.chunks = _chunks(manifest)
        self._homes: list[torch.Tensor] = []
        for index, storage in enumerate(manifest.storages):
            home = "cpu" if index in hosted else device or _local_device(storage.device)
            whole = simple.get(index) if users[index] == 1 else None
            if whole is not None and whole.strides is None and whole.flags == 0:
                # The tensor itself: cheaper than a view, and the common case by far.
                self._homes.append(_whole(whole, home))
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
        if home.dtype is not torch.uint8 or (part.dtype == "uint8" and home.shape == part.shape):
            return t.with_flags(home, part.flags)
        return t.over_storage(home.untyped_storage(), part.offset, part, _strides(part))


def _whole(leaf: m.TensorLeaf, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(leaf.shape, dtype=t.DTYPES[leaf.dtype], device=device)
    except (RuntimeError, MemoryError) as fault:
        raise MismatchError(f"no memory for {leaf.dtype} {leaf.shape}: {fault}") from None


def _local_device(kind: str) -> str:
    """The same kind of device here if there is one, else host memory."""
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    return kind if kind != "cpu" and available is not None and available() else "cpu"


class _Placed(NamedTuple):
    """A destination in image order: bytes [at, at + nbytes) of an image go to `region`."""

    at: int
    region: Region


class _Existing:
    """The caller's tensors: staged and written at once (`atomic`), or written as bytes arrive."""

    def __init__(
        self, manifest: m.Manifest, into: object, strict: bool, atomic: bool, rank: int
    ) -> None:
        self._manifest = manifest
        self._into = into
        self._rank = rank
        self._atomic = atomic
        self.torn = False
        matched = match(slots(manifest.tree), flatten(into), strict=strict)
        self._missing, self._extra = matched.missing, matched.extra
        self._plain: dict[int, Path] = {}
        direct: dict[int, list[_Placed]] = {}
        self._late: list[Fit | ArrayFit] = []
        self._written: list[torch.Tensor] = []
        fits: list[tuple[Fit, Path]] = []
        for index, path, mine in matched.pairs:
            leaf = manifest.leaves[index]
            found = list(fit(leaf, mine, path))
            if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
                isinstance(leaf, m.ArrayLeaf) and leaf.scalar
            ):
                self._plain[index] = path
            for pair in found:
                if isinstance(pair, ArrayFit):
                    self._late.append(pair)
                    continue
                fits.append((pair, path))
        _check_ties(fits)
        for pair, path in fits:
            self._written.append(pair.destination)
            placed = _in_image_order(pair, path)
            if placed is None:
                self._late.append(pair)
            else:
                direct.setdefault(pair.part.storage, []).append(placed)
        self.chunks = _chunks(manifest)
        self._direct = direct
        self._stage(manifest)

    def _stage(self, manifest: m.Manifest) -> None:
        """Host memory for the images that are held back until `commit`."""
        held = set(_storages(self._late))
        if self._plain:
            held |= {
                part.storage for index in self._plain for part in parts(manifest.leaves[index])
            }
        if self._atomic:
            held |= set(self._direct)
        sizes = {index: m.aligned(manifest.storages[index].nbytes) for index in sorted(held)}
        slab = _allocate(sum(sizes.values()))
        self._held: dict[int, torch.Tensor] = {}
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
        late = [_late_copy(pair, self._held_part) for pair in self._late]
        self.torn = bool(self._written or late)
        if self._atomic:
            for storage in self._direct:
                held = self._held[storage]
                self._pass_on(storage, 0, self._manifest.storages[storage].nbytes, held)
        for destination, source in late:
            _copy_bits(destination, source)
        for tensor in self._written:
            if tensor.device.type != "meta":
                torch.autograd.graph.increment_version(tensor)
        state = write_back(self._into, self._manifest.tree, plain)
        self.torn = False
        return Landed(state, self._missing, self._extra)

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


def _in_image_order(pair: Fit, path: Path) -> _Placed | None:
    """The destination as a region in the order of the image, or None where it takes more."""
    part, mine = pair
    strides = _strides(part)
    layout = packed(part.shape, strides)
    here = tuple(mine.stride())
    if layout is None or layout.strides != strides:
        _check_writable(mine, path)
        return None
    if t.flags_of(mine) & (m.CONJ | m.NEG) != part.flags & (m.CONJ | m.NEG):
        _check_writable(mine, path)
        return None
    for dim, size in enumerate(part.shape):
        if size > 1 and here[dim] == 0 and strides[dim] != 0:
            _refuse_overlap(path)
    shape = tuple(1 if stride == 0 else s for s, stride in zip(part.shape, here, strict=True))
    if packed(shape, here) is None:
        _refuse_overlap(path)
    if any(s > 1 and strides[d] == 0 and here[d] != 0 for d, s in enumerate(part.shape)):
        return None  # offered once and expanded, the destination has room for each
    return _Placed(part.offset, Region(mine, part.shape, here, layout.order))


def _check_writable(mine: torch.Tensor, path: Path) -> None:
    layout = packed(tuple(mine.shape), tuple(mine.stride()))
    if layout is None or layout.numel != mine.numel():
        _refuse_overlap(path)


def _refuse_overlap(path: Path) -> None:
    raise MismatchError(
        "elements of the destination share memory with each other (an expanded or overlapping "
        "view), and the offered tensor's do not",
        path=show(path),
    )


def _late_copy(
    pair: Fit | ArrayFit, part: object
) -> tuple[torch.Tensor | np.ndarray[tuple[int, ...], np.dtype[np.generic]], object]:
    if isinstance(pair, ArrayFit):
        return pair.destination, build(pair.leaf, part, 0)  # type: ignore[arg-type]
    return pair.destination, part(pair.part)  # type: ignore[operator]


def _copy_bits(destination: object, source: object) -> None:
    if isinstance(destination, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(destination, source, casting="no")
        return
    assert isinstance(destination, torch.Tensor) and isinstance(source, torch.Tensor)
    bits = m.CONJ | m.NEG
    with torch.no_grad():
        if t.flags_of(destination) & bits == t.flags_of(source) & bits:
            t.raw_of(destination).copy_(t.raw_of(source))
        else:
            destination.detach().copy_(source.detach())


def _check_ties(fits: list[tuple[Fit, Path]]) -> None:
    """Destinations that share memory must be offered the same bytes."""
    by_device: dict[torch.device, list[int]] = {}
    for index, (pair, _) in enumerate(fits):
        by_device.setdefault(pair.destination.device, []).append(index)
    for indices in by_device.values():
        ranges = []
        for index in indices:
            mine = fits[index][0].destination
            low = mine.data_ptr()
            reach = extent(tuple(mine.shape), tuple(mine.stride())) * mine.element_size()
            ranges.append((low, low + reach))
        for group in overlapping(ranges):
            if len(group) > 1:
                _check_tied([fits[indices[i]] for i in group])


def _check_tied(group: list[tuple[Fit, Path]]) -> None:
    """One memory range, several destinations: each byte is offered by one place alone."""
    low = min(pair.destination.data_ptr() for pair, _ in group)
    high = max(
        pair.destination.data_ptr()
        + extent(tuple(pair.destination.shape), tuple(pair.destination.stride()))
        * pair.destination.element_size()
        for pair, _ in group
    )
    taken = np.zeros(high - low, dtype=np.uint8)
    first: dict[tuple[object, ...], Path] = {}
    for pair, path in group:
        part, mine = pair
        same = (part.storage, part.offset, part.strides, mine.data_ptr(), tuple(mine.stride()))
        if same in first:
            continue
        first[same] = path
        mask = np.zeros_like(taken)
        offset = mine.data_ptr() - low
        mark_touched(mask, offset, mine.element_size(), tuple(mine.shape), tuple(mine.stride()))
        if np.any(taken & mask) and not _same_shift(group, pair):
            raise MismatchError(
                "shares memory with another destination that is offered other bytes",
                path=show(path),
            )
        taken |= mask


def _same_shift(group: list[tuple[Fit, Path]], pair: Fit) -> bool:
    """Whether all destinations of a group stand to each other as the offered views do."""
    base = group[0][0]
    shift = pair.destination.data_ptr() - base.destination.data_ptr()
    return (
        all(
            other.part.storage == base.part.storage
            and other.destination.data_ptr() - base.destination.data_ptr()
            == other.part.offset - base.part.offset
            and tuple(other.destination.stride()) == _strides(other.part)
            for other, _ in group
        )
        and shift == pair.part.offset - base.part.offset
    )
