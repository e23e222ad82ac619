"""A plain oracle of a state: what can be seen of it from outside, as values that compare.

It uses nothing of the library: bytes are read from storages by numpy. `Seen.of` looks at a state,
and `difference` says where another one differs, by its path.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

DICTS = {"dict", "OrderedDict", "defaultdict", "any other"}


class Container(NamedTuple):
    kind: str
    default: Any
    keys: list[Any]


def walk(state: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    """Each leaf with its path, and each container as its type with its keys."""
    if isinstance(state, dict):
        kind = type(state).__name__, getattr(state, "default_factory", None)
        yield path, Container(*kind, [(type(key).__name__, repr(key)) for key in state])
        for key, value in state.items():
            yield from walk(value, f"{path}[{key!r}]")
    elif isinstance(state, (list, tuple, deque)) and not isinstance(state, torch.Size):
        yield path, Container(type(state).__name__, getattr(state, "maxlen", None), [len(state)])
        names = getattr(state, "_fields", range(len(state)))
        for name, value in zip(names, state, strict=True):
            yield from walk(value, f"{path}[{name!r}]")
    elif dataclasses.is_dataclass(state):
        yield path, Container(type(state).__name__, None, list(vars(state)))
        for name, value in vars(state).items():
            yield from walk(value, f"{path}[{type(state).__name__!r}][{name!r}]")
    else:
        yield path, state


def value_facts(value: Any) -> Any:
    """A value that compares by bits: -0.0 is not 0.0, and a NaN is the same NaN."""
    if isinstance(value, Container):
        return value
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, complex):
        return "complex", struct.pack("<dd", value.real, value.imag)
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return type(value).__name__, value.tobytes()
    return type(value).__name__, value


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray[Any, Any]:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def has_elements(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory."""
    return not tensor.is_meta and tensor.numel() > 0 and not tensor._is_zerotensor()


def places(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The offset of each byte of a tensor in its storage, in row-major order."""
    size = tensor.element_size()
    found = np.full((), int(tensor.storage_offset()), dtype=np.int64)
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + np.arange(length) * stride
    return (found.reshape(-1, 1) * size + np.arange(size)).reshape(-1)


def meant(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, with conj and neg bits resolved by signs alone."""
    if tensor.numel() == 0:
        return b""
    if tensor._is_zerotensor():
        return bytes(tensor.numel() * tensor.element_size())
    data = _bytes_of(tensor.untyped_storage())[places(tensor)]
    if tensor.is_conj() or tensor.is_neg():
        size = tensor.element_size() // (2 if tensor.is_complex() else 1)
        signs = data.view(f"<u{size}").copy()
        sign = signs.dtype.type(1 << (8 * size - 1))
        if tensor.is_neg():
            signs ^= sign
        if tensor.is_conj():
            signs[1::2] ^= sign
        return signs.tobytes()
    return data.tobytes()


@dataclasses.dataclass
class Seen:
    """The facts of a state at one time."""

    tree: list[tuple[str, Any]]  # containers and values
    tensors: dict[str, dict[str, Any]]
    bytes_at: dict[str, list[int]]  # of each tensor in memory: a number for each byte's place

    @classmethod
    def of(cls, state: Any) -> Seen:
        tree: list[tuple[str, Any]] = []
        tensors: dict[str, dict[str, Any]] = {}
        numbers: dict[tuple[int, int], int] = {}
        bytes_at: dict[str, list[int]] = {}
        for path, leaf in walk(state):
            if not isinstance(leaf, torch.Tensor):
                tree.append((path, value_facts(leaf)))
                continue
            tree.append((path, "tensor"))
            plain = leaf.detach() if leaf.requires_grad else leaf
            tensors[path] = _tensor_facts(leaf, plain)
            if plain.layout is torch.strided and has_elements(plain):
                home, at = plain.untyped_storage().data_ptr(), places(plain).tolist()
                if plain.is_conj() or plain.is_neg():  # its values lie nowhere yet
                    home, at = id(leaf), range(len(at))
                found = ((home, place) for place in at)
                bytes_at[path] = [numbers.setdefault(place, len(numbers)) for place in found]
        return cls(tree, tensors, bytes_at)

    def difference(self, other: Seen, *, in_place: bool = False, at_rest: bool = False) -> str:
        """Where another state differs from this; empty if it does not. `in_place`: it was written
        into memory of its own layout. `at_rest`: it was stored meanwhile."""
        for mine, its in zip(self.tree, other.tree, strict=False):
            if mine != its and not (in_place and _alike(mine[1], its[1])):
                return f"{mine[0]}: {mine[1]} became {its[1]}"
        if len(self.tree) != len(other.tree):
            return f"{len(self.tree)} leaves became {len(other.tree)}"
        for path, facts in self.tensors.items():
            its_facts = other.tensors[path]
            for name, value in facts.items():
                if in_place and name in ("flags", "strides", "grad", "kind"):
                    continue
                if name == "strides" and value is None:  # gaps need not travel
                    continue
                if value != its_facts[name]:
                    return f"{path}: {name} {value!r:.200} became {its_facts[name]!r:.200}"
        return "" if in_place else self._shared_otherwise(other)

    def _shared_otherwise(self, other: Seen) -> str:
        """Two bytes are one here if and only if they are one there. A tensor without memory, which
        stands for zeros, may become one that has some."""
        there: dict[int, tuple[str, int]] = {}
        here: dict[int, tuple[str, int]] = {}
        for path, mine in self.bytes_at.items():
            for number, (a, b) in enumerate(zip(mine, other.bytes_at[path], strict=True)):
                first = here.setdefault(a, (path, number))
                if first != there.setdefault(b, (path, number)):
                    return f"{path}: byte {number} is shared with another than {first}"
        return ""


def _alike(mine: Any, its: Any) -> bool:
    """Whether two containers differ only as a destination's dict may: it keeps its kind."""
    both = isinstance(mine, Container) and isinstance(its, Container)
    return both and mine.keys == its.keys and {mine.kind, its.kind} < DICTS


def _tensor_facts(leaf: torch.Tensor, plain: torch.Tensor) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": type(leaf).__name__,
        "dtype": leaf.dtype,
        "shape": tuple(leaf.shape),
        "layout": leaf.layout,
        "meta": leaf.is_meta,
        "grad": leaf.requires_grad,
    }
    if leaf.layout is torch.sparse_coo:
        facts["coalesced"] = leaf.is_coalesced()
        facts["parts"] = [meant(plain._indices()), meant(plain._values())]
    elif leaf.layout is not torch.strided:
        parts = plain.crow_indices(), plain.col_indices(), plain.values()
        facts["parts"] = [meant(part) for part in parts]
    else:
        facts["strides"] = _strides(plain)
        if not plain.is_meta:
            facts["values"] = meant(plain)
    return facts


def _strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a dense tensor that does not overlap itself, as far as they are of use."""
    used = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    if tensor.numel() == 0:
        return None
    expected = 1
    for length, stride in sorted(used, key=lambda one: one[1]):
        if stride != expected:
            return None
        expected *= length
    return tuple(stride for _, stride in used)
