"""A stock peer's record is read in full; a hostile one runs nothing, ends soon and is refused."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import io
import os
import pickle
import random
import struct
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.checkpoint._pg_transport import (
    _prepare_state_dict,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten_with_path, tree_structure, tree_unflatten

from tests.support.rounds import rounds
from torchrelay.dropin._pickles import distributed
from torchrelay.dropin._pickles.state_record import loads
from torchrelay.dropin._pickles.unpickler import PickleRefusedError
from torchrelay.errors import RemoteProtocolError

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

CPU = torch.device("cpu")
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


class Point(NamedTuple):
    x: Any
    y: Any


class Armed(NamedTuple("Armed", [("x", Any)])):
    """A namedtuple with a constructor of its own."""

    def __new__(cls, x: Any) -> Armed:
        Path(str(x)).touch()
        return super().__new__(cls, x)


def stock(state: object) -> bytes:
    return pickle.dumps(_prepare_state_dict(state, CPU)[0])


def record_of(*leaves: object, protocol: int | None = None) -> bytes:
    """A well-formed record of a list, of these leaves as they are."""
    paths = [path for path, _ in tree_flatten_with_path([0] * len(leaves))[0]]
    record = _StateDictMeta(tree_structure([0] * len(leaves)), paths, list(leaves))
    return pickle.dumps(record, protocol)


def record_with(**changes: Any) -> bytes:
    meta = _TensorMeta(torch.Size([2, 3]), torch.float32, 0, (3, 1), 24)
    return record_of(dataclasses.replace(meta, **changes))


def assert_refused(data: bytes, match: str | None = None) -> None:
    start = time.process_time()
    with pytest.raises(RemoteProtocolError, match=match):
        loads(data)
    assert time.process_time() - start < 5


def assert_same(data: bytes) -> _StateDictMeta:
    ours, theirs = loads(data), pickle.loads(data)
    assert type(ours) is _StateDictMeta
    assert ours.treespec == theirs.treespec
    assert ours.paths == theirs.paths
    assert list(map(type, ours.non_tensor_leaves)) == list(map(type, theirs.non_tensor_leaves))
    assert ours.non_tensor_leaves == theirs.non_tensor_leaves
    return ours


# What stock senders send -----------------------------------------------------------------------


def test_keys_of_any_number() -> None:
    table = {n * 1_000_003 - 7: n for n in range(5_000)}
    pairs = {(n % 71 - 35, n // 71 - 35): n for n in range(3_000)}
    assert_same(stock({"table": table, "pairs": pairs}))


def test_attack_keys_that_collide() -> None:
    modulus = sys.hash_info.modulus
    lists: list[list[Any]] = [
        [n * modulus for n in range(9, 2_000)],
        [*product((-1, -2), repeat=11)],
    ]
    for keys in lists:
        assert_refused(stock(dict.fromkeys(keys)), "collide")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_every_dtype(dtype: torch.dtype) -> None:
    assert_same(stock({"t": torch.empty(4, dtype=dtype), "d": dtype}))


@pytest.mark.parametrize(
    "state",
    [
        {"b": torch.ones(2), "a": [torch.ones(3), (torch.ones(1), 4)], 3: {}, (1, "x"): None},
        [],
        torch.ones(3),
        7,
        collections.OrderedDict(z=torch.ones(2), a=1),
        collections.defaultdict(list, a=torch.ones(2)),
        collections.defaultdict(dict, {0: {"step": torch.ones(())}}),
        collections.defaultdict(None, a=1),
        collections.deque([torch.ones(2), 2], maxlen=5),
        collections.deque([1]),
        Point(torch.ones(2), {"deep": Point(1, 2)}),
        {1.5: 1, True: 2, None: 3, b"k": 4, float("inf"): 5},
        {"x" * 300: "y" * 70000, "e": "é\ud800"},
        [torch.zeros(3, 4).t(), torch.zeros(3, 4)[:, 1:], torch.zeros(1).expand(5), torch.ones(0)],
    ],
    ids=str,
)
def test_every_container(state: object) -> None:
    record = assert_same(stock(state))
    rebuilt = tree_unflatten(record.non_tensor_leaves, record.treespec)
    assert type(rebuilt) is type(state) or isinstance(state, torch.Tensor)


@pytest.mark.parametrize(
    "leaf",
    [
        *(None, True, False, 0, 255, 65536, -1, 1 << 31, -(1 << 200), 1 << 3000, 0.0, -0.0, 1e300),
        *("", "s", b"", b"b" * 300, bytearray(b""), bytearray(b"x"), 1 + 2j),
        *(torch.float8_e4m3fn, CPU, torch.device("cuda", 3), torch.Size([]), torch.Size([1, 2])),
    ],
    ids=repr,
)
@pytest.mark.parametrize("protocol", [4, 5])
def test_every_plain_leaf(leaf: object, protocol: int) -> None:
    assert_same(pickle.dumps(pickle.loads(record_of(leaf)), protocol))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        np.zeros((0, 3), np.uint32),
        np.array(5, np.complex128),
        np.array([True, False]),
        np.random.RandomState(1).get_state()[1],
        np.float32(1.5),
        np.int64(-7),
        np.bool_(True),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
@pytest.mark.parametrize("protocol", [4, 5])
def test_arrays_and_scalars_of_numpy(array: Any, protocol: int) -> None:
    (got,) = loads(record_of(array, protocol=protocol)).non_tensor_leaves
    assert type(got) is type(array) and got.dtype == array.dtype
    assert np.array_equal(got, array) and (got.strides == array.strides or not got.size)
    assert not isinstance(got, np.ndarray) or got.flags.writeable


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_array_with_turned_axes(protocol: int) -> None:
    array = np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2)
    (got,) = loads(record_of(array, protocol=protocol)).non_tensor_leaves
    assert got.shape == array.shape and np.array_equal(got, array) and got.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.array(["text"]), np.array([object()]), np.zeros(2, [("a", "i4")]), np.datetime64("2024")],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_other_values_are_refused(array: Any) -> None:
    assert_refused(record_of(array))


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_array_whose_bytes_are_not_its_own(protocol: int) -> None:
    data = record_of(np.arange(6, dtype=np.int64), protocol=protocol)
    (short,) = [data.replace(b"K\x06\x85", b"K\x05\x85")]
    assert short != data
    assert_refused(short, "another size")


def test_a_buffer_with_its_position() -> None:
    buffer = io.BytesIO(b"bytes")
    buffer.seek(3)
    (got,) = loads(record_of(buffer)).non_tensor_leaves
    assert got.getvalue() == b"bytes" and got.tell() == 3


def test_nan_keeps_its_bits() -> None:
    (nan,) = struct.unpack(">d", bytes.fromhex("7ff8000000abcdef"))
    (got,) = loads(stock([nan])).non_tensor_leaves
    assert struct.pack(">d", got).hex() == "7ff8000000abcdef"


def test_a_record_of_many_leaves_is_read_in_reasonable_time() -> None:
    data = stock({f"layer.{i}": {"w": torch.ones(1), "b": torch.ones(1)} for i in range(2000)})
    start = time.process_time()
    assert len(loads(data).paths) == 4000
    assert time.process_time() - start < 5


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_ranks")
def test_dtensors_of_every_mesh_and_placement() -> None:
    flat = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = torch.arange(16.0).reshape(4, 4)
    together = grid._flatten("all")

    def dtensor(mesh: Any, *placements: Any) -> DTensor:
        return DTensor.from_local(local, mesh, placements, run_check=False)

    state = {
        "shard": dtensor(flat, Shard(0)),
        "replicate": dtensor(flat, Replicate()),
        "partial": dtensor(flat, Partial()),
        "partial max": dtensor(flat, Partial("max")),
        "grid": dtensor(grid, Shard(1), Replicate()),
        "both": dtensor(grid, Shard(0), Shard(0)),
        "strided": dtensor(grid, _StridedShard(0, split_factor=2), Shard(0)),
        "sub": dtensor(grid["tp"], Shard(0)),
        "flattened": dtensor(together, Shard(0)),
    }
    record = assert_same(stock(state))
    for sent, got in zip(state.values(), record.non_tensor_leaves, strict=True):
        mesh = got.spec.mesh
        assert torch.equal(mesh.mesh, sent.device_mesh.mesh)
        assert mesh.mesh_dim_names == sent.device_mesh.mesh_dim_names
        assert mesh._coordinate_on_dim == sent.device_mesh._coordinate_on_dim
        assert got.spec.tensor_meta == sent._spec.tensor_meta
        assert got.spec.shard_order == sent._spec.shard_order
        again = DTensor(local, got.spec, requires_grad=False)
        assert again.shape == sent.shape
        assert again.placements == sent.placements


def sharded_record(**changes: Any) -> bytes:
    shards = [ShardMetadata([2 * i, 0], [2, 3], f"rank:{i}/cpu") for i in range(2)]
    meta = _ShardedTensorMeta(
        [_TensorMeta(torch.Size([2, 3]), torch.float32, 0, (3, 1), 24)],
        shards[:1],
        ShardedTensorMetadata(shards, torch.Size([4, 3]), TensorProperties(torch.float32)),
    )
    return record_of(dataclasses.replace(meta, **changes))


@pytest.mark.parametrize("place", ["rank:1/cpu", "trainer0/cuda:1", "cpu", None])
def test_of_a_sharded_tensor_the_tensors_are_read_that_follow(place: str | None) -> None:
    properties = TensorProperties(torch.float32, memory_format=torch.channels_last)
    whole = ShardedTensorMetadata(
        [ShardMetadata([0, 0], [4, 3], place)], torch.Size([4, 3]), properties
    )
    (leaf,) = loads(sharded_record(sharded_tensor_metadata=whole)).non_tensor_leaves
    assert isinstance(leaf, _ShardedTensorMeta)
    assert leaf.local_shards_meta == [_TensorMeta(torch.Size([2, 3]), torch.float32, 0, (3, 1), 24)]


# Attacks ---------------------------------------------------------------------------------------


class Calls:
    """Pickles as a call of `fn`."""

    def __init__(self, fn: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (fn, args) if state is None else (fn, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


class SetsState:
    def __setstate__(self, state: Any) -> None:
        Path(state).touch()

    def __getstate__(self) -> Any:
        return "touched"


@pytest.mark.parametrize("depth", ["leaf", "whole"])
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (os.system, ("touch touched",)),
        (builtins.eval, ("open('touched','w')",)),
        (builtins.exec, ("open('touched','w')",)),
        (builtins.open, ("touched", "w")),
        (builtins.getattr, (torch.Size, "__reduce__")),
        (builtins.__import__, ("this",)),
        (torch.load, ("touched",)),
        (torch.storage._load_from_bytes, (pickle.dumps(Calls(os.system, "touch touched")),)),
        (torch.hub.load, ("x", "y")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_attack_call(
    fn: Any, args: Any, depth: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = Calls(fn, *args)
    assert_refused(record_of(call) if depth == "leaf" else pickle.dumps(call))
    assert list(tmp_path.iterdir()) == []


def test_attack_getattr_chain() -> None:
    chain = Calls(getattr, Calls(getattr, Calls(getattr, os.path, "os"), "environ"), "clear")
    with pytest.raises(TypeError, match="module"):
        pickle.dumps(chain)  # so the module is named by hand
    data = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x05torch\x8c\x02os\x93\x86R."
    assert_refused(data, "closed list")
    assert_refused(record_of(Calls(getattr, Calls(getattr, Path, "cwd"), "x")), "closed list")


def test_attack_dotted_name_walks_through_a_module() -> None:
    assert_refused(b"\x80\x04\x8c\x05torch\x8c\x12os.system.__self__\x93.", "closed list")
    assert_refused(b"\x80\x04\x8c\x05torch\x8c\x02os\x93.", "closed list")


def test_attack_setstate_of_a_class_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(record_of(SetsState()), "closed list")
    assert list(tmp_path.iterdir()) == []


def test_attack_module_that_is_not_imported() -> None:
    sys.modules.pop("antigravity", None)
    assert_refused(b"\x80\x04\x8c\x0bantigravity\x8c\x01x\x93.", "closed list")
    assert "antigravity" not in sys.modules


def test_attack_namedtuple_with_a_constructor_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = tree_structure(Point(1, 2))
    data = pickle.dumps(_StateDictMeta(spec, [(), ()], [1, 2]))
    loads(data)
    assert_refused(data.replace(b"\x8c\x05Point", b"\x8c\x05Armed"), "closed list")
    assert list(tmp_path.iterdir()) == []


def test_attack_namedtuple_is_called_in_the_pickle() -> None:
    assert_refused(record_of(Calls(Point, 1, 2)), "plain value")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x05torch\x8c\x07float32\x93}\x8c\x01a\x8c\x01bsb.",
        b"\x80\x04\x8c\x08builtins\x8c\x04dict\x93N}\x8c\x01a\x8c\x01bs\x86b.",
        b"\x80\x04]}b.",
        b"\x80\x04\x8c\x0btorch.utils\x8c\x07_pytree\x93}b.",
    ],
    ids=["dtype", "class", "list", "module"],
)
def test_attack_build_on_what_is_no_new_object(data: bytes) -> None:
    assert_refused(data)


@pytest.mark.parametrize(
    "opcode",
    [b"c", b"i", b"o", b"P", b"Q", b"\x82", b"\x83", b"\x84", b"\x92", b"0", b"1", b"2", b"q"],
    ids=repr,
)
def test_attack_opcode_outside_the_list(opcode: bytes) -> None:
    assert_refused(b"\x80\x04NNN" + opcode + b"os\nsystem\n.", "opcode")


def test_attack_memo_index_bomb() -> None:
    assert_refused(b"\x80\x04Nr\xff\xff\xff\x7f.", "opcode")
    assert_refused(b"\x80\x04Nj\xff\xff\xff\x7f.")


def test_attack_recursion_bomb() -> None:
    assert_refused(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".")
    assert_refused(b"\x80\x04" + b"N" + b"\x85" * 100_000 + b".")


def test_attack_shared_subtrees_make_a_vast_tree() -> None:
    for core in ([], [0]):
        spec = tree_structure(core)
        for _ in range(60):
            spec = type(spec)(list, None, [spec, spec])
        assert_refused(pickle.dumps(_StateDictMeta(spec, [], [])))


def test_attack_tree_deeper_than_any_state() -> None:
    spec = tree_structure([])
    for _ in range(230):
        spec = type(spec)(list, None, [spec])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        data = pickle.dumps(_StateDictMeta(spec, [], []))
    finally:
        sys.setrecursionlimit(limit)
    assert_refused(data, "deeper")


def test_attack_tree_that_holds_itself() -> None:
    spec = tree_structure([0])
    spec._children[0] = spec
    assert_refused(pickle.dumps(_StateDictMeta(spec, [], [])), "deeper")


def test_attack_key_that_takes_forever_to_hash() -> None:
    key: Any = (1, 2)
    for _ in range(14):
        key = (key,) * 8
    spec = type(tree_structure([]))(dict, [key], [tree_structure(0)])
    assert_refused(pickle.dumps(_StateDictMeta(spec, [()], [0])), "too large")


def test_attack_hash_bomb_in_a_dict_of_the_pickle() -> None:
    nested = b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(60))  # t = (t, t), 60 times
    data = b"\x80\x04}N\x94" + nested
    assert_refused(data + b"Ns.", "field names")


@pytest.mark.parametrize(
    "opcode",
    [b"\x8e", b"\x8d", b"\x96"],
    ids=["bytes", "text", "bytearray"],
)
def test_attack_huge_length(opcode: bytes) -> None:
    assert_refused(b"\x80\x04" + opcode + struct.pack("<Q", 1 << 62) + b"x.", "cut short")
    assert_refused(b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.", "cut short")


def test_attack_huge_calls_of_harmless_types() -> None:
    assert_refused(record_of(Calls(bytearray, 1 << 45)))
    assert_refused(record_of(Calls(bytes, 1 << 45)))
    assert_refused(record_of(Calls(int, "9" * 10_000)))


@pytest.mark.parametrize("leaf", [set(), {1, "a"}, frozenset([1.5])], ids=["none", "two", "one"])
def test_sets_are_refused(leaf: object) -> None:
    assert_refused(record_of(leaf), "opcode")


def test_attack_trailing_data() -> None:
    assert_refused(stock([1]) + b".", "follow")
    assert_refused(stock([1]) + stock([1]), "follow")


def test_input_over_the_limit() -> None:
    data = stock([1])
    with pytest.raises(RemoteProtocolError, match="limit"):
        loads(data, limit=len(data) - 1)
    loads(data, limit=len(data))


@pytest.mark.usefixtures("fake_ranks")
def test_every_truncation_and_every_flipped_byte_is_an_error_or_a_record() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    dtensor = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Partial()], run_check=False)
    good = stock({"a": torch.ones(2, 3), "b": (1, "x"), "c": Point(1, 2.0), "d": dtensor})
    rng = random.Random(1)
    for end in range(len(good)):
        assert_refused(good[:end])
    for at in range(len(good)):
        values = (0, 0x2E, 0x52, 0x62, 0xFF, good[at] ^ 1)
        for value in rng.sample(values, rounds(len(values), 3)):
            bad = good[:at] + bytes([value]) + good[at + 1 :]
            try:
                assert type(loads(bad)) is _StateDictMeta
            except RemoteProtocolError:
                pass


@pytest.mark.parametrize(
    "value",
    [None, 1, [], {}, _TensorMeta(torch.Size([1]), torch.int8, 0, (1,), 1)],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_record(value: object) -> None:
    assert_refused(pickle.dumps(value))


@pytest.mark.parametrize(
    ("treespec", "paths", "leaves"),
    [
        (None, [], []),
        (tree_structure([0]), [], [0]),
        (tree_structure([0]), [()], []),
        (tree_structure([0]), [()], [0, 1]),
        (tree_structure([0]), None, [0]),
        (tree_structure([0]), [()], (0,)),
        (tree_structure([0]), ["a"], [0]),
        (tree_structure([0]), [()], [[1]]),
        (tree_structure([0]), [()], [{"a": 1}]),
        (tree_structure([0]), [()], [int]),
        (tree_structure([0]), [()], [Point(1, 2)]),
    ],
    ids=str,
)
def test_record_with_fields_of_the_wrong_type(treespec: Any, paths: Any, leaves: Any) -> None:
    assert_refused(pickle.dumps(_StateDictMeta(treespec, paths, leaves)))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2, 3)},
        {"shape": torch.Size([2])},
        {"shape": torch.Size([2, 4])},
        {"shape": torch.Size([1 << 40, 1 << 40]), "stride": (0, 0)},
        {"dtype": "float32"},
        {"dtype": torch.float64},
        {"dtype": int},
        {"storage_offset": 1},
        {"storage_offset": -1},
        {"storage_offset": 1.0},
        {"storage_offset": True},
        {"stride": (3,)},
        {"stride": [3, 1]},
        {"stride": (4, 1)},
        {"stride": (-3, 1)},
        {"stride": (3, "1")},
        {"nbytes": 23},
        {"nbytes": -1},
        {"nbytes": 1 << 50},
        {"nbytes": None},
    ],
    ids=str,
)
def test_tensor_record_out_of_bounds(changes: dict[str, Any]) -> None:
    assert_refused(record_with(**changes))


def test_tensor_record_within_bounds() -> None:
    assert_same(record_with())
    assert_same(record_with(nbytes=27, storage_offset=0))
    assert_same(record_with(stride=(0, 0), nbytes=4))
    assert_same(record_with(shape=torch.Size([0, 3]), storage_offset=99))


@pytest.mark.parametrize("shards", [None, {}, [None], [1]], ids=str)
def test_a_sharded_record_without_tensors(shards: Any) -> None:
    assert_refused(sharded_record(local_shards_meta=shards))


@pytest.mark.usefixtures("fake_ranks")
def test_attack_placements_for_more_dimensions_than_a_mesh_can_have() -> None:
    """One tuple that many DTensors share would be looked at for each of them."""
    mesh = init_device_mesh("cpu", (4,))
    meta = _prepare_state_dict([DTensor.from_local(torch.ones(2), mesh, [Replicate()])], CPU)[0]
    spec: Any = meta.non_tensor_leaves[0]
    object.__setattr__(spec.spec, "placements", (Replicate(),) * 65)
    assert_refused(pickle.dumps(meta), "more than 64 dimensions")


def test_a_dict_with_a_key_twice() -> None:
    spec = type(tree_structure([]))(dict, ["a", "a"], [tree_structure(0)] * 2)
    assert_refused(pickle.dumps(_StateDictMeta(spec, [(), ()], [0, 1])), "keys")


def test_a_deque_too_short_for_its_items() -> None:
    spec = type(tree_structure([]))(collections.deque, 1, [tree_structure(0)] * 2)
    assert_refused(pickle.dumps(_StateDictMeta(spec, [(), ()], [0, 1])), "rebuild")


def test_paths_come_from_the_tree_and_not_from_the_peer() -> None:
    meta = _prepare_state_dict({"a": 1, "b": 2}, CPU)[0]
    expected = list(meta.paths)
    meta.paths = [meta.paths[0], meta.paths[0]]
    assert loads(pickle.dumps(meta)).paths == expected


def test_layouts_of_meshes_as_torch_2_11_has_them() -> None:
    layout = {"shape": (2, (2, 3)), "stride": (6, (3, 1))}
    assert distributed._axes(layout) == [((2,), (6,)), ((2, 3), (3, 1))]
    assert distributed._axes({"shape": 4, "stride": 1}) == [((4,), (1,))]
    with pytest.raises(PickleRefusedError, match="sizes"):
        distributed._axes({"shape": (2, 2), "stride": (1,)})
