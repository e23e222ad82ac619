"""The plain case: a contiguous tensor in host or GPU memory, known by a handful of numbers.

Addresses tell where it lies: CUDA gives host and devices ranges of their own of one address space.

Most tensors of most states are plain, and each question to torch costs as much as the rest of the
work on a small tensor. `look` asks as few as it can, each of all tensors at once, and keeps the
answers in columns. What is not plain takes the general path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.state import manifest as m
from torchrelay.state.runs import Column
from torchrelay.state.spans import contiguous_strides
from torchrelay.state.tensors import NAMES, Likeness, blocks, versions_of

_Tensor = torch.Tensor
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))
_data_ptr, _size = _Tensor.data_ptr, _Tensor.size
_storage_offset: Any = _Tensor.storage_offset
_is_contiguous, _is_neg = _Tensor.is_contiguous, _Tensor.is_neg
_SAMPLE = 16  # of so many tensors one is asked before a guess
FLAGS, ITEMSIZE, NBYTES = 2, 3, 4  # fields of a `Sort`

# What contiguous tensors of one dtype and shape have in common: name of the dtype, shape, strides,
# item size, bytes.
Kind = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
# A plain tensor: its kind, address and flags.
Plain = tuple[Kind, int, int]


class Sort(NamedTuple):
    """What plain tensors of one kind and with the same flags have in common."""

    dtype: str
    shape: tuple[int, ...]
    flags: int
    itemsize: int
    nbytes: int
    device: str


_NO_SORT = Sort("", (), 0, 0, 0, "")
_DEVICES = ("cpu", "cuda")


class Plains:
    """The plain tensors among the leaves of a state, in columns. Holds none of the tensors."""

    def __init__(
        self,
        count: int,
        leaves: Sequence[int],
        sorts: list[Sort],
        numbers: list[int],
        addresses: list[int],
        offsets: list[int],
        likeness: Likeness,
    ) -> None:
        self.count = count  # of leaves that were looked at
        self.leaves = leaves  # which of them are plain, in order
        self.sorts = sorts
        self.numbers = numbers  # of each, its sort
        self.addresses = addresses
        self.offsets = offsets  # in their storages, in elements
        self.likeness = likeness

    def __len__(self) -> int:
        return len(self.addresses)

    @cached_property
    def _numbers(self) -> np.ndarray[Any, np.dtype[np.intp]]:
        return np.array(self.numbers, np.intp)

    @cached_property
    def places(self) -> Column:
        """The addresses, as a column."""
        return np.array(self.addresses, np.uint64)

    def each(self, field: int) -> Column:
        """A number that is a field of `Sort`, of each tensor."""
        table: Column = np.array([sort[field] for sort in self.sorts], np.uint64)
        column: Column = table[self._numbers]
        return column

    @cached_property
    def on_host(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each lies in host memory."""
        marks = np.array([sort.device == "cpu" for sort in self.sorts], bool)
        column: np.ndarray[Any, np.dtype[np.bool_]] = marks[self._numbers]
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
        columns = (self.leaves, self.numbers, self.addresses, self.offsets)
        places, numbers, addresses, offsets = (list(compress(column, keep)) for column in columns)
        likeness = Likeness([leaves[n] for n in places])
        return Plains(self.count, places, self.sorts, numbers, addresses, offsets, likeness)


def look(leaves: Sequence[object]) -> Plains:
    """Find the plain tensors among leaves, each of which is another object.

    Memory that torch cannot show never passes: asked for the address of a sparse, functional or
    functorch-wrapped tensor, or for the shape of a nested one, torch raises or says 0.
    """
    places: Sequence[int] = range(len(leaves))
    tensors: Any = leaves
    if not _TYPES.issuperset(map(type, leaves)):
        places = [n for n, leaf in enumerate(leaves) if type(leaf) in _TYPES]
        tensors = [leaves[n] for n in places]
    try:
        addresses, shapes, offsets = _first_look(tensors)
    except RuntimeError:
        places = [n for n in places if _shows(leaves[n])]
        tensors = [leaves[n] for n in places]
        addresses, shapes, offsets = _first_look(tensors)
    guess = None if 0 in addresses else _guess(tensors, shapes)
    if guess is not None:
        return Plains(len(leaves), places, guess[0], guess[1], addresses, offsets, guess[2])
    found, numbers, _ = _sorted(tensors, list(map(type, tensors)), shapes, *_asked(tensors))
    fine = [sort is not None for sort in found]
    keep = [fine[n] and at != 0 for n, at in zip(numbers, addresses, strict=True)]
    columns = (places, tensors, numbers, addresses, offsets)
    places, tensors, numbers, addresses, offsets = (
        list(compress(column, keep)) for column in columns
    )
    sorts = [sort or _NO_SORT for sort in found]
    return Plains(len(leaves), places, sorts, numbers, addresses, offsets, Likeness(tensors))


def _first_look(tensors: Sequence[Any]) -> tuple[list[int], list[torch.Size], list[int]]:
    """Address, shape and place in its storage of each."""
    addresses: list[int] = []
    shapes: list[torch.Size] = []
    offsets: list[int] = []
    for some in blocks(tensors):
        addresses += map(_data_ptr, some)
        shapes += map(_size, some)
        offsets += map(_storage_offset, some)
    return addresses, shapes, offsets


def _shows(leaf: Any) -> bool:
    """Whether the tensor tells where it lies and how large it is."""
    try:
        return isinstance(leaf.data_ptr(), int) and isinstance(leaf.size(), tuple)
    except RuntimeError:
        return False


def _asked(tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """What sets tensors of one type and shape apart."""
    yield [tensor.dtype for tensor in tensors]
    yield [tensor.requires_grad for tensor in tensors]
    yield [tensor.device for tensor in tensors]
    yield list(map(_is_contiguous, tensors))
    yield list(map(_is_neg, tensors))


class _Numbers(dict[object, int]):
    """Numbers for keys, in order of first use."""

    def __missing__(self, key: object) -> int:
        number = self[key] = len(self)
        return number


def _sorted(
    tensors: Sequence[Any], *traits: Sequence[object]
) -> tuple[list[Sort | None], list[int], list[Any]]:
    """The sorts there are if tensors of the same traits are of one sort, None for those that are
    not plain; the sort of each tensor, by number; the first tensor of each sort."""
    known = _Numbers()
    keys = traits[0] if len(traits) == 1 else zip(*traits, strict=True)
    numbers = [known[key] for key in keys]
    firsts: list[Any] = []
    at = 0
    for number in range(len(known)):
        at = numbers.index(number, at)
        firsts.append(tensors[at])
    return list(map(_sort, firsts)), numbers, firsts


def _guess(
    tensors: Sequence[Any], shapes: list[torch.Size]
) -> tuple[list[Sort], list[int], Likeness] | None:
    """Take all tensors of one type and shape for equal, and see whether they are.

    One comparison of all of them is cheaper than two questions to each.
    """
    traits: list[Sequence[object]] = [shapes]
    if len(set(map(type, tensors))) > 1:
        traits.append(list(map(type, tensors)))
    found, numbers, firsts = _sorted(tensors, *traits)
    for number, tensor in zip(numbers[::_SAMPLE], tensors[::_SAMPLE], strict=True):
        first = firsts[number]
        if tensor.dtype is not first.dtype or tensor.requires_grad != first.requires_grad:
            traits += [[x.dtype for x in tensors], [x.requires_grad for x in tensors]]
            found, numbers, firsts = _sorted(tensors, *traits)
            break
    sorts = [sort for sort in found if sort is not None]
    if len(sorts) < len(found):
        return None
    likeness = Likeness([firsts[number] for number in numbers])
    return (sorts, numbers, likeness) if likeness.holds(tensors) else None


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
    return plains.places - np.array(plains.offsets, np.uint64) * plains.each(ITEMSIZE)


def survey(leaves: Sequence[object]) -> Iterator[Plain | None]:
    """For each leaf what there is to know if it is a plain tensor in host memory, else None."""
    plains = look(leaves)
    kinds = [
        (dtype, shape, contiguous_strides(shape), size, nbytes)
        for dtype, shape, _, size, nbytes, _ in plains.sorts
    ]
    found: list[Plain | None] = [None] * len(leaves)
    for place, number, address in zip(plains.leaves, plains.numbers, plains.addresses, strict=True):
        if plains.sorts[number].device == "cpu":
            found[place] = kinds[number], address, plains.sorts[number].flags
    return iter(found)
