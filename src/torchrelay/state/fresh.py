"""New tensors for a received state. Nobody sees them before `commit` returns.

Each has a storage of its own, unless they were ties where they come from: keeping one of them never
keeps the memory of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import torch

from torchrelay.errors import MismatchError
from torchrelay.state import manifest as m
from torchrelay.state import tensors as t
from torchrelay.state.building import check_leaf, make_leaf, strides_of
from torchrelay.state.containers import Path, check_types, leaf_paths, unflatten
from torchrelay.state.landed import Landed, Places, chunks_of
from torchrelay.state.leaves import parts
from torchrelay.state.means import LARGE_BYTES, Means, allocate
from torchrelay.state.pause import gc_paused
from torchrelay.state.runs import Runs

_data_ptr = torch.Tensor.data_ptr
_SHARED = -1  # storages of several leaves, or of parts of one


class NewTensors:
    torn = False

    def __init__(
        self, manifest: m.Manifest, device: torch.device | None, rank: int, means: Means
    ) -> None:
        check_types(manifest.tree)
        self._manifest = manifest
        self._rank = rank
        self.chunks = chunks_of(manifest)
        self._ready: list[object] = [None] * len(manifest.leaves)
        owners, hosted = self._owners()
        devices: dict[str, Any] = {
            kind: device or _local_device(kind)
            for kind in {storage.device for storage in manifest.storages}
        }
        where = [devices[storage.device] for storage in manifest.storages]
        for index in hosted:
            where[index] = "cpu"
        self._whole: set[int] = set()
        self._homes = self._make(owners, where, means)
        if all(torch.device(kind).type == "cpu" for kind in {*where}):
            host: Sequence[int] = range(len(self._homes))
        else:
            host = [index for index, home in enumerate(self._homes) if home.is_cpu]
        self._on_host = len(host) == len(self._homes)
        self._host = Runs(
            self.chunks.starts if self._on_host else [self.chunks.starts[n] for n in host],
            list(map(_data_ptr, self._homes if self._on_host else [self._homes[n] for n in host])),
            [manifest.storages[index].nbytes for index in host],
        )
        self.on_device = not self._on_host

    def _owners(self) -> tuple[list[int], set[int]]:
        """The leaf that each storage belongs to, if it is one tensor; storages of numpy arrays."""
        storages = self._manifest.storages
        owners = [_SHARED] * len(storages)
        seen = [False] * len(storages)
        hosted = set()
        tensor, known = m.TensorLeaf, t.DTYPES
        for index, leaf in enumerate(self._manifest.leaves):
            if type(leaf) is tensor:
                if leaf.dtype not in known:
                    check_leaf(leaf, self._paths[index])
                at = leaf.storage
                if at >= 0:
                    owners[at] = _SHARED if seen[at] else index
                    seen[at] = True
                continue
            check_leaf(leaf, self._paths[index])
            for part in parts(leaf):
                if part.storage >= 0:
                    owners[part.storage] = _SHARED
                    seen[part.storage] = True
                    if isinstance(leaf, m.ArrayLeaf):
                        hosted.add(part.storage)
        return owners, hosted

    def _make(self, owners: list[int], where: list[Any], means: Means) -> list[torch.Tensor]:
        storages, leaves = self._manifest.storages, self._manifest.leaves
        large = [
            index
            for index, storage in enumerate(storages)
            if storage.nbytes >= LARGE_BYTES and torch.device(where[index]).type == "cpu"
        ]
        rooms = means.room([storages[index].nbytes for index in large]) if large else None
        kept = dict(zip(large, rooms, strict=True)) if rooms is not None else {}
        homes: list[torch.Tensor] = []
        run = _Run()
        odd = m.CONJ | m.NEG
        for index, storage in enumerate(storages):
            owner = owners[index]
            leaf: Any = leaves[owner] if owner >= 0 else None
            if (
                type(leaf) is m.TensorLeaf
                and leaf.strides is None
                and not leaf.offset
                and not leaf.flags & odd
                and not (kept and index in kept)
            ):
                # The tensor itself: cheaper than a view, and the common case by far.
                if run.takes(leaf, where[index]):
                    run.owners.append(owner)
                    continue
                self._flush(run, homes)
                run.begin(leaf, where[index], owner)
                continue
            self._flush(run, homes)
            homes.append(kept[index] if index in kept else allocate(storage.nbytes, where[index]))
        self._flush(run, homes)
        return homes

    def _flush(self, run: _Run, homes: list[torch.Tensor]) -> None:
        """Make the tensors of a run."""
        count = len(run.owners)
        if not count:
            return
        try:
            tensors = run.make(count)
        except (RuntimeError, MemoryError) as fault:
            raise MismatchError(f"no memory for {run.dtype} {run.shape}: {fault}") from None
        self._whole.update(range(len(homes), len(homes) + count))
        homes += tensors
        if run.flags == 0:
            first = run.owners[0]
            if run.owners == list(range(first, first + count)):
                self._ready[first : first + count] = tensors
            else:
                for owner, tensor in zip(run.owners, tensors, strict=True):
                    self._ready[owner] = tensor
        run.owners = []

    @cached_property
    def _paths(self) -> dict[int, Path]:
        return leaf_paths(self._manifest.tree)

    def places(self) -> Places:
        device = [
            (start, t.flat_bytes(home.untyped_storage(), 0, storage.nbytes))
            for start, home, storage in zip(
                self.chunks.starts, self._homes, self._manifest.storages, strict=True
            )
            if not (self._on_host or home.is_cpu)
        ]
        return Places(self._host, device, frozenset())

    def write(self, index: int, data: torch.Tensor) -> None:
        begin = self.chunks.offsets[index]
        end = begin + self.chunks.sizes[index]
        if self._host.reaches(begin, end):
            host = data.cpu()
            self._host.scatter(begin, end, host.data_ptr())
        if self._on_host:
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
            return t.without_storage(part, strides_of(part), device)
        home = self._homes[part.storage]
        if part.storage in self._whole:
            return t.with_flags(home, part.flags)
        return t.over_storage(home.untyped_storage(), part.offset, part, strides_of(part))


class _Run:
    """Tensors of one kind that follow each other. Made together they take half the time."""

    def __init__(self) -> None:
        self.dtype, self.flags = "", 0
        self.shape: tuple[int, ...] = ()
        self._device: Any = None
        self.owners: list[int] = []  # their leaves

    def takes(self, leaf: m.TensorLeaf, device: object) -> bool:
        return (
            leaf.shape == self.shape
            and leaf.dtype == self.dtype
            and leaf.flags == self.flags
            and device is self._device
            and bool(self.owners)
        )

    def begin(self, leaf: m.TensorLeaf, device: object, owner: int) -> None:
        self.dtype, self.shape, self.flags = leaf.dtype, leaf.shape, leaf.flags
        self._device, self.owners = device, [owner]

    def make(self, count: int) -> list[torch.Tensor]:
        one = torch.empty(self.shape, dtype=t.DTYPES[self.dtype], device=self._device)
        return [one, *map(torch.empty_like, repeat(one, count - 1))]


def _local_device(kind: str) -> str:
    """The same kind of device here if there is one, else host memory."""
    try:
        torch.device(kind)
    except RuntimeError:
        return "cpu"
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    return kind if available is not None and available() else "cpu"
