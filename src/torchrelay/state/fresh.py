"""New tensors for a received state. Nobody sees them before `commit` returns.

Each has a storage of its own, unless they were ties where they come from: keeping one of them never
keeps the memory of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
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
        storages, leaves, ready = self._manifest.storages, self._manifest.leaves, self._ready
        large = [
            index
            for index, storage in enumerate(storages)
            if storage.nbytes >= LARGE_BYTES and torch.device(where[index]).type == "cpu"
        ]
        rooms = means.room([storages[index].nbytes for index in large]) if large else None
        kept = dict(zip(large, rooms, strict=True)) if rooms is not None else {}
        homes: list[torch.Tensor] = []
        like: dict[object, torch.Tensor] = {}  # one of each kind: the next takes half the time
        dtype: str
        shape: tuple[int, ...]
        place: Any
        model: torch.Tensor | None
        conj_or_neg = m.CONJ | m.NEG
        alike, whole = torch.empty_like, self._whole.add
        dtype, shape, place, model = "", (), None, None  # of the tensor before: mostly the same
        for index, storage in enumerate(storages):
            if kept and index in kept:
                homes.append(kept[index])
                continue
            owner = owners[index]
            leaf = leaves[owner] if owner >= 0 else None
            if (
                type(leaf) is not m.TensorLeaf
                or leaf.strides is not None
                or leaf.offset
                or leaf.flags & conj_or_neg
            ):
                homes.append(allocate(storage.nbytes, where[index]))
                continue
            # The tensor itself: cheaper than a view, and the common case by far.
            if leaf.shape != shape or leaf.dtype != dtype or where[index] is not place:
                dtype, shape, place = leaf.dtype, leaf.shape, where[index]
                model = like.get((dtype, shape, place))
            try:
                if model is None:
                    tensor = model = _first((dtype, shape, place), like)
                else:
                    tensor = alike(model)
            except (RuntimeError, MemoryError) as fault:
                raise MismatchError(f"no memory for {leaf.dtype} {leaf.shape}: {fault}") from None
            homes.append(tensor)
            whole(index)
            if leaf.flags == 0:
                ready[owner] = tensor
        return homes

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


def _first(
    kind: tuple[str, tuple[int, ...], Any], like: dict[object, torch.Tensor]
) -> torch.Tensor:
    dtype, shape, device = kind
    like[kind] = torch.empty(shape, dtype=t.DTYPES[dtype], device=device)
    return like[kind]


def _local_device(kind: str) -> str:
    """The same kind of device here if there is one, else host memory."""
    try:
        torch.device(kind)
    except RuntimeError:
        return "cpu"
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    return kind if available is not None and available() else "cpu"
