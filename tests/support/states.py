"""States of every kind for property tests, destinations for them, and comparison by bits.

`states()` draws states, `destinations(state)` draws an `into=` with guards around its memory, and
`assert_same` says whether a state arrived exactly.
"""

from __future__ import annotations

import enum
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.lib.recfunctions import repack_fields

from torchrelay.geometry.strides import extent, overlapping, packed
from torchrelay.state.registry import register
from torchrelay.state.tensors import raw_of, sparse_parts


def _show(tensor: torch.Tensor, printer: Any, cycle: bool) -> None:
    strides = tensor.stride() if tensor.layout is torch.strided else ""
    printer.text(f"<{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} {strides}>")


# How hypothesis shows a failing example: torch itself cannot show tensors of every dtype.
torch.Tensor._repr_pretty_ = _show  # type: ignore[attr-defined]

ALL_DTYPES: list[torch.dtype] = sorted(
    {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)},
    key=str,
)
QUANTIZED = [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4]
STRIDED_DTYPES = [d for d in ALL_DTYPES if d not in QUANTIZED]
_NUMPY_NAMES = "? i1 <u2 <i4 >i4 <f2 <f4 <f8 >f8 <c8 >c16 <M8[ns] <m8[s] >M8[D] S3 <U2 >U2 V5"
NUMPY_DTYPES: list[np.dtype[Any]] = [
    *map(np.dtype, _NUMPY_NAMES.split()),
    np.dtype([("a", "<i4"), ("b", ">f8", (2,))]),
    np.dtype([("flag", "?"), ("wide", "<f8")], align=True),
    np.dtype([("outer", [("in", "<i2"), ("side", "S2")]), ("t", "<M8[s]")]),
]

Pair = namedtuple("Pair", ["left", "right"])


class Moment(NamedTuple):
    first: object
    second: object = None


@dataclass
class Point:
    x: Any
    y: Any = 0
    hidden: Any = field(default=None, init=False)


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 7


for _type in (Point, Color, Level):
    register(_type)


# Tensors.


def storage_of(nbytes: int, seed: int) -> torch.UntypedStorage:
    """A storage of random bytes."""
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(data).clone().untyped_storage()


def strided(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """The tensor over part of a storage; bytes of a bool are made 0 or 1."""
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
    if dtype is torch.bool and tensor.numel():
        torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_and_(1)
    return tensor


@st.composite
def geometries(draw: st.DrawFn, numel: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and strides of a view into `numel` elements."""
    kind = draw(st.sampled_from(["all", "slice", "step", "dense", "any", "any"]))
    if kind == "all" or numel == 0:
        return 0, (numel,), (1,)
    offset = draw(st.integers(0, numel - 1))
    room = numel - offset
    if kind == "slice":
        return offset, (draw(st.integers(0, room)),), (1,)
    if kind == "step":
        step = draw(st.integers(1, 4))
        return offset, (draw(st.integers(1, 1 + (room - 1) // step)),), (step,)
    sizes: list[int] = []
    strides: list[int] = []
    if kind == "dense":
        step = 1
        for _ in range(draw(st.integers(1, 4))):
            size = draw(st.integers(1, min(4, room // step)))
            sizes.append(size)
            strides.append(step)
            step *= size
        order = draw(st.permutations(range(len(sizes))))
        return offset, tuple(sizes[d] for d in order), tuple(strides[d] for d in order)
    left = room - 1
    for _ in range(draw(st.integers(0, 4))):
        stride = draw(st.integers(0, 5))
        most = 4 if stride == 0 else min(4, 1 + left // stride)
        size = draw(st.integers(0, most))
        sizes.append(size)
        strides.append(stride)
        left -= max(size - 1, 0) * stride
    return offset, tuple(sizes), tuple(strides)


def _may_require_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@st.composite
def views(draw: st.DrawFn, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
    """A view of a storage, perhaps conjugated, negated, requiring grad or a parameter."""
    geometry = draw(geometries(storage.nbytes() // dtype.itemsize))
    tensor = strided(storage, dtype, *geometry)
    if tensor.is_complex() and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype in (torch.float32, torch.float64, torch.complex64) and draw(st.integers(0, 3)) == 3:
        tensor = torch._neg_view(tensor)
    wrap = draw(st.sampled_from(["no", "no", "grad", "parameter", "frozen parameter"]))
    grad = wrap in ("grad", "parameter") and _may_require_grad(tensor)
    if "parameter" in wrap:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_() if grad else tensor


@st.composite
def plain_tensors(draw: st.DrawFn, most: int = 5) -> list[torch.Tensor]:
    """Tensors over a few storages, some of them sharing one, some of them in another dtype."""
    found: list[torch.Tensor] = []
    while len(found) < most:
        dtype = draw(st.sampled_from(STRIDED_DTYPES))
        tail = draw(st.integers(0, 9))
        nbytes = draw(st.integers(1, 40)) * dtype.itemsize + tail
        storage = storage_of(nbytes, draw(st.integers(0, 1 << 16)))
        found.append(draw(views(storage, dtype)))
        while len(found) < most and draw(st.booleans()):
            other = draw(st.sampled_from([dtype, dtype, torch.uint8, torch.int16]))
            found.append(draw(views(storage, dtype if dtype is torch.bool else other)))
        if not draw(st.booleans()):
            break
    return found


@st.composite
def special_tensors(draw: st.DrawFn, *, in_place: bool = False) -> torch.Tensor:
    """Sparse, meta, channels_last, computed, inference and array-backed tensors."""
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    kinds = ["coo", "uncoalesced", "hybrid", "csr", "csc", "bsr", "meta"]
    kinds += ["channels_last", "grad_fn", "scalar", "inference", "from numpy", "frombuffer"]
    kind = draw(st.sampled_from(kinds))
    if kind == "coo":
        return torch.randn(3, 4).relu().to_sparse().requires_grad_(draw(st.booleans()))
    if kind == "uncoalesced":
        indices = torch.tensor([[0, 1, 0], [2, 0, 2]])
        return torch.sparse_coo_tensor(indices, torch.randn(3, dtype=torch.complex64), (2, 3))
    if kind == "hybrid":
        return torch.nn.Parameter(torch.randn(3, 4, 2).to_sparse(1))
    if kind in ("csr", "csc", "bsr"):
        dense = torch.randn(4, 4, dtype=torch.float64).relu()
        dense[0, 0] = 1
        return (
            dense.to_sparse_bsr((2, 2)) if kind == "bsr" else getattr(dense, f"to_sparse_{kind}")()
        )
    if kind == "meta":
        tensor = torch.empty((2, 3), dtype=draw(st.sampled_from(STRIDED_DTYPES)), device="meta")
        return (
            torch.nn.Parameter(tensor, requires_grad=False) if draw(st.booleans()) else tensor.t()
        )
    if kind == "channels_last":
        return torch.randn(2, 3, 4, 2).to(memory_format=torch.channels_last)
    if kind == "grad_fn":
        return torch.randn(3, requires_grad=True) * 2
    if kind == "scalar":
        return torch.tensor(draw(st.floats(width=32)))
    if kind == "inference":
        with torch.inference_mode():
            return torch.randn(3, 2)
    if kind == "from numpy":
        return torch.from_numpy(np.arange(12, dtype=np.int32).reshape(3, 4)[1:, ::2])
    data = bytearray(range(1, 30))
    return torch.frombuffer(data, dtype=torch.float32, offset=draw(st.integers(0, 3)), count=5)


_SPECIAL = {
    in_place: st.lists(special_tensors(in_place=in_place), max_size=3) for in_place in (True, False)
}


# Arrays.


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    array = np.zeros(shape, dtype)
    _fill(array, draw(st.integers(0, 1 << 16)))
    layout = draw(st.sampled_from(["C", "F", "negative", "step", "read-only"]))
    if layout == "F":
        array = np.asfortranarray(array) if array.ndim else array
    elif layout == "negative" and array.ndim:
        array = array[..., ::-1]
    elif layout == "step" and array.ndim:
        array = array[::2]
    elif layout == "read-only":
        array.flags.writeable = False
    return array


def _fill(array: np.ndarray[Any, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    if array.dtype.names is not None:
        for place, name in enumerate(array.dtype.names):
            _fill(array[name], seed + place)
    elif array.dtype.kind == "b":
        array[...] = rng.integers(0, 2, array.shape)
    elif array.dtype.kind == "U":
        array[...] = "é"
    else:
        data = rng.integers(0, 256, array.nbytes, dtype=np.uint8).tobytes()
        array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)


def numpy_scalars() -> st.SearchStrategy[np.generic]:
    def pick(array: np.ndarray[Any, Any]) -> np.generic:
        return array.reshape(-1)[0]

    listed = [np.float64("nan"), np.float32(-0.0), np.int64(7), np.bool_(True), np.str_("né")]
    listed += [np.bytes_(b"ab"), np.datetime64("2024-01-01"), np.timedelta64(3, "s"), np.str_("")]
    listed += [np.longdouble(1) / 3, np.void(b"abc")]
    return st.one_of(
        st.sampled_from(listed),
        arrays().filter(lambda a: a.size and a.dtype.kind not in "SU").map(pick),
    )


_ARRAYS = st.lists(arrays(), min_size=1, max_size=2)


# Plain values and containers.


def floats() -> st.SearchStrategy[float]:
    patterns = st.integers(0, (1 << 64) - 1).map(
        lambda n: struct.unpack("<d", struct.pack("<Q", n))[0]
    )
    return st.one_of(st.floats(), patterns, st.sampled_from([-0.0, math.nan, math.inf]))


def texts() -> st.SearchStrategy[str]:
    lone = st.text(st.characters(categories=["Cs"]), min_size=1, max_size=2)
    return st.one_of(st.text(max_size=6), lone.map(lambda text: f"a{text}"))


def integers() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(), st.integers(-(1 << 65), 1 << 65), st.just(1 << 200))


def plain_values() -> st.SearchStrategy[object]:
    return st.one_of(
        st.none(),
        st.booleans(),
        integers(),
        floats(),
        st.builds(complex, floats(), floats()),
        texts(),
        st.binary(max_size=6),
        st.sampled_from(ALL_DTYPES),
        st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")]),
        st.lists(st.integers(0, 1 << 40), max_size=3).map(torch.Size),
        st.sampled_from([*Color, *Level]),
    )


def keys(*, nan: bool = True) -> st.SearchStrategy[object]:
    numbers = floats() if nan else floats().filter(lambda x: not math.isnan(x))
    plain = st.one_of(texts(), integers(), numbers, st.booleans(), st.none())
    return st.one_of(
        st.text("abc", min_size=1, max_size=3),
        plain,
        st.lists(plain, max_size=2).map(tuple),
        st.lists(plain, max_size=2).map(lambda items: (tuple(items), "deep")),
    )


def _containers(
    inner: st.SearchStrategy[object], key: st.SearchStrategy[object]
) -> st.SearchStrategy[object]:
    dicts = st.dictionaries(key, inner, max_size=4)
    factories = st.sampled_from([None, list, int, dict, set])
    return st.one_of(
        dicts,
        dicts.map(OrderedDict),
        st.builds(defaultdict, factories, dicts),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Moment, inner, inner),
        st.builds(Point, inner, inner),
    )


class _Slot(NamedTuple):
    """Stands for an object of the pool while the tree is drawn."""

    place: int


def _trees(*, nan: bool) -> st.SearchStrategy[object]:
    slots = st.builds(_Slot, st.integers(0, 15))
    leaves = st.one_of(slots, slots, numpy_scalars(), plain_values())
    key = keys(nan=nan)
    return st.recursive(leaves, lambda inner: _containers(inner, key), max_leaves=10)


_TREES = {nan: _trees(nan=nan) for nan in (True, False)}


@st.composite
def states(draw: st.DrawFn, *, in_place: bool = False) -> object:
    """A state. With `in_place`, one that a destination can be made for."""
    tensors = draw(plain_tensors()) + draw(_SPECIAL[in_place])
    pool: list[object] = [*tensors, *draw(_ARRAYS)]
    if not in_place:
        pool += [tensor.numpy() for tensor in tensors if _has_numpy(tensor)][:1]
    tree = _filled(draw(_TREES[not in_place]), pool)
    # Some of the pool is in the state whatever the tree turned out to be.
    return {"tree": tree, "pool": pool[: draw(st.integers(0, len(pool)))]}


def _filled(tree: Any, pool: list[object]) -> Any:
    if isinstance(tree, _Slot):
        return pool[tree.place % len(pool)]
    return _mapped(tree, lambda inner: _filled(inner, pool))


def _mapped(tree: Any, again: Callable[[Any], Any]) -> Any:
    """A container with `again` of each of its items; anything else as it is."""
    if isinstance(tree, defaultdict):
        return defaultdict(tree.default_factory, {key: again(v) for key, v in tree.items()})
    if isinstance(tree, dict):
        return type(tree)((key, again(value)) for key, value in tree.items())
    if isinstance(tree, Point):
        point = Point(again(tree.x), again(tree.y))
        point.hidden = again(tree.hidden)
        return point
    if isinstance(tree, Pair | Moment):
        return type(tree)(*map(again, tree))
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)(map(again, tree))
    return tree


def _has_numpy(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.dtype in (torch.float32, torch.uint8, torch.int16)
        and not (tensor.requires_grad or tensor.is_neg() or tensor.is_meta)
    )


# Comparison.


def assert_same(
    sent: object, got: object, *, in_place: bool = False, at_rest: bool = False
) -> None:
    """Fail unless `got` is `sent`, bit for bit.

    `in_place`: `got` was received into tensors of the receiver's own, so strides, sharing, conj
    and neg bits, `requires_grad` and being a parameter are the receiver's.
    `at_rest`: the state was kept as named tensors, so views of one storage that share no bytes
    have storages of their own.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    _compare(sent, got, "state", pairs, in_place)
    if in_place:
        return
    forward: dict[int, torch.Tensor] = {}
    backward: dict[int, torch.Tensor] = {}
    for mine, other in pairs:
        assert forward.setdefault(id(mine), other) is other, "tied tensors came apart"
        assert backward.setdefault(id(other), mine) is mine, "separate tensors became one"
    _compare_sharing(pairs, at_rest)


def _compare(
    sent: Any, got: Any, path: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], in_place: bool
) -> None:
    if not (in_place and isinstance(sent, torch.Tensor) and isinstance(got, torch.Tensor)):
        assert type(sent) is type(got), (path, type(sent), type(got))
    if isinstance(sent, torch.Tensor):
        pairs.append((sent, got))
        _compare_tensors(sent, got, path, in_place)
    elif isinstance(sent, dict):
        assert list(map(_plain_bits, sent)) == list(map(_plain_bits, got)), path
        if isinstance(sent, defaultdict):
            assert sent.default_factory is got.default_factory, path
        for key, mine, other in zip(sent, sent.values(), got.values(), strict=True):
            _compare(mine, other, f"{path}[{key!r}]", pairs, in_place)
    elif isinstance(sent, Point):
        for name in ("x", "y", "hidden"):
            _compare(getattr(sent, name), getattr(got, name), f"{path}.{name}", pairs, in_place)
    elif isinstance(sent, (list, tuple)) and not isinstance(sent, torch.Size):
        assert len(sent) == len(got), path
        for place, (mine, other) in enumerate(zip(sent, got, strict=True)):
            _compare(mine, other, f"{path}[{place}]", pairs, in_place)
    elif isinstance(sent, (np.ndarray, np.generic)):
        _compare_arrays(sent, got, path, in_place)
    else:
        assert _plain_bits(sent) == _plain_bits(got), (path, sent, got)


def _plain_bits(value: object) -> object:
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple, tuple(map(_plain_bits, value))
    if type(value) is float:
        return float, struct.pack("<d", value)
    if type(value) is complex:
        return complex, struct.pack("<dd", value.real, value.imag)
    return type(value), value


def _compare_arrays(sent: Any, got: Any, path: str, in_place: bool) -> None:
    mine, other = np.asarray(sent), np.asarray(got)
    assert mine.dtype == other.dtype, (path, mine.dtype, other.dtype)
    assert mine.dtype.byteorder == other.dtype.byteorder, path
    assert mine.shape == other.shape, path
    if mine.dtype.kind == "g" or mine.dtype == np.longdouble:
        assert np.array_equal(mine, other, equal_nan=True), path
    else:
        assert _array_bits(mine) == _array_bits(other), (path, sent, got)
    if isinstance(sent, np.ndarray) and not in_place:
        fortran = mine.flags.f_contiguous and not mine.flags.c_contiguous
        assert other.flags.f_contiguous if fortran else other.flags.c_contiguous, path
        assert other.flags.writeable, path


def _array_bits(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes in row-major order, without the padding of structured dtypes."""
    if array.dtype.names is not None:
        array = array.astype(repack_fields(array.dtype, recurse=True))
    return array.tobytes()


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as they lie in memory, in row-major order."""
    return raw_of(tensor.detach()).contiguous().numpy().tobytes()


def meant_bits(tensor: torch.Tensor) -> bytes:
    """Like `bits`, with conj and neg bits resolved, by signs alone: NaNs keep their payload."""
    if not _is_lazy(tensor):
        return bits(tensor)
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    signs = np.frombuffer(bits(tensor), f"<u{size}").copy()
    sign = signs.dtype.type(1 << (8 * size - 1))
    if tensor.is_neg():
        signs ^= sign
    if tensor.is_conj():
        signs[1::2] ^= sign
    return signs.tobytes()


def _compare_tensors(sent: torch.Tensor, got: torch.Tensor, path: str, in_place: bool) -> None:
    assert sent.dtype is got.dtype, path
    assert sent.shape == got.shape, path
    assert sent.layout is got.layout, path
    assert sent.is_meta == got.is_meta, path
    if not in_place:
        assert sent.requires_grad == got.requires_grad, path
        assert got.is_leaf, path
    if sent.layout is not torch.strided:
        if sent.layout is torch.sparse_coo:
            assert sent.is_coalesced() == got.is_coalesced(), path
        parts = zip(sparse_parts(sent.detach()), sparse_parts(got.detach()), strict=True)
        for mine, other in parts:
            _compare_tensors(mine, other, path, True)
        return
    if in_place:
        assert sent.is_meta or meant_bits(sent) == meant_bits(got), path
        return
    assert not (got.is_conj() or got.is_neg()), path
    assert sent.is_meta or meant_bits(sent) == meant_bits(got), path
    strides = torch.empty_like(sent, device="meta").stride() if _is_lazy(sent) else sent.stride()
    layout = packed(tuple(sent.shape), strides)
    if layout is None or layout.strides == strides:
        for size, mine, other in zip(sent.shape, strides, got.stride(), strict=True):
            assert size <= 1 or mine == other, (path, strides, got.stride())


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its values are not those in memory: it is sent as a tensor of its own."""
    return tensor.is_conj() or tensor.is_neg()


def _compare_sharing(pairs: list[tuple[torch.Tensor, torch.Tensor]], at_rest: bool) -> None:
    """Views of one storage still are, others are not, and no storage is larger than needed."""
    groups: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    held = [p for p in pairs if p[0].layout is torch.strided and p[0].numel() and not p[0].is_meta]
    lazy = [p for p in held if _is_lazy(p[0])]
    held = [p for p in held if not _is_lazy(p[0])]
    if at_rest:
        found = sharing_bytes([mine for mine, _ in held])
        groups = {n: [held[i] for i in group] for n, group in enumerate(found)}
    else:
        for mine, other in held:
            groups.setdefault(mine.untyped_storage().data_ptr(), []).append((mine, other))
    homes: set[int] = set()
    for mine, other in {id(pair[0]): pair for pair in lazy}.values():
        storage = other.untyped_storage()
        assert storage.data_ptr() not in homes, "a lazy view shares the memory of its values"
        homes.add(storage.data_ptr())
        assert storage.nbytes() <= mine.numel() * mine.element_size()
    for group in groups.values():
        storages = {other.untyped_storage().data_ptr() for _, other in group}
        assert len(storages) == 1, "views of one storage came apart"
        assert not storages & homes, "separate storages became one"
        homes |= storages
        nbytes = group[0][1].untyped_storage().nbytes()
        needed = _needed([mine for mine, _ in group])
        facts = [(x.shape, x.stride(), x.untyped_storage()) for pair in group for x in pair]
        assert nbytes <= needed, f"more memory is held than needed: {nbytes}, {needed}, {facts}"
        _compare_offsets(group)


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    low = tensor.data_ptr()
    return low, low + extent(tuple(tensor.shape), tensor.stride()) * tensor.element_size()


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """The addresses of all its bytes, one by one."""
    found = {tensor.data_ptr()}
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = {at + n * step * tensor.element_size() for at in found for n in range(size)}
    return {at + n for at in found for n in range(tensor.element_size())}


def sharing_bytes(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Groups of tensors that have bytes in common, found by comparing every two of them."""
    groups: list[tuple[set[int], list[int]]] = []
    for near in overlapping([_reach(tensor) for tensor in tensors]):
        for number in near:
            mine, members = bytes_of(tensors[number]) if len(near) > 1 else set(), [number]
            for group in [group for group in groups if group[0] & mine]:
                groups.remove(group)
                mine, members = mine | group[0], members + group[1]
            groups.append((mine, sorted(members)))
    return [members for _, members in groups]


def _needed(tensors: list[torch.Tensor]) -> int:
    if len({(x.data_ptr(), x.dtype, x.shape, x.stride()) for x in tensors}) == 1:
        layout = packed(tuple(tensors[0].shape), tensors[0].stride())
        if layout is not None:
            return layout.numel * tensors[0].element_size()
    spans = [_reach(tensor) for tensor in tensors]
    total = 0
    for group in overlapping(spans):
        low, high = min(spans[i][0] for i in group), max(spans[i][1] for i in group)
        total += high - low + 31 * len(group)
    return total


def _compare_offsets(group: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Views that overlap still see each other's bytes: write through one, look at the rest."""
    for mine, other in group:
        for third, fourth in group:
            low, high = _reach(mine)
            if third is mine or third.data_ptr() not in range(low, high):
                continue
            if not bytes_of(mine) & bytes_of(third):
                continue
            if len(mine.stride()) == len(third.stride()) and mine.stride() == other.stride():
                shift = third.data_ptr() - mine.data_ptr()
                if third.stride() == fourth.stride():
                    assert fourth.data_ptr() - other.data_ptr() == shift, "a view moved"


# Destinations.


class Guard(NamedTuple):
    """Memory around a destination: `check` fails if a byte outside the destination changed."""

    memory: np.ndarray[Any, Any]
    before: np.ndarray[Any, Any]
    touched: np.ndarray[Any, Any]

    def check(self) -> None:
        assert np.array_equal(self.memory[~self.touched], self.before[~self.touched])

    def unchanged(self) -> bool:
        return np.array_equal(self.memory, self.before)


@dataclass
class Destination:
    """An `into=` for a state, and the guards of its memory."""

    into: Any
    guards: list[Guard]

    def check(self) -> None:
        for guard in self.guards:
            guard.check()

    def unchanged(self) -> bool:
        """Whether nothing at all was written."""
        return all(guard.unchanged() for guard in self.guards)


@st.composite
def destinations(draw: st.DrawFn, state: object) -> Destination:
    """An `into=` with the paths of `state` and memory laid out otherwise."""
    guards: list[Guard] = []
    known: dict[int, torch.Tensor] = {}

    def tensor(sent: torch.Tensor) -> torch.Tensor:
        if id(sent) in known and draw(st.booleans()):
            return known[id(sent)]
        known[id(sent)] = draw(_tensor_destinations(sent, guards))
        return known[id(sent)]

    return Destination(
        _rebuilt(state, tensor, lambda a: draw(_array_destinations(a, guards))), guards
    )


def _rebuilt(
    state: Any,
    tensor: Callable[[torch.Tensor], torch.Tensor],
    array: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
) -> Any:
    if isinstance(state, torch.Tensor):
        return tensor(state)
    if isinstance(state, np.ndarray):
        return array(state)
    if isinstance(state, Point | dict | list | tuple) and not isinstance(state, torch.Size):
        return _mapped(state, lambda inner: _rebuilt(inner, tensor, array))
    if isinstance(state, Color):
        return Color.BLUE
    if isinstance(state, Level):
        return Level.LOW
    return 0 if isinstance(state, np.generic) else None


def _spaced(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
    """Offset and strides that do not overlap, with gaps, and how many elements they need."""
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = draw(st.integers(1, 3))
    for dim in order:
        strides[dim] = step
        step = step * max(shape[dim], 1) + draw(st.integers(0, 2))
    offset = draw(st.integers(0, 3))
    return offset, tuple(strides), offset + extent(shape, tuple(strides)) + draw(st.integers(0, 3))


@st.composite
def _tensor_destinations(draw: st.DrawFn, sent: torch.Tensor, guards: list[Guard]) -> torch.Tensor:
    if sent.is_meta:
        return torch.empty_like(sent, device="meta")
    if sent.layout is not torch.strided:
        twin = sent.detach().clone()
        sparse_parts(twin)[-1].zero_()
        return twin
    shape, dtype = tuple(sent.shape), sent.dtype
    kind = draw(st.sampled_from(["dense", "spaced", "spaced", "channels_last"]))
    if kind == "channels_last" and len(shape) == 4:
        return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    if kind == "spaced":
        offset, strides, numel = _spaced(draw, shape)
    else:
        offset, strides, numel = 0, torch.empty(shape, device="meta").stride(), math.prod(shape)
    size = dtype.itemsize
    memory = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, numel * size, np.uint8)
    touched = np.zeros(numel * size, dtype=np.bool_)
    if math.prod(shape):
        np.lib.stride_tricks.as_strided(
            touched[offset * size :], (*shape, size), (*(s * size for s in strides), 1)
        )[...] = True
    guards.append(Guard(memory, memory.copy(), touched))
    storage = torch.from_numpy(memory).untyped_storage()
    made = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
    if made.is_complex() and draw(st.booleans()):
        made = made.conj()
    if _may_require_grad(made) and draw(st.booleans()):
        made = torch.nn.Parameter(made, requires_grad=draw(st.booleans()))
    return made


@st.composite
def _array_destinations(
    draw: st.DrawFn, sent: np.ndarray[Any, Any], guards: list[Guard]
) -> np.ndarray[Any, Any]:
    offset, strides, numel = _spaced(draw, sent.shape)
    size = sent.itemsize
    memory = np.zeros(numel * size, dtype=np.uint8)
    touched = np.zeros(numel * size, dtype=np.bool_)
    made = np.ndarray(
        sent.shape, sent.dtype, memory, offset * size, tuple(s * size for s in strides)
    )
    if sent.size and size:
        np.ndarray(
            (*sent.shape, size),
            np.bool_,
            touched,
            offset * size,
            (*(s * size for s in strides), 1),
        )[...] = True
    guards.append(Guard(memory, memory.copy(), touched))
    return made[..., ::-1] if sent.ndim and draw(st.booleans()) else made


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a state, in order, with repetitions."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, Point):
        for value in vars(state).values():
            yield from tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)
