"""States of any kind by a seed, destinations for them, and what makes either be refused.

The same seed makes the same state in every process. A `Case` knows the paths at which a call must
refuse it; a state without any must arrive.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from copy import copy
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.oracle import places
from torchrelay.state.registry import register

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Note:
    text: Any
    more: Any


register(Note)

DTYPES = sorted(
    {
        found
        for name in dir(torch)
        if isinstance(found := getattr(torch, name), torch.dtype)
        and not any(word in str(found) for word in ("qint", "quint"))
    },
    key=str,
)
TEXTS = ["", "x", "ü", "\x00", "\ud800", "a.b[0]", "\U0001f600", "'\"\\", "\n", "x" * 3000]
KEYS: list[Any] = [5, 7, -1, 2**70, 1.5, -0.0, math.inf, None, True, ("a", 1), (), "k.e.y", "", "ö"]


def fields_of(kind: type, path: str) -> list[str]:
    """The paths of the fields of a namedtuple or of a registered type."""
    if kind is Pair:
        return [f"{path}['first']", f"{path}['second']"]
    return [f"{path}['Note']['text']", f"{path}['Note']['more']"]


SPECIAL = ["zero", "zero view", "meta", "coo", "csr", "channels", "unaligned"]
SPECIAL += ["computed", "inference", "shared", "buffer", "larger", "replaced", "from numpy"]
SPECIAL += ["conjugated meta"]
REFUSED = ["shrunk", "shrunk view", "freed", "object", "lambda", "nested", "subclass", "int"]
REFUSED += ["one of many", "sparse", "quantized", "fake"]


class Tagged(torch.Tensor):
    """An unregistered subclass."""


class Number(int):
    """Another type than `int`."""


@dataclass
class Case:
    """A state, or a destination, and where it must be refused."""

    state: Any
    bad: list[str] = field(default_factory=list)
    may: list[str] = field(default_factory=list)  # paths at which it may be refused


class Maker:
    """Makes one case by a seed. `tame`: nothing of it is refused."""

    def __init__(self, seed: int, *, tame: bool = False, plain: bool = False) -> None:
        self.random = random.Random(seed)
        self._bytes = np.random.default_rng(seed)
        self._storages: list[torch.UntypedStorage] = []
        self._tensors: list[torch.Tensor] = []
        self._plain = plain
        self._bad = not tame and self.random.random() < 0.2
        self.bad: list[str] = []

    def case(self) -> Case:
        state = {
            name: self.container(f"['{name}']", 2)
            for name in self.random.sample(["model", "optimizer", "rng", "x"], 2)
        }
        if self._bad and not self.bad:
            state["bad"] = self.refused("['bad']")
        return Case(state, self.bad)

    # Containers and values

    def container(self, path: str, depth: int) -> Any:
        pick = self.random.random()
        if depth == 0 or pick < 0.1:
            return self.leaf(path)
        count = self.random.randint(0, 4)
        if pick < 0.6:
            names: list[Any] = [f"w{number}" for number in range(count)]
            if pick < 0.25:
                names = self.random.sample(KEYS, count)
            inner = {name: self.container(f"{path}[{name!r}]", depth - 1) for name in names}
            kind = self.random.choice([dict, dict, OrderedDict, "default"])
            return defaultdict(list, inner) if kind == "default" else kind(inner)
        if pick < 0.9:
            items = [self.container(f"{path}[{number}]", depth - 1) for number in range(count)]
            return items if pick < 0.8 else tuple(items)
        kind = Pair if pick < 0.95 else Note
        return kind(*(self.container(inner, depth - 1) for inner in fields_of(kind, path)))

    def leaf(self, path: str) -> Any:
        if self._bad and self.random.random() < 0.15:
            return self.refused(path)
        return self.tensor() if self.random.random() < 0.75 else self.value()

    def value(self) -> Any:
        rng = self.random
        return rng.choice(
            [
                lambda: None,
                lambda: rng.random() < 0.5,
                lambda: rng.choice([0, -1, 2**63, -(2**63) - 1, 10**200, 2**64 - 1]),
                lambda: rng.choice([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308]),
                lambda: complex(rng.choice([math.nan, -0.0]), rng.random()),
                lambda: rng.choice(TEXTS),
                lambda: 10**5000 * rng.choice([1, -1]),
                lambda: deque([1, "a"], rng.choice([None, 3])),
                lambda: Counter("abca"),
                lambda: PurePosixPath("/a/ü"),
                lambda: self._bytes.integers(0, 9, (4, 6)).astype("<f2")[::2, ::-1],
                lambda: np.array(["ab", ""], dtype=rng.choice(["<U2", "S3"])),
                lambda: self._bytes.bytes(rng.choice([0, 1, 700])),
                lambda: torch.Size([3, 0]),
                lambda: rng.choice(DTYPES),
                lambda: torch.device("cpu"),
                lambda: np.float32(rng.random()),
                lambda: self._bytes.integers(0, 9, (2, 3)).astype(rng.choice(["<i4", ">f8", "?"])),
            ]
        )()

    # Tensors

    def tensor(self) -> torch.Tensor:
        pick = self.random.random()
        if self._tensors and pick < 0.12:
            return self.random.choice(self._tensors)  # tied
        if pick < 0.2 and not self._plain:
            return self.special()
        found = self.strided(self.random.choice(DTYPES))
        self._tensors.append(found)
        return found

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        data = self._bytes.integers(0, 2, max(nbytes, 1), dtype=np.uint8)
        if self.random.random() < 0.7:
            data = self._bytes.integers(0, 256, max(nbytes, 1), dtype=np.uint8)
        return torch.from_numpy(data).clone().untyped_storage()

    def strided(self, dtype: torch.dtype) -> torch.Tensor:
        """Over a storage of its own, or of others."""
        rng = self.random
        if self._storages and rng.random() < 0.35 and dtype is not torch.bool:
            storage = rng.choice(self._storages)
        else:
            large = 40_000 if rng.random() < 0.05 else 60
            storage = self.storage(rng.randint(1, large) * dtype.itemsize + rng.randint(0, 9))
            if dtype is torch.bool:
                torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_and_(1)
            else:
                self._storages.append(storage)
        shape, strides, offset = self.geometry(storage.nbytes() // dtype.itemsize)
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        if tensor.is_complex() and rng.random() < 0.3:
            tensor = tensor.conj()
        if dtype in (torch.float32, torch.float64, torch.complex64) and rng.random() < 0.2:
            tensor = torch._neg_view(tensor)
        may = tensor.is_floating_point() or tensor.is_complex()
        if rng.random() < 0.25:
            return torch.nn.Parameter(tensor, requires_grad=may and rng.random() < 0.7)
        return tensor.requires_grad_() if may and rng.random() < 0.1 else tensor

    def geometry(self, numel: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape, strides and offset of a view into that many elements."""
        rng, kind = self.random, self.random.choice(["all", "some", "any", "any", "dense", "none"])
        if kind == "none" or numel == 0:
            shape = rng.choice([(0,), (3, 0), (0, 2, 0)])
            return shape, tuple(rng.randint(0, 3) for _ in shape), 0
        offset = rng.randint(0, numel - 1) if kind != "all" else 0
        left = numel - offset
        if kind in ("all", "some"):
            return (left,), (1,), offset
        shape, strides, step = [], [], 1
        for _ in range(rng.randint(0, 4)):
            if kind == "dense":
                size = rng.randint(1, min(4, left // step))
                stride, step = step, step * size
            else:
                stride = rng.randint(0, 4)
                size = rng.randint(1, 4 if not stride else min(4, 1 + (left - 1) // stride))
                left -= (size - 1) * stride
            shape.append(size)
            strides.append(stride)
        order = rng.sample(range(len(shape)), len(shape))
        return tuple(shape[d] for d in order), tuple(strides[d] for d in order), offset

    def special(self) -> torch.Tensor:
        rng = self.random
        values = torch.from_numpy(self._bytes.normal(size=(4, 4)).astype(np.float32))
        kind = rng.choice(SPECIAL)
        if kind == "unaligned":
            data = bytearray(self._bytes.bytes(41))
            return torch.frombuffer(data, dtype=torch.float32, offset=1, count=10)
        if kind == "computed":
            return (values.requires_grad_() * 2).t()
        if kind == "inference":
            with torch.inference_mode():
                return values + 1
        if kind == "shared":
            return values.share_memory_()[1:]
        if kind == "buffer":
            return torch.nn.Buffer(values)
        if kind == "larger":  # a storage that was made larger under its tensor
            own = values.clone()
            own.untyped_storage().resize_(1000)
            return own[:, 1]
        if kind == "replaced":
            values.data = torch.arange(7.0)
            return values
        if kind == "from numpy":
            return torch.from_numpy(self._bytes.normal(size=(3, 4))[:, ::2])
        if kind == "conjugated meta":
            return torch.empty(3, dtype=torch.complex64, device="meta").conj()
        if kind == "zero":
            return torch._efficientzerotensor((3,), dtype=rng.choice([torch.float32, torch.int8]))
        if kind == "zero view":
            return torch._efficientzerotensor((3, 4)).t()[1:]
        if kind == "meta":
            return torch.empty((2, 3), dtype=rng.choice(DTYPES), device="meta")
        if kind == "coo":
            return values.relu().to_sparse()
        if kind == "csr":
            return values.relu().to_sparse_csr()
        return torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)

    # Leaves that are refused

    def refused(self, path: str) -> Any:
        """Something that cannot travel. In a state it is known by its path."""
        self.bad.append(path)
        kind = self.random.choice(REFUSED)
        if kind == "one of many":
            many = [torch.ones(3) for _ in range(700)]
            at = self.random.randrange(700)
            many[at].untyped_storage().resize_(4)
            self.bad[-1] = f"{path}[{at}]"
            return many
        if kind == "sparse":
            tensor = torch.eye(6).to_sparse()
            tensor._values().untyped_storage().resize_(8)
            return tensor
        if kind == "quantized":
            return torch.quantize_per_tensor(torch.ones(40), 0.1, 3, torch.qint8)
        if kind == "fake":
            with FakeTensorMode():
                return torch.ones(3)
        if kind == "subclass":
            return torch.ones(3).as_subclass(Tagged)
        if kind == "int":
            return Number(3)
        if kind == "shrunk":
            tensor = torch.ones(self.random.randint(2, 50))
            tensor.untyped_storage().resize_(4)
            return tensor
        if kind == "shrunk view":
            tensor = torch.ones(6, 6, dtype=torch.float64).t()[2:]
            tensor.untyped_storage().resize_(200)
            return tensor
        if kind == "freed":
            tensor = torch.ones(3, 3)
            tensor.untyped_storage().resize_(0)
            return tensor
        if kind == "nested":
            return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        return object() if kind == "object" else lambda: 1


# Destinations


class Landing:
    """A destination for a state: other memory, other layouts, other values; with guards."""

    def __init__(self, seed: int, *, tame: bool = False) -> None:
        self.random = random.Random(seed ^ 0x5EED)
        self._bytes = np.random.default_rng(seed + 1)
        self._spoil = not tame and self.random.random() < 0.2
        self.bad: list[str] = []
        self.may: list[str] = []
        self._tame = tame
        self._users: list[str] = []  # paths of the memory that was made last
        # Memory, its bytes before, and which of them belong to destinations.
        self._guards: list[tuple[np.ndarray[Any, Any], ...]] = []

    def case(self, state: Any) -> Case:
        return Case(self._like(state, ""), self.bad, self.may)

    def _like(self, value: Any, path: str) -> Any:
        if isinstance(value, (Counter, deque)):
            return copy(value)
        if isinstance(value, PurePosixPath):
            return PurePosixPath("elsewhere")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            return {key: self._like(inner, f"{path}[{key!r}]") for key, inner in value.items()}
        if isinstance(value, (Pair, Note)):
            kind, inner = type(value), value if isinstance(value, Pair) else vars(value).values()
            return kind(*map(self._like, inner, fields_of(kind, path)))
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            items = (self._like(inner, f"{path}[{n}]") for n, inner in enumerate(value))
            return type(value)(items)
        return np.zeros_like(value) if isinstance(value, np.ndarray) else None

    def _tensor(self, sent: torch.Tensor, path: str) -> torch.Tensor:
        if sent.layout is torch.sparse_coo:
            twin = sent.detach().clone()
            twin._values().zero_()
            return twin
        if sent.layout is not torch.strided:
            twin = sent.detach().clone()
            twin.values().zero_()
            return twin
        shape, dtype = tuple(sent.shape), sent.dtype
        if sent.is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        if self._spoil and self.random.random() < 0.3:
            return self._spoiled(sent, path)
        made = self._over_another(shape, dtype, path)
        if made is None:
            made, self._users = self._spaced(shape, dtype), [path]
        if made.is_complex() and self.random.random() < 0.3:
            return made.conj()
        if self.random.random() < 0.3:
            return torch.nn.Parameter(made, requires_grad=False)
        return made

    def _spaced(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In memory of its own, with gaps, in any order of dimensions."""
        order = self.random.sample(range(len(shape)), len(shape))
        strides, step = [0] * len(shape), self.random.randint(1, 3)
        for dim in order:
            strides[dim] = step
            step = step * max(shape[dim], 1) + self.random.randint(0, 2)
        offset = self.random.randint(0, 3)
        count = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n) + 1
        count += self.random.randint(0, 3)
        memory = self._bytes.integers(0, 2, count * dtype.itemsize, np.uint8)
        self._guards.append((memory, memory.copy(), np.zeros(len(memory), dtype=np.bool_)))
        return self._over(self._guards[-1], dtype, offset, shape, tuple(strides))

    def _over_another(
        self, shape: tuple[int, ...], dtype: torch.dtype, path: str
    ) -> torch.Tensor | None:
        """Now and then, over memory that others have: it may be refused, and must not be mixed."""
        need = math.prod(shape)
        if self._tame or not need or not self._guards or self.random.random() > 0.06:
            return None
        guard, offset = self._guards[-1], self.random.randint(0, 2)
        if len(guard[0]) < (offset + need) * dtype.itemsize:
            return None
        self._users.append(path)
        self.may += self._users
        strides = torch.empty(shape, device="meta").stride()
        return self._over(guard, dtype, offset, shape, strides)

    def _over(
        self,
        guard: tuple[np.ndarray[Any, Any], ...],
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        storage = torch.from_numpy(guard[0]).untyped_storage()
        made = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        if made.numel():
            guard[2][places(made)] = True
        return made

    def _spoiled(self, sent: torch.Tensor, path: str) -> torch.Tensor:
        """Something that cannot take the values of a tensor."""
        self.bad.append(path)
        shape, dtype = tuple(sent.shape), sent.dtype
        kinds = ["dtype", "shape", "meta"]
        if sent.numel():
            kinds += ["shrunk", "freed", "zero"]
        if math.prod(shape) > 1:
            kinds += ["expanded"]
        kind = self.random.choice(kinds)
        if kind == "dtype":
            other = torch.int32 if dtype is torch.float32 else torch.float32
            return torch.zeros(shape, dtype=other)
        if kind == "shape":
            return torch.empty((*shape, 2), dtype=dtype)
        if kind == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        if kind == "expanded":
            return torch.empty((1,) * len(shape), dtype=dtype).expand(shape)
        if kind == "zero" and dtype in (torch.float32, torch.float64):
            return torch._efficientzerotensor(shape, dtype=dtype)
        made = torch.empty(shape, dtype=dtype)
        made.untyped_storage().resize_(
            0 if kind == "freed" else made.untyped_storage().nbytes() - 1
        )
        return made

    def untouched(self) -> bool:
        """Whether nothing at all was written."""
        return all(np.array_equal(memory, before) for memory, before, _ in self._guards)

    def outside_changed(self) -> bool:
        """Whether bytes outside of the destinations were written."""
        return any(
            not np.array_equal(memory[~taken], before[~taken])
            for memory, before, taken in self._guards
        )
