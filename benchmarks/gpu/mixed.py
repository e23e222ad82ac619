"""States of every kind made from a seed, the same on any device, and comparison by bits.

Both sides make what they expect from the seed alone: nothing that is compared has crossed over by
the way that is being tested.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.crew import Wrong
from torchrelay.memory.gpu.kernels import TILE
from torchrelay.state.tensors import raw_of

_NAMES = (
    "bfloat16 float16 float32 float64 int8 uint8 int16 int32 int64 uint16 bool complex64 complex128"
    " float8_e4m3fn float8_e5m2"
)
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]
SIZES = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 257, 4095, 4097, TILE - 1, 3 * TILE + 5)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Draw:
    """Tensors of random bits: NaNs of every payload among them."""

    def __init__(self, seed: int, device: str) -> None:
        self._rng = np.random.default_rng(seed)
        self._device = device

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        data = self._rng.integers(0, 2 if dtype is torch.bool else 256, nbytes, dtype=np.uint8)
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=self._device)
        # Memory of its own, aligned as the allocator does it.
        return torch.from_numpy(data).to(self._device, copy=True).view(dtype).view(shape)

    def numpy(self, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(self._rng.bytes(nbytes), dtype).reshape(shape).copy()


def mixed(seed: int, device: str, tiny: int) -> dict[str, Any]:
    draw, host = Draw(seed, device), Draw(seed + 1, "cpu")
    base = draw((1001,), torch.uint8)
    shared = draw((64, 48), torch.float32)
    pixels = draw((2, 3, 5, 7), torch.int16)
    indices = torch.tensor([[0, 1, 2], [3, 0, 2]], device=device)
    return {
        "dtypes": {str(dtype): draw((7, 5), dtype) for dtype in DTYPES},
        "sizes": [draw((size,), torch.uint8) for size in SIZES],
        "scalars": [draw((), torch.float32), draw((), torch.int64), draw((), torch.bool)],
        "empty": [draw((0,), torch.float32), draw((3, 0, 2), torch.bfloat16)],
        "odd": [base[1:100], base[101:102], base[103:]],
        "offsets": [draw((33,), torch.int16)[1:], draw((33,), torch.float32)[3:]],
        "transposed": draw((33, 20), torch.bfloat16).t(),
        "rows": draw((40, 9), torch.float32)[::2],
        "columns": draw((12, 31), torch.uint8)[:, 1::3],
        "channels_last": pixels.to(memory_format=torch.channels_last).view(torch.float16),
        "expanded": draw((1, 6), torch.float32).expand(5, 6),
        "conj": draw((9,), torch.complex64).conj(),
        "neg": torch._neg_view(draw((9,), torch.float32)),
        "conj imag": draw((9,), torch.complex64).conj().imag,
        "tied": [shared, shared],
        "tied views": [shared[:32], shared[16:], shared.t()],
        "parameter": torch.nn.Parameter(draw((11, 3), torch.float32)),
        "frozen": torch.nn.Parameter(draw((11,), torch.bfloat16), requires_grad=False),
        "grad": draw((13,), torch.float64).requires_grad_(),
        "sparse": torch.sparse_coo_tensor(
            indices, draw((3,), torch.float32), (3, 4), is_coalesced=True, check_invariants=False
        ),
        "plain": [seed, seed / 3, -0.0, f"text {seed}", None, True, 1 << 80, (seed, "x")],
        "cpu": [host((1000, 3), torch.bfloat16), host((5, 7), torch.float32).t()],
        "numpy": [host.numpy((50, 3), "<f4"), host.numpy((7,), "<i8")],
        "tiny": [draw((1 + index % 5,), torch.float32) for index in range(tiny)],
    }


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for key, value in enumerate(tree):
            yield from flat(value, f"{path}/{key}")
    else:
        yield path, tree


def bits(tensor: torch.Tensor) -> bytes:
    """The elements as they lie in memory, in row-major order."""
    if tensor.layout is torch.sparse_coo:
        return bits(tensor._indices()) + bits(tensor._values())
    return raw_of(tensor.detach()).cpu().contiguous().numpy().tobytes()


def meant(tensor: torch.Tensor) -> bytes:
    """With conj and neg bits resolved, by signs alone: arithmetic would quiet NaNs."""
    found = bits(tensor)
    if tensor.layout is not torch.strided or not (tensor.is_conj() or tensor.is_neg()):
        return found
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    words = np.frombuffer(found, f"<u{size}").copy()
    sign = words.dtype.type(1 << (8 * size - 1))
    if tensor.is_neg():
        words ^= sign
    if tensor.is_conj():
        words[1::2] ^= sign
    return words.tobytes()


def check_same(expected: Any, got: Any, *, device: str, in_place: bool) -> None:
    """`Wrong` unless `got`, with its tensors on the device, is `expected`, which is on the CPU."""
    mine, theirs = dict(flat(expected)), dict(flat(got))
    if list(mine) != list(theirs):
        raise Wrong(f"other leaves: {sorted(mine.keys() ^ theirs.keys())[:5]}")
    for path, one in mine.items():
        other = theirs[path]
        if isinstance(one, torch.Tensor):
            where = "cpu" if path.startswith("/cpu") else torch.device(device).type
            _check_tensor(path, one, other, where, in_place)
        elif isinstance(one, np.ndarray):
            same = one.dtype == other.dtype and one.tobytes() == other.tobytes()
            _check(same and one.shape == other.shape, path, "an array with other bits")
        else:
            _check(type(one) is type(other), path, f"a {type(other).__name__}")
            _check(_plain(one) == _plain(other), path, f"{other!r}, not {one!r}")
    if not in_place:
        _check_ties(mine, theirs)


def _check(good: bool, path: str, what: str) -> None:
    if not good:
        raise Wrong(f"{path}: {what}")


def _plain(value: Any) -> Any:
    return struct.pack("<d", value) if type(value) is float else value


def _check_tensor(path: str, one: torch.Tensor, other: Any, where: str, in_place: bool) -> None:
    _check(isinstance(other, torch.Tensor), path, "no tensor")
    _check(other.device.type == where, path, f"on {other.device}, not {where}")
    same = (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
    _check(same, path, f"{other.dtype} {tuple(other.shape)}")
    _check(one.requires_grad == other.requires_grad, path, "requires_grad is another")
    _check(type(one) is type(other), path, f"a {type(other).__name__}")
    if not in_place and one.layout is torch.strided:  # lazy bits are resolved by the sender
        _check(not other.is_conj() and not other.is_neg(), path, "a lazy bit came along")
    _check(meant(one) == meant(other), path, "WRONG BITS")


def _check_ties(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Views of one storage still are, at the same distance; others are not."""

    def homes(leaves: dict[str, Any]) -> list[int]:
        first: dict[int, int] = {}
        found = []
        for leaf in leaves.values():
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
                found.append(first.setdefault(leaf.untyped_storage().data_ptr(), len(first)))
        return found

    _check(homes(mine) == homes(theirs), "/", "tied tensors came apart, or others together")
    shared = mine.get("/tied/0")
    if shared is not None:
        for path in ("/tied views/1", "/tied/1"):
            distance = mine[path].data_ptr() - shared.data_ptr()
            there = theirs[path].data_ptr() - theirs["/tied/0"].data_ptr()
            _check(distance == there, path, "the view moved")


# Weights: fewer and plainer, for sequences, faults and destinations of other layouts

WEIGHTS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "a": ((64, 33), torch.bfloat16),
    "b": ((300_001,), torch.float32),
    "c": ((17,), torch.int8),
    "d": ((20, 30), torch.float64),
    "e": ((1,), torch.uint8),
    "f": ((5, 333), torch.float16),
    "g": ((2 * TILE + 3,), torch.uint8),
}


def weights(seed: int, device: str, most: int = 0) -> dict[str, Any]:
    """The first `most` of them, or all. The last is in memory that is strided."""
    draw = Draw(seed, device)
    found: dict[str, Any] = {name: draw(*kind) for name, kind in WEIGHTS.items()}
    found["strided"] = draw((18, 40), torch.int32)[1::2, 3:]
    return {name: found[name] for name in list(found)[: most or None]}


def large(seed: int, device: str, nbytes: int) -> dict[str, torch.Tensor]:
    """Made on the device itself: cheap, and the same for a seed and a kind of device."""
    make = torch.Generator(device).manual_seed(seed)
    numbers = [
        torch.randint(-(2**61), 2**61, (nbytes // 32,), generator=make, device=device)
        for _ in range(4)
    ]
    return {f"w{index}": one for index, one in enumerate(numbers)}


def same_large(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def overwrite(state: dict[str, Any], seed: int) -> None:
    """New bits in the same memory, as autograd can tell."""
    for (path, tensor), (_, bits_) in zip(flat(state), flat(weights(seed, "cpu")), strict=False):
        assert isinstance(tensor, torch.Tensor), path
        with torch.no_grad():
            tensor.view(INTEGERS[tensor.element_size()]).copy_(
                bits_.view(INTEGERS[tensor.element_size()])
            )


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of its storage by a tensor whose writes its version counter does not see."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


# Destinations in memory that is partly others': a frame of bytes that must stay

View = Callable[[torch.Tensor], torch.Tensor]
FRAMES: dict[str, tuple[tuple[int, ...], View]] = {
    "a": ((33, 64), lambda base: base.t()),
    "b": ((600_005,), lambda base: base[2:600_004:2]),
    "c": ((40,), lambda base: base[1:18]),
    "d": ((40, 41), lambda base: base[5:25, 3:33]),
    "e": ((3,), lambda base: base[1:2]),
    "f": ((333, 5), lambda base: base.t()),
    "g": ((2 * TILE + 20,), lambda base: base[7 : 2 * TILE + 10]),
    "strided": ((50, 20), lambda base: base[3:40, 2:11].t()),
}


class Framed:
    """Weights in such memory; `check` that it holds what it should, and nothing else changed."""

    def __init__(self, device: str) -> None:
        self._bases: dict[str, torch.Tensor] = {}
        self.into: dict[str, torch.Tensor] = {}
        for name, tensor in weights(0, "cpu").items():
            shape, view = FRAMES[name]
            integers = INTEGERS[tensor.element_size()]
            self._bases[name] = torch.full(shape, 0x5A, dtype=integers, device=device)
            self.into[name] = view(self._bases[name]).view(tensor.dtype)

    def check(self, seed: int | None) -> None:
        """None: nothing was written at all."""
        for name, tensor in weights(seed or 0, "cpu").items():
            expected = torch.full_like(self._bases[name], 0x5A, device="cpu")
            if seed is not None:
                FRAMES[name][1](expected).copy_(tensor.view(expected.dtype))
            if not torch.equal(expected, self._bases[name].cpu()):
                raise Wrong(f"/{name}: other bits than expected in or around the destination")
