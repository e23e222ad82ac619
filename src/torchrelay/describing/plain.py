"""The plain tensors of a state: contiguous, in host or GPU memory, known by a handful of numbers.

An address tells where one lies: in CUDA, host and devices share one address space.

Most tensors of most states are plain, and each call into torch costs as much as the rest of the
work on a small tensor. `find_plain` makes as few as it can, each for all tensors at once, and keeps
the answers in columns. Tensors that are not plain take the general path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Column
from torchrelay.record import manifest as m
from torchrelay.record.rows import Marks
from torchrelay.state.backing import missing_memory
from torchrelay.state.tensors import NAMES, blocks, versions_of

_Tensor = torch.Tensor
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_data_ptr = _Tensor.data_ptr
_storage_offset: Any = _Tensor.storage_offset
_storage: Any = _Tensor.untyped_storage
_storage_bytes: Any = torch.UntypedStorage.nbytes
_is_contiguous, _is_neg = _Tensor.is_contiguous, _Tensor.is_neg
# What tensors of one kind have in common, as long as they are contiguous and not negated.
_LOOKS: tuple[Callable[[Any], object], ...] = (
    type,
    _Tensor.size,
    attrgetter("dtype"),
    attrgetter("requires_grad"),
    attrgetter("device"),
)


class TensorKind(NamedTuple):
    """The common properties of plain tensors: dtype, shape, device and flags."""

    dtype: str
    shape: tuple[int, ...]
    flags: int
    itemsize: int
    nbytes: int
    device: str
    gpu: int  # -1 for the host


_DEVICES = ("cpu", "cuda")


@dataclass(eq=False)
class PlainTensors:
    """The plain tensors among the leaves of a state, in columns. Holds none of the tensors."""

    count: int  # of leaves that were looked at
    leaves: Numbers  # which of them are plain, in order
    kinds: list[TensorKind]
    kind_of: Numbers  # each tensor's kind, by number
    addresses: Column
    offsets: Column  # in their storages, in elements
    versions: list[int]  # how often each was written to, as autograd counts; none if not asked for

    def __len__(self) -> int:
        return len(self.addresses)

    @cached_property
    def nbytes(self) -> Column:
        """The bytes of each."""
        table: Column = np.array([kind.nbytes for kind in self.kinds], np.uint64)
        return table[self.kind_of]

    @cached_property
    def gpus(self) -> Numbers:
        """The GPU that each lies on; -1 for host memory."""
        column: Numbers = np.array([kind.gpu for kind in self.kinds], np.int64)[self.kind_of]
        return column

    @cached_property
    def on_host(self) -> Marks:
        """Whether each lies in host memory."""
        column: Marks = self.gpus < 0
        return column

    @property
    def origins(self) -> Column:
        """The address at which the storage of each starts."""
        if not self.offsets.any():
            return self.addresses
        sizes: Column = np.array([kind.itemsize for kind in self.kinds], np.uint64)
        return self.addresses - self.offsets * sizes[self.kind_of]

    def of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The plain ones of these leaves."""
        return leaves if len(self) == self.count else [leaves[n] for n in self.leaves.tolist()]

    def lie_in_place(self, tensors: Sequence[Any]) -> bool:
        """Whether the tensors, which are those looked at or like them, lie where they did, and
        their storages have all of them."""
        now, at, storage_bytes = _memory_of(tensors)
        same = now == list(self.addresses.tolist())
        return same and _reach(self.kinds, self.kind_of, now, at, storage_bytes)

    def some(self, keep: Marks) -> PlainTensors:
        """Only the tensors that are marked in `keep`."""
        columns = (self.leaves[keep], self.kinds, self.kind_of[keep], self.addresses[keep])
        versions = [*compress(self.versions, keep)] if self.versions else []
        return PlainTensors(self.count, *columns, self.offsets[keep], versions)


def find_plain(leaves: Sequence[object], *, sent: bool = True) -> PlainTensors:
    """Find the plain tensors among leaves, all of them different objects.

    Memory that torch cannot show never passes: asked for the address of a sparse, functional or
    functorch-wrapped tensor, or for the shape of a nested one, torch raises or says 0. Nor does a
    tensor that its storage does not hold all of. Tensors that are not `sent` are not asked how
    often they were written to.
    """
    is_plain = np.ones(len(leaves), bool)
    tensors: Any = leaves
    if not _TYPES.issuperset(map(type, leaves)):
        is_plain[:] = [*map(_TYPES.__contains__, map(type, leaves))]
        tensors = [*compress(leaves, is_plain)]
    kinds = _KindNumbers()
    numbers: list[Numbers] = [np.zeros(0, np.int64)]
    addresses: list[int] = []
    starts: list[Column] = [np.zeros(0, np.uint64)]
    versions: list[int] = []
    for some in blocks(tensors):
        kept: Sequence[Any] = some
        try:
            where, at, storage_bytes = _memory_of(some)
            found = kinds.of_block(some) if min(where) else None
            if found is not None and not _reach(kinds.found, found, where, at, storage_bytes):
                found = None
        except RuntimeError:  # there is a tensor that does not show its memory
            found = None
        if found is None:
            found = np.array([*map(kinds.of_one, some)], np.int64)
            kept = [*compress(some, found >= 0)]
            where, at, _ = _memory_of(kept)
        numbers.append(found)
        addresses += where
        starts.append(at)
        if sent:
            versions += versions_of(kept)
    kind_of = np.concatenate(numbers)
    is_plain[is_plain] = kind_of >= 0
    return PlainTensors(
        len(leaves),
        np.flatnonzero(is_plain),
        kinds.found,
        kind_of[kind_of >= 0],
        np.array(addresses, np.uint64),
        np.concatenate(starts),
        versions,
    )


def _memory_of(some: Sequence[Any]) -> tuple[list[int], Column, Column]:
    """The address of each tensor, its offset in its storage in elements, and the bytes of that."""
    where = list(map(_data_ptr, some))
    at = np.fromiter(map(_storage_offset, some), np.uint64, len(some))
    return where, at, np.fromiter(map(_storage_bytes, map(_storage, some)), np.uint64, len(some))


def _reach(
    kinds: Sequence[TensorKind],
    numbers: Numbers,
    where: Sequence[int],
    at: Column,
    storage_bytes: Column,
) -> bool:
    """Whether storages, which have an address and `storage_bytes` each, have all elements of the
    tensors of these kinds."""
    facts = np.array([(kind.itemsize, kind.nbytes) for kind in kinds], np.uint64).reshape(-1, 2)
    sizes, nbytes = facts[numbers].T
    begin: Column = at * sizes
    low: Column = np.array(where, np.uint64)
    return bool((begin + nbytes <= storage_bytes).all() and (low != begin).all())


class _KindNumbers:
    """The kinds of tensors, numbered."""

    def __init__(self) -> None:
        self.found: list[TensorKind] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def of_block(self, some: Sequence[Any]) -> Numbers | None:
        """The kind of each, by number; None if some may not be plain."""
        if not all(map(_is_contiguous, some)) or any(map(_is_neg, some)):
            return None
        looks = zip(*(map(look, some) for look in _LOOKS), strict=True)
        numbers: list[int] = []
        for tensor, key in zip(some, looks, strict=True):
            number = self._numbers.get(key)
            if number is None and (number := self._number(tensor)) is None:
                return None
            numbers.append(number)
        return np.array(numbers, np.int64)

    def of_one(self, tensor: Any) -> int:
        """The kind of any tensor, by number; -1 if it is not plain."""
        try:
            if not tensor.data_ptr() or not isinstance(tensor.size(), tuple):
                return -1
            if missing_memory(tensor) is not None:
                return -1
        except RuntimeError:
            return -1
        number = self._number(tensor) if tensor.is_contiguous() and not tensor.is_neg() else None
        return -1 if number is None else number

    def _number(self, tensor: Any) -> int | None:
        key = tuple([look(tensor) for look in _LOOKS])
        number = self._numbers.get(key)
        if number is None and (kind := _kind(tensor)) is not None:
            number = self._numbers[key] = len(self.found)
            self.found.append(kind)
        return number


def _kind(tensor: torch.Tensor) -> TensorKind | None:
    # Complex tensors may be conjugated.
    name, shape = NAMES.get(tensor.dtype), tuple(tensor.shape)
    if name is None or tensor.is_complex() or not tensor.numel():
        return None
    device = tensor.device.type
    if not tensor.data_ptr() or device not in _DEVICES or not tensor.is_contiguous():
        return None
    if tensor.is_neg() or len(shape) > m.MAX_DIMS:
        return None
    flags = m.REQUIRES_GRAD if tensor.requires_grad else 0
    flags |= 0 if type(tensor) is _Tensor else m.PARAMETER
    size = tensor.element_size()
    nbytes = prod(shape) * size
    return TensorKind(name, shape, flags, size, nbytes, device, tensor.get_device())
