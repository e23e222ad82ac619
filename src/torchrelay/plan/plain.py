"""The plain case: a contiguous tensor in host or GPU memory, known by a handful of numbers.

Addresses tell where it lies: CUDA gives host and devices ranges of their own of one address space.

Most tensors of most states are plain, and each question to torch costs as much as the rest of the
work on a small tensor. `look` asks as few as it can, each of all tensors at once, and keeps the
answers in columns. What is not plain takes the general path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.geometry.runs import Column
from torchrelay.record import manifest as m
from torchrelay.record.columns import Numbers
from torchrelay.state.tensors import NAMES, Like, Likeness, blocks, versions_of

_Tensor = torch.Tensor
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_data_ptr, _size = _Tensor.data_ptr, _Tensor.size
_storage_offset: Any = _Tensor.storage_offset
_SAMPLE = 16  # of so many tensors one is asked before a guess
FLAGS, ITEMSIZE, NBYTES = 2, 3, 4  # fields of a `Sort`


class Sort(NamedTuple):
    """What plain tensors of one kind and with the same flags have in common."""

    dtype: str
    shape: tuple[int, ...]
    flags: int
    itemsize: int
    nbytes: int
    device: str


_DEVICES = ("cpu", "cuda")


class Plains:
    """The plain tensors among the leaves of a state, in columns. Holds none of the tensors."""

    def __init__(
        self,
        count: int,
        leaves: Sequence[int],
        sorts: list[Sort],
        sort_of_each: Numbers,
        addresses: list[int],
        offsets: list[int],
        likeness: Likeness,
    ) -> None:
        self.count = count  # of leaves that were looked at
        self.leaves = leaves  # which of them are plain, in order
        self.sorts = sorts
        self.sort_of_each = sort_of_each  # by number
        self.addresses = addresses
        self.offsets = offsets  # in their storages, in elements; none if `look` was not to ask
        self.likeness = likeness

    def __len__(self) -> int:
        return len(self.addresses)

    @cached_property
    def leaf_of_each(self) -> Numbers:
        """The leaves, as a column."""
        whole = len(self) == self.count
        return np.arange(self.count) if whole else np.array(self.leaves, np.int64)

    @cached_property
    def places(self) -> Column:
        """The addresses, as a column."""
        return np.array(self.addresses, np.uint64)

    def each(self, field: int) -> Column:
        """A number that is a field of `Sort`, of each tensor."""
        table: Column = np.array([sort[field] for sort in self.sorts], np.uint64)
        column: Column = table[self.sort_of_each]
        return column

    @cached_property
    def nbytes(self) -> Column:
        """The bytes of each."""
        return self.each(NBYTES)

    @cached_property
    def on_host(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each lies in host memory."""
        marks = np.array([sort.device == "cpu" for sort in self.sorts], bool)
        column: np.ndarray[Any, np.dtype[np.bool_]] = marks[self.sort_of_each]
        return column

    def of(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The plain ones of these leaves."""
        return leaves if len(self) == self.count else [leaves[n] for n in self.leaves]

    def hold(self, leaves: Sequence[Any], versions: list[int] | None = None) -> bool:
        """Whether these leaves have tensors like those, and in the same places of memory.

        `versions` is given what autograd counts of them, as long as they are.
        """
        if len(leaves) != self.count:
            return False

        def lie(at: int, some: Sequence[Any]) -> bool:
            if versions is not None:
                versions.extend(versions_of(some))
            end = at + len(some)
            return (
                list(map(_data_ptr, some)) == self.addresses[at:end]
                and list(map(_storage_offset, some)) == self.offsets[at:end]
            )

        return self.likeness.holds(self.of(leaves), lie)

    def lie(self, tensors: Sequence[Any]) -> bool:
        """Whether the tensors, which are those looked at or like them, lie where they did."""
        return list(map(_data_ptr, tensors)) == self.addresses

    def some(self, keep: list[bool], leaves: Sequence[Any]) -> Plains:
        """Those marked in `keep` alone. `leaves` are those looked at."""
        columns = (self.leaves, self.addresses, self.offsets)
        places, addresses, offsets = (list(compress(column, keep)) for column in columns)
        likeness = Likeness.of([leaves[n] for n in places])
        sorts = self.sort_of_each[np.array(keep, bool)]
        return Plains(self.count, places, self.sorts, sorts, addresses, offsets, likeness)


def look(
    leaves: Sequence[object], versions: list[int] | None = None, *, offsets: bool = True
) -> Plains:
    """Find the plain tensors among leaves, each of which is another object.

    Memory that torch cannot show never passes: asked for the address of a sparse, functional or
    functorch-wrapped tensor, or for the shape of a nested one, torch raises or says 0. `versions`
    is given what autograd counts of those that are plain, where nothing else is among them. Without
    `offsets` nobody is asked where in its storage it lies: then `hold` and `origins` do not serve.
    """
    places: Sequence[int] = range(len(leaves))
    tensors: Any = leaves
    if not _TYPES.issuperset(map(type, leaves)):
        places = [n for n, leaf in enumerate(leaves) if type(leaf) in _TYPES]
        tensors = [leaves[n] for n in places]
    try:
        found = _look_at_blocks(tensors, versions, offsets)
    except RuntimeError:
        found = None
    if found is not None:
        return Plains(len(leaves), places, *found)
    if versions is not None:
        versions.clear()
    places = [n for n in places if _shows(leaves[n])]
    tensors = [leaves[n] for n in places]
    return _look_at_each(len(leaves), places, tensors)


Found = tuple[list[Sort], Numbers, list[int], list[int], Likeness]


def _look_at_blocks(
    tensors: Sequence[Any], versions: list[int] | None, ask_offsets: bool
) -> Found | None:
    """What `Plains` has of tensors that are all plain; None where some may not be."""
    sorts, likes = _Sorts(), []
    numbers: list[Numbers] = [np.zeros(0, np.int64)]
    addresses: list[int] = []
    offsets: list[int] = []
    for some in blocks(tensors):
        addresses += map(_data_ptr, some)
        if ask_offsets:
            offsets += map(_storage_offset, some)
        if versions is not None:
            versions += versions_of(some)
        found = sorts.of(some)
        if found is None:
            return None
        numbers.append(found[0])
        likes.append(found[1])
    if 0 in addresses:
        return None
    return sorts.found, np.concatenate(numbers), addresses, offsets, Likeness(likes)


class _Sorts:
    """The sorts of tensors, numbered. Tensors that look alike are taken to be of one sort, and then
    compared, all at once: that is cheaper than two questions to each."""

    def __init__(self) -> None:
        self.found: list[Sort] = []
        self._firsts: list[Any] = []
        self._numbers: dict[tuple[object, ...], int | None] = {}
        self._likes: dict[tuple[int, int], Like] = {}

    def of(self, some: Sequence[Any]) -> tuple[Numbers, Like] | None:
        """The sort of each, by number, and what they are like; None if some may not be plain."""
        count = len(some)
        # Mostly they are all of one sort.
        number = self._number(some[0])
        if number is None:
            return None
        if number == self._number(some[count // 2]) == self._number(some[-1]):
            like = self._likes.get((number, count))
            if like is None:
                like = self._likes[number, count] = Like([some[0]] * count)
            if like.holds(some):
                return np.full(count, number), like
        traits: list[Sequence[object]] = [list(map(type, some)), list(map(_size, some))]
        numbers = self._by(some, traits)
        if numbers is not None and any(
            one.dtype is not self._firsts[n].dtype
            or one.requires_grad != self._firsts[n].requires_grad
            for n, one in zip(numbers[::_SAMPLE], some[::_SAMPLE], strict=True)
        ):
            traits += [[one.dtype for one in some], [one.requires_grad for one in some]]
            numbers = self._by(some, traits)
        if numbers is None:
            return None
        like = Like([self._firsts[n] for n in numbers])
        return (np.array(numbers, np.int64), like) if like.holds(some) else None

    def _by(self, some: Sequence[Any], traits: Sequence[Sequence[object]]) -> list[int] | None:
        known: dict[tuple[object, ...], int] = {}
        numbers: list[int] = []
        for key, one in zip(zip(*traits, strict=True), some, strict=True):
            number = known.get(key)
            if number is None:
                number = self._number(one)
                if number is None:
                    return None
                known[key] = number
            numbers.append(number)
        return numbers

    def _number(self, tensor: Any) -> int | None:
        key = (type(tensor), tensor.size(), tensor.dtype, tensor.requires_grad, tensor.device)
        if key not in self._numbers:
            sort = _sort(tensor)
            self._numbers[key] = None if sort is None else len(self.found)
            if sort is not None:
                self.found.append(sort)
                self._firsts.append(tensor)
        return self._numbers[key]


def _look_at_each(count: int, places: Sequence[int], tensors: Sequence[Any]) -> Plains:
    """Where tensors of all kinds may be among them."""
    known: dict[tuple[object, ...], int] = {}
    sorts: list[Sort] = []
    columns: tuple[list[int], ...] = ([], [], [], [])
    kept: list[Any] = []
    for place, tensor in zip(places, tensors, strict=True):
        address = tensor.data_ptr()
        if not address:
            continue
        key = (  # what sets tensors apart
            type(tensor),
            tensor.size(),
            tensor.dtype,
            tensor.requires_grad,
            tensor.device,
            tensor.is_contiguous(),
            tensor.is_neg(),
        )
        number = known.get(key)
        if number is None:
            sort = _sort(tensor)
            number = known[key] = -1 if sort is None else len(sorts)
            if sort is not None:
                sorts.append(sort)
        if number >= 0:
            kept.append(tensor)
            found = (place, number, address, tensor.storage_offset())
            for column, value in zip(columns, found, strict=True):
                column.append(value)
    places, numbers, addresses, offsets = columns
    by_number = np.array(numbers, np.int64)
    return Plains(count, places, sorts, by_number, addresses, offsets, Likeness.of(kept))


def _shows(leaf: Any) -> bool:
    """Whether the tensor tells where it lies and how large it is."""
    try:
        return isinstance(leaf.data_ptr(), int) and isinstance(leaf.size(), tuple)
    except RuntimeError:
        return False


def _sort(tensor: torch.Tensor) -> Sort | None:
    # Complex tensors may be conjugated, quantized ones come with more than their bytes.
    name, shape = NAMES.get(tensor.dtype), tuple(tensor.shape)
    if name is None or tensor.is_complex() or tensor.is_quantized or not tensor.numel():
        return None
    device = tensor.device.type
    if not tensor.data_ptr() or device not in _DEVICES or not tensor.is_contiguous():
        return None
    if tensor.is_neg() or len(shape) > m.MAX_DIMS:
        return None
    flags = m.REQUIRES_GRAD if tensor.requires_grad else 0
    flags |= 0 if type(tensor) is _Tensor else m.PARAMETER
    size = tensor.element_size()
    return Sort(name, shape, flags, size, prod(shape) * size, device)


def origins(plains: Plains) -> Column:
    """The address at which the storage of each plain tensor starts."""
    if not any(plains.offsets):
        return plains.places
    return plains.places - np.array(plains.offsets, np.uint64) * plains.each(ITEMSIZE)
