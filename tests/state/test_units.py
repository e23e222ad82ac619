"""The parts of `state/` one by one: geometry, cutting, values, containers, registry, refusals."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scaled import Scaled
from tests.support.states import (
    QUANTIZED,
    Color,
    Level,
    Moment,
    Pair,
    Point,
    assert_same,
    bits,
    geometries,
    keys,
    plain_values,
)
from tests.support.trips import chunk_of, trip
from torchrelay.describing.snapshot import capture
from torchrelay.errors import MismatchError, UnsupportedLeafError, UsageError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry import chunks as plan
from torchrelay.geometry.chunks import ALIGN, MAX_CHUNK_BYTES, aligned
from torchrelay.geometry.strides import (
    contiguous_strides,
    extent,
    linear_boxes,
    overlapping,
    packed,
)
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.record import manifest as m
from torchrelay.record.dtypes import dtype_from_text, dtype_to_text
from torchrelay.record.encoding import decode, encode
from torchrelay.record.values import decode_key, decode_value, encode_key, encode_value
from torchrelay.state.registry import codec_named, codec_of, register
from torchrelay.state.tree import flatten, show, slots, unflatten

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Geometry.


def _positions(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Where each element lies, in row-major order, by the definition of strides."""
    return [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@given(geometries(40))
def test_extent_is_the_last_element_reached(
    geometry: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> None:
    _, shape, strides = geometry
    assert extent(shape, strides) == max(_positions(shape, strides), default=-1) + 1


@given(geometries(40))
def test_packed_keeps_the_order_of_memory_and_leaves_no_gap(
    geometry: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> None:
    _, shape, strides = geometry
    layout = packed(shape, strides)
    here = _positions(shape, strides)
    if layout is None:
        return
    assert layout.numel == len(set(here))
    there = _positions(shape, layout.strides)
    assert set(there) == set(range(layout.numel))
    ranks = {position: rank for rank, position in enumerate(sorted(set(here)))}
    assert there == [ranks[position] for position in here]


@given(geometries(40))
def test_packed_is_none_only_where_elements_overlap_or_interleave(
    geometry: tuple[int, tuple[int, ...], tuple[int, ...]],
) -> None:
    _, shape, strides = geometry
    if packed(shape, strides) is None:
        dims = [d for d, size in enumerate(shape) if size > 1 and strides[d] > 0]
        dims.sort(key=lambda d: strides[d])
        assert any(
            1 + sum((shape[e] - 1) * strides[e] for e in dims[:place]) > strides[d]
            for place, d in enumerate(dims)
        )


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_linear_boxes_tile_a_range(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    array = np.arange(total).reshape(shape)
    found = []
    for at, box in linear_boxes(shape, start, stop):
        values = array[box].reshape(-1)
        assert values[0] == at
        found += list(values)
    assert found == list(range(start, stop))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8))
def test_overlapping_groups(intervals: list[tuple[int, int]]) -> None:
    spans = [(low, low + length) for low, length in intervals]
    groups = list(overlapping(spans))
    assert sorted(i for group in groups for i in group) == list(range(len(spans)))
    reach = [set().union(*(range(*spans[i]) for i in group)) for group in groups]
    for one, other in itertools.combinations(reach, 2):
        assert not one & other
    for covered in reach:
        assert covered == set(range(min(covered), max(covered) + 1))


def test_contiguous_strides_are_those_of_torch() -> None:
    for shape in [(), (3,), (2, 3, 4), (2, 0, 4), (1, 1), (0,)]:
        assert contiguous_strides(shape) == torch.empty(shape).stride()


# Cutting.


@given(st.lists(st.integers(1, 400), max_size=12), st.integers(1, 200), st.integers(1, 500))
def test_chunks_hold_every_byte_once(sizes: list[int], chunk_bytes: int, small: int) -> None:
    cut = plan.cut(sizes, chunk_bytes, small_bytes=small)
    chunks = plan.Chunks(sizes, cut)
    assert sum(cut) == chunks.stream_bytes == sum(map(aligned, sizes))
    assert all(0 < size <= aligned(chunk_bytes) and size % ALIGN == 0 for size in cut)
    ends = list(itertools.accumulate(cut))
    assert chunks.offsets == [end - size for end, size in zip(ends, cut, strict=True)]
    held = [0] * len(cut)
    for image, size in enumerate(sizes):
        start = chunks.start_of(image)
        assert start == sum(map(aligned, sizes[:image])) and chunks.size_of(image) == size
        for byte in range(start, start + size):
            held[bisect.bisect_right(ends, byte)] += 1
    assert chunks.inside.tolist() == held


def test_a_large_storage_has_chunks_of_its_own() -> None:
    sizes = [10, 20, 1000, 30]
    chunks = plan.Chunks(sizes, plan.cut(sizes, 256, small_bytes=500))
    assert chunks.sizes == (48, 256, 256, 256, 240, 32)
    assert list(map(chunks.start_of, range(4))) == [0, 16, 48, 1056]


@given(st.integers(0, 1 << 42), st.integers(1, 64))
def test_chunk_size_is_in_bounds(stream: int, receivers: int) -> None:
    size = plan.chunk_size(stream, receivers)
    assert plan.MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES
    assert size % ALIGN == 0


@given(st.integers(1 << 30, 1 << 42), st.integers(2, 8))
def test_the_end_of_a_chain_is_little_behind(stream: int, receivers: int) -> None:
    size = plan.chunk_size(stream, receivers)
    assert size * (receivers - 1) <= stream / 64 + receivers * ALIGN
    assert size <= 16 * plan.MIB


def test_digest_is_of_the_bytes() -> None:
    chunk = torch.arange(64, dtype=torch.uint8)
    assert len(digest_of(chunk)) == DIGEST_BYTES
    assert digest_of(chunk) == digest_of(chunk.clone())
    changed = chunk.clone()
    changed[63] ^= 1
    assert digest_of(changed) != digest_of(chunk)
    assert digest_of(chunk[16:32]) == digest_of(chunk[16:32].clone())


def cut_one_by_one(sizes: list[int], chunk_bytes: int, small_bytes: int) -> tuple[int, ...]:
    chunk_bytes = aligned(chunk_bytes)
    chunks: list[int] = []
    bucket = 0
    for exact in sizes:
        size = aligned(exact)
        own = exact >= small_bytes or size > chunk_bytes
        if bucket and (own or bucket + size > chunk_bytes):
            chunks.append(bucket)
            bucket = 0
        if own:
            chunks += [chunk_bytes] * (size // chunk_bytes) + [size % chunk_bytes]
        else:
            bucket += size
    return tuple(size for size in (*chunks, bucket) if size)


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(1, 200), st.integers(1, 500))
def test_a_stream_is_cut_as_if_image_by_image(sizes: list[int], chunk: int, small: int) -> None:
    assert plan.cut(sizes, chunk, small_bytes=small) == cut_one_by_one(sizes, chunk, small)


# Values and keys.


def _plain(value: object) -> bool:
    return type(value) in (type(None), bool, int, float, complex, str, bytes)


@given(plain_values().filter(_plain))
def test_values_keep_their_bits(value: object) -> None:
    assert_same(value, decode_value(encode_value(value)))


@given(keys())
def test_keys_keep_their_bits(key: object) -> None:
    assert_same(key, decode_key(encode_key(key)))


@pytest.mark.parametrize(
    "value",
    [
        np.float64(1),
        np.str_("a"),
        np.int64(1),
        Level.LOW,
        Color.RED,
        bytearray(b"a"),
        {1},
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_no_values(value: object) -> None:
    with pytest.raises(TypeError):
        encode_value(value)
    with pytest.raises(TypeError):
        encode_key(value)


def test_keys_that_are_no_keys() -> None:
    for key in (b"a", 1j, frozenset(), Pair(1, 2), torch.Size([1]), (1, b"a")):
        with pytest.raises(UnsupportedLeafError) as caught:
            capture({"outer": {key: 1}})
        assert caught.value.path == "['outer']"


def test_keys_that_look_alike_stay_what_they_are() -> None:
    for key in (True, 1, 1.0, -0.0, 0.0, 0, False, "1", None, (1, True), (1.0, None), 1 << 80):
        assert_same({key: 1}, trip({key: 1}).state)


def test_float_bits() -> None:
    for pattern in (0x7FF0000000000001, 0xFFF8DEADBEEF0001, 1 << 63, 1):
        value = struct.unpack("<d", struct.pack("<Q", pattern))[0]
        got = trip({"x": value, "y": complex(value, -0.0)}).state
        assert_same({"x": value, "y": complex(value, -0.0)}, got)


# numpy dtypes.


def test_numpy_dtypes_that_cannot_travel() -> None:
    overlapping_fields = np.dtype(
        {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]}
    )
    for dtype in (np.dtype(object), np.dtype([("a", object)]), overlapping_fields):
        with pytest.raises(UnsupportedLeafError) as caught:
            capture({"a": [np.zeros(2, dtype)]})
        assert caught.value.path == "['a'][0]"


@pytest.mark.parametrize(
    "text",
    [
        *('"O"', '[["a", "O"]]', "{}", "[]]", "1", '"float"x', "null", '[["a"]]', "[[1, 2]]"),
        *('[["a", "<f4", "b"]]', '"x,y"', "[[]]", '[["a", "<f4", [-1]]]', '"<f9"', "[1]"),
        *('"1000000000000f8"', '"f4,f4"', '"(2,3)f4"', '"float32"', '"builtins.float"'),
        *('{"names": ["a"], "formats": ["<f4"]}', '[["a", {"names": [], "formats": []}]]'),
        "[" * 5000,
    ],
)
def test_texts_that_are_no_dtype(text: str) -> None:
    with pytest.raises(ValueError):
        dtype_from_text(text)


def test_dtype_texts() -> None:
    for dtype in ("<f8", ">i2", "S0", "<U7", "V3", "<M8[25s]", "?"):
        assert dtype_from_text(dtype_to_text(np.dtype(dtype))) == np.dtype(dtype)


@pytest.mark.parametrize("kind", [np.matrix, np.recarray], ids=lambda kind: kind.__name__)
def test_array_subclasses_are_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        capture({"a": np.zeros((2, 2)).view(kind)})
    assert caught.value.path == "['a']"


def test_numpy_strings_that_numpy_itself_would_cut_are_refused() -> None:
    for value in (np.str_("a\0"), np.bytes_(b"a\0")):
        with pytest.raises(UnsupportedLeafError):
            capture([value])


# Containers.


def test_containers_keep_kind_and_order() -> None:
    state = {
        "z": OrderedDict([("b", 1), ("a", 2)]),
        "a": defaultdict(list, {"k": [1]}),
        "n": Pair(1, Moment((), [])),
        "p": Point(torch.zeros(2), {"deep": Color.RED}),
        "l": Level.HIGH,
        "s": torch.Size([2, 3]),
        "t": (torch.Size([]), ()),
    }
    got = trip(state).state
    assert_same(state, got)
    got["a"]["new"].append(1)
    assert got["a"]["new"] == [1]


def test_a_namedtuple_class_that_is_not_here_is_made() -> None:
    def local() -> tuple[object, ...]:
        return namedtuple("Elsewhere", ["x", "class", "y"], rename=True)(1, torch.ones(2), 3)

    tree: Any = capture(local()).record.outlines[0].tree
    changed = m.NamedTupleNode("Abroad", tree.fields, tree.items, "abroad")
    got = unflatten(changed, [1, 2, 3])
    assert type(got).__name__ == "Abroad"
    assert type(got)._fields == ("x", "_1", "y")


@given(st.lists(st.integers(0, 200), min_size=60, max_size=140), st.booleans())
def test_many_tensors_are_found_once_each(picks: list[int], more: bool) -> None:
    pool = [torch.ones(1) for _ in range(201)]
    state = {
        "list": [pool[n] for n in picks],
        "one": pool[picks[0]],
        "dict": {str(n): pool[n] for n in range(0, 201, 2 if more else 40)},
        "last": [pool[picks[-1]], 3],
    }
    tree, leaves = flatten(state)
    assert len({id(leaf) for leaf in leaves}) == len(leaves)
    assert isinstance(tree, m.DictNode)
    there = [node for node in tree.items if isinstance(node, (m.DictNode, m.SequenceNode))]
    assert [leaves[n] for n in there[0].items] == state["list"]  # type: ignore[index]
    assert leaves[tree.items[1]] is state["one"]  # type: ignore[index]
    assert [leaves[n] for n in there[1].items] == list(state["dict"].values())  # type: ignore
    assert leaves[there[2].items[0]] is pool[picks[-1]]  # type: ignore[index]


def test_paths() -> None:
    flat = flatten({"a": [1, {2: 3}], ("k", 1): Pair(4, 5)})
    assert [show(path) for path, _ in slots(flat.tree)] == [
        "['a'][0]",
        "['a'][1][2]",
        "[('k', 1)]['left']",
        "[('k', 1)]['right']",
    ]
    assert show(()) == "the state itself"


class _Plain:
    pass


class _Text(str):
    pass


class _Loose(enum.Enum):
    A = 1


class _Ranked(enum.IntEnum):
    A = 1


class _Dict(dict):
    pass


class _List(list):
    pass


class _SubPair(Pair):
    pass


@dataclasses.dataclass
class _Unregistered:
    x: int


class _Opaque(torch.Tensor):
    pass


def _functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.ones(2))


@pytest.mark.parametrize(
    "leaf",
    [
        {1, object()},
        frozenset({_Loose.A}),
        object(),
        lambda: 0,
        _Plain(),
        _Plain,
        _Text("a"),
        _Loose.A,
        _Ranked.A,
        _Dict(),
        _List(),
        _SubPair(1, 2),
        _Unregistered(1),
        bytearray(b"a"),
        slice(object()),
        np.array([None]),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        torch.ones(2).as_subclass(_Opaque),
        _functional(),
        defaultdict(lambda: 0),
        torch.Generator(),
        torch.nn.Linear(1, 1),
        torch.float32.to_complex,
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_cannot_travel_is_named(leaf: object) -> None:
    for state in ({"model": [torch.ones(3), {"bad": leaf}]},):
        with pytest.raises(UnsupportedLeafError) as caught:
            capture(state)
        assert caught.value.path == "['model'][1]['bad']"
        assert "['model'][1]['bad']" in str(caught.value)


def test_a_list_in_itself() -> None:
    loop: list[object] = [1]
    loop.append(loop)
    with pytest.raises(UnsupportedLeafError, match="nested deeper than"):
        capture({"a": loop})
    table: dict[str, object] = {}
    table["x"] = table
    with pytest.raises(UnsupportedLeafError, match="nested deeper than"):
        capture(table)


def test_depth_up_to_the_cap_travels() -> None:
    state: object = 1
    for _ in range(m.MAX_DEPTH):
        state = [state]
    assert trip(state).state == state
    with pytest.raises(UnsupportedLeafError):
        capture([state])


def test_a_transformed_tensor_is_refused() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedLeafError):
            capture([x])
        return x

    torch.vmap(inner)(torch.ones(2, 3))


# Registration.


def test_registering() -> None:
    @register
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        x: Any
        derived: int = dataclasses.field(default=0, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "derived", 99)

    value = Frozen(torch.ones(2))
    object.__setattr__(value, "derived", 5)
    got = trip([value]).state[0]
    assert type(got) is Frozen and got.derived == 5

    register(_Plain, name="plain", encode=lambda value: [1, 2], decode=tuple)
    try:
        assert trip({"a": _Plain()}).state == {"a": (1, 2)}
        with pytest.raises(UsageError, match="another type"):
            register(_Loose, name="plain")
    finally:
        _forget(_Plain)
    with pytest.raises(UsageError, match="not a dataclass or enum"):
        register(_Text)
    with pytest.raises(UsageError, match="go together"):
        register(_Text, encode=str)


def _forget(type_: type) -> None:
    from torchrelay.state import registry

    known = registry._by_type.pop(type_)
    registry._by_name.pop(known.name)


def test_a_type_not_registered_at_the_receiver() -> None:
    register(_Unregistered)
    snapshot = capture({"a": [_Unregistered(3)]})
    _forget(_Unregistered)
    assert codec_of(_Unregistered) is None and codec_named("_Unregistered") is None
    with pytest.raises(UnsupportedLeafError, match="not registered here") as caught:
        land(decode(snapshot.encoded()))
    assert caught.value.path == "['a'][0]"


def test_a_decoder_that_fails_is_reported() -> None:
    register(_Plain, encode=lambda value: 1, decode=lambda value: 1 // 0)
    try:
        with pytest.raises(UnsupportedLeafError, match="cannot be rebuilt"):
            trip([_Plain()])
    finally:
        _forget(_Plain)


# Tensor subclasses.


class _NotRegistered(Scaled):
    pass


def test_a_subclass_that_flattens_itself() -> None:
    inner = torch.randn(3, 4)
    state = {"w": Scaled(inner.t(), 0.5), "tied": inner, "p": Scaled(torch.ones(2), (1, "a"))}
    got = trip(state, chunk_bytes=16).state
    assert type(got["w"]) is Scaled and got["w"].scale == 0.5 and got["p"].scale == (1, "a")
    assert torch.equal(got["w"].inner, inner.t())
    assert got["w"].inner.data_ptr() == got["tied"].data_ptr()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_subclass_in_place(atomic: bool) -> None:
    state = {"w": Scaled(torch.randn(3, 4), 0.5)}
    into = {"w": Scaled(torch.zeros(4, 3).t(), 0.5)}
    kept = into["w"]
    got = trip(state, into=into, atomic=atomic).state
    assert got["w"] is kept and torch.equal(kept.inner, state["w"].inner)


def test_subclass_mismatches() -> None:
    state = {"w": Scaled(torch.randn(3), 0.5)}
    for other, what in [
        (Scaled(torch.zeros(3), 0.25), "context"),
        (Scaled(torch.zeros(3, dtype=torch.float64), 0.5), "dtype"),
        (Scaled(torch.zeros(4), 0.5), "shape"),
        (torch.zeros(3), "type"),
        (_NotRegistered(torch.zeros(3), 0.5), "type"),
    ]:
        with pytest.raises(MismatchError, match=what) as caught:
            trip(state, into={"w": other})
        assert caught.value.path == "['w']"
    with pytest.raises(MismatchError, match="kind") as caught:
        trip({"w": torch.zeros(3)}, into=state)
    assert caught.value.path == "['w']"


def test_a_subclass_that_is_not_registered_here() -> None:
    record = capture({"w": _NotRegistered(torch.zeros(3), 1)}).record
    with pytest.raises(UnsupportedLeafError, match="not registered here") as caught:
        land(record)
    assert caught.value.path == "['w']"


# Destinations that do not fit.


def _coo(nnz: int = 2) -> torch.Tensor:
    where = torch.arange(nnz).expand(2, nnz)
    return torch.sparse_coo_tensor(where, torch.ones(nnz), (3, 3), is_coalesced=True)


@pytest.mark.parametrize(
    ("offered", "have", "what"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtype"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "shape"),
        (torch.zeros(2, 3), torch.zeros(6), "shape"),
        (torch.zeros(2), torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, device="meta"), torch.zeros(2), "meta"),
        (torch.zeros(3, 3), _coo(), "kind"),
        (_coo(), torch.zeros(3, 3), "layout"),
        (_coo(), _coo(3), "specified elements"),
        (_coo(), torch.eye(3).to_sparse_csr(), "layout"),
        (_coo(), torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (3, 3)), "coalesced"),
        (torch.zeros(2), None, "kind"),
        (torch.zeros(2), 1.0, "kind"),
        (torch.zeros(2), np.zeros(2, np.float32), "kind"),
        (1.0, torch.zeros(2), "kind"),
        ("a", np.zeros(1), "kind"),
        (np.zeros(2), torch.zeros(2, dtype=torch.float64), "kind"),
        (np.zeros(2), [0.0], "paths"),
        (np.zeros(2), np.zeros(2, np.float32), "dtype"),
        (np.zeros(2), np.zeros(2, ">f8"), "dtype"),
        (np.zeros(2), np.zeros((2, 1)), "shape"),
        (np.zeros(2), np.broadcast_to(np.zeros(1), 2), "read-only"),
        (np.float32(1), np.zeros(()), "numpy"),
        (torch.zeros(2, 3), torch.zeros(3).expand(2, 3), "shares memory"),
        (torch.zeros(4, 3), torch.zeros(6).unfold(0, 3, 1), "shares memory"),
        ({"a": 1}, {"b": 1}, "paths differ"),
        ([1, 2], [1], "paths differ"),
    ],
)
@pytest.mark.parametrize("atomic", [True, False])
def test_what_does_not_fit_is_named(offered: Any, have: Any, what: str, atomic: bool) -> None:
    into = {"ok": torch.zeros(2), "x": [have]}
    with pytest.raises(MismatchError, match=what) as caught:
        trip({"ok": torch.ones(2), "x": [offered]}, into=into, atomic=atomic)
    assert caught.value.path is not None and caught.value.path.startswith("['x'][0]")
    assert torch.equal(into["ok"], torch.zeros(2))


def _quantized(dtype: torch.dtype, *, by_channel: bool) -> torch.Tensor:
    tensor = torch.ones(2, 4)
    if not by_channel:
        return torch.quantize_per_tensor(tensor, 0.1, 0, dtype)
    return torch.quantize_per_channel(tensor, torch.ones(2), torch.zeros(2), 0, dtype)


@pytest.mark.parametrize(
    ("dtype", "by_channel"),
    # torch makes none of qint32 with a scale for each channel
    [
        (dtype, by)
        for dtype in QUANTIZED
        for by in (False, True)
        if (dtype, by) != (torch.qint32, 1)
    ],
    ids=str,
)
def test_quantized_tensors_are_refused_on_both_sides(dtype: torch.dtype, by_channel: bool) -> None:
    quantized = _quantized(dtype, by_channel=by_channel)
    for state in ({"q": [quantized]}, {"q": [torch.nn.Parameter(quantized, requires_grad=False)]}):
        with pytest.raises(UnsupportedLeafError, match=r"int_repr\(\) and its scales") as caught:
            capture(state)
        assert caught.value.path == "['q'][0]"
        with pytest.raises(UnsupportedLeafError, match="dequantize") as caught:
            trip({"a": torch.ones(2), "q": [torch.ones(2, 4)]}, into={"a": torch.zeros(2), **state})
        assert caught.value.path == "['q'][0]"


def test_the_dtypes_of_quantized_tensors_are_values() -> None:
    state = {"dtypes": [*QUANTIZED, torch.float32]}
    assert trip(state).state == state


def test_strict_names_both_sides() -> None:
    state = {"a": torch.ones(1), "b": {"c": 1, "d": 2}}
    into = {"a": torch.zeros(1), "b": {"c": 0}, "e": [3]}
    with pytest.raises(MismatchError) as caught:
        trip(state, into=into)
    assert "['b']['d']" in str(caught.value) and "['e'][0]" in str(caught.value)
    assert into["a"] == 0
    landed = trip(state, into=into, strict=False)
    assert landed.missing == ["['b']['d']"] and landed.extra == ["['e'][0]"]
    assert landed.state is into
    assert into == {"a": torch.ones(1), "b": {"c": 1}, "e": [3]}


def test_not_strict_with_lists_of_other_lengths() -> None:
    into = [0, 0, 0]
    assert trip([1, 2], into=into, strict=False).extra == ["[2]"]
    assert into == [1, 2, 0]
    assert trip([3, 4, 5, 6], into=into, strict=False).missing == ["[3]"]
    assert into == [3, 4, 5]


def test_values_go_to_their_own_path_in_other_containers() -> None:
    state = {1: "one", 0: "zero"}
    assert trip(state, into=["", ""], strict=False).state == ["zero", "one"]
    assert trip({"right": 2, "left": 1}, into=Pair(0, 0), strict=False).state == Pair(1, 2)


def test_values_in_tuples_are_replaced_and_tensors_kept() -> None:
    weight = torch.zeros(2)
    inner = {"n": 0}
    into = (weight, 0, Pair(inner, [0]), Point(0, weight))
    new = torch.ones(2)
    got: Any = trip((new, 5, Pair({"n": 6}, [7]), Point(8, new)), into=into).state
    assert got[0] is weight and got[1] == 5
    assert got[2].left is inner and inner == {"n": 6} and got[2].right == [7]
    assert got[3].x == 8 and got[3].y is weight
    assert torch.equal(weight, torch.ones(2))


# Ties.


@pytest.mark.parametrize("atomic", [True, False])
def test_tied_here_but_not_there_is_refused(atomic: bool) -> None:
    shared = torch.zeros(4)
    for one, other in [
        (shared, shared),
        (shared[:3], shared[1:]),
        (shared, shared.view(2, 2)),
        (shared[:2], shared[:2].view(torch.int32)),
    ]:
        into = {"a": one, "b": other}
        offered = {"a": torch.ones_like(one), "b": torch.full_like(other, 2)}
        with pytest.raises(MismatchError, match="shares memory") as caught:
            trip(offered, into=into, atomic=atomic)
        assert caught.value.path in ("['a']", "['b']")
        assert shared.count_nonzero() == 0


def test_arrays_tied_here_but_not_there_are_refused() -> None:
    shared = np.zeros(6, np.float32)
    for one, other in [
        (shared, shared[::-1]),
        (shared[:4], shared[2:]),
        (shared, torch.from_numpy(shared)),
    ]:
        with pytest.raises(MismatchError, match="shares memory"):
            trip(
                {"a": np.ones(len(one), np.float32), "b": _like(other)}, into={"a": one, "b": other}
            )
        assert not shared.any()
    trip(
        {"a": np.ones(3, "f4"), "b": np.full(3, 2, "f4")},
        into={"a": shared[::2], "b": shared[1::2]},
    )
    assert list(shared) == [1, 2, 1, 2, 1, 2]


def _like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 2)
    return np.full(value.shape, 2, value.dtype)


@pytest.mark.parametrize("atomic", [True, False])
def test_tied_there_but_not_here_fills_both(atomic: bool) -> None:
    weight = torch.randn(3, 4)
    state = {"a": weight, "b": weight, "c": weight.t(), "d": weight[1:, ::2]}
    into = {key: torch.zeros(value.shape) for key, value in state.items()}
    trip(state, into=into, atomic=atomic, chunk_bytes=16)
    for key, value in state.items():
        assert bits(value) == bits(into[key])


@pytest.mark.parametrize("atomic", [True, False])
def test_ties_in_other_memory_are_still_ties(atomic: bool) -> None:
    """The same views on both sides, but the receiver's memory has gaps."""
    weight = torch.randn(4, 4)
    frame = torch.zeros(6, 8)
    mine = frame[1:5, 2:6]
    state = {"w": weight, "t": weight.t(), "row": weight[1], "part": weight[::2, 1:]}
    into = {"w": mine, "t": mine.t(), "row": mine[1], "part": mine[::2, 1:]}
    trip(state, into=into, atomic=atomic, chunk_bytes=16)
    assert torch.equal(mine, weight)
    assert frame.count_nonzero() == 16
    into["part"] = mine[1::2, 1:]
    with pytest.raises(MismatchError, match="shares memory"):
        trip(state, into=into, atomic=atomic)


@pytest.mark.parametrize("atomic", [True, False])
def test_interleaved_destinations_are_no_ties(atomic: bool) -> None:
    frame = torch.zeros(4, 6)
    state = {"a": torch.randn(4, 3), "b": torch.randn(4, 3)}
    trip(state, into={"a": frame[:, ::2], "b": frame[:, 1::2]}, atomic=atomic, chunk_bytes=16)
    assert torch.equal(frame[:, ::2], state["a"]) and torch.equal(frame[:, 1::2], state["b"])


def test_an_expanded_destination_takes_an_expanded_tensor() -> None:
    row = torch.randn(3)
    into = torch.zeros(3)
    trip({"x": row.expand(2, 3)}, into={"x": into.expand(2, 3)})
    assert torch.equal(into, row)


# What comes from outside.


def test_bytes_that_do_not_make_a_sparse_tensor_are_refused() -> None:
    """Indices that point out of the tensor would be read and written by later operations."""
    snapshot = capture({"s": _coo()})
    for into in (None, {"s": _coo()}):
        for atomic in (True, False):
            landing = land(snapshot.record, into, LandingOptions(atomic=atomic))
            for index in range(len(snapshot.chunks)):
                landing.target().write(index, torch.full_like(chunk_of(snapshot, index), 0x77))
            with pytest.raises(UnsupportedLeafError) as caught:
                landing.commit()
            assert caught.value.path == "['s']"
            assert into is None or torch.equal(into["s"].to_dense(), _coo().to_dense())


def test_an_empty_tensor_of_a_device_that_is_not_here_is_made_on_the_host() -> None:
    record = capture({"e": torch.empty(0, 3), "x": torch.ones(2)}).record
    kinds = [record.image_kinds[kind].shape for kind in record.image_kind.tolist()]
    on = np.array([shape == (0, 3) for shape in kinds], np.int64)
    offered = msgspec.structs.replace(record, devices=("cpu", "cuda"), device_of=on)
    landing = land(decode(encode(offered)))
    landing.target().write(0, torch.zeros(16, dtype=torch.uint8))
    state: Any = landing.commit().state
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert state["e"].device.type == wanted and state["e"].shape == (0, 3)
