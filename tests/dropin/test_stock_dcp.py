"""Stock DCP directories and torch.save files are read whole, and nothing in them is run."""

from __future__ import annotations

import builtins
import dataclasses
import io
import os
import pickle
import random
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import (
    Shard as LocalShard,
)
from torch.distributed._shard.sharded_tensor import (
    ShardMetadata,
    init_from_local_shards,
)
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.ranks import RankPool
from tests.support.rounds import rounds
from torchrelay.dropin._dcp_metadata import decode
from torchrelay.dropin.stock_dcp import (
    read_stock,
    read_torch_save,
    write_stock,
    write_torch_save,
)
from torchrelay.errors import (
    CheckpointError,
    DigestError,
    ManifestError,
    RelayError,
    UnsupportedLeafError,
    UsageError,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "mixed": [torch.arange(3), {"half": torch.ones(2, dtype=torch.bfloat16)}, "text"],
        "pair": (1, "two", 3.0),
        "plain": [1, [2, 3]],
        "nothing": None,
        "raw": b"bytes \x00",
    }


def as_stock(value: Any) -> Any:
    """What the format makes of a state: its keys are text."""
    if isinstance(value, dict):
        return {str(k): as_stock(v) for k, v in value.items()}
    return [as_stock(v) for v in value] if isinstance(value, list) else value


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def stock_save(path: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)


def change(path: Path, edit: Callable[[Metadata], Any]) -> None:
    """Write another `.metadata`: what `edit` returns, or what it made of the one that is there."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edited = edit(metadata)
    file.write_bytes(pickle.dumps(metadata if edited is None else edited))


def change_piece(path: Path, fqn: str, **fields: Any) -> None:
    def edit(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == fqn:
                metadata.storage_data[index] = dataclasses.replace(info, **fields)

    change(path, edit)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "stock"
    stock_save(path, {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2), "step": 3})
    return path


# Round trips ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"single_file_per_rank": False}, {"thread_count": 3}],
    ids=["one file", "a file an item", "three files"],
)
def test_a_training_state_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    state = training_state()
    stock_save(tmp_path / "c", state, **options)
    assert same(read_stock(tmp_path / "c"), as_stock(state))


def test_ours_reads_ours_and_torch_reads_ours(tmp_path: Path) -> None:
    state = training_state()
    write_stock(tmp_path / "c", state)
    assert same(read_stock(tmp_path / "c"), as_stock(state))
    into = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}, "step": 0}
    dcp.load(into, checkpoint_id=tmp_path / "c", no_dist=True)
    assert same(into, {"model": dict(state["model"]), "step": 7})


def test_what_the_format_does_not_keep(tmp_path: Path) -> None:
    write_stock(tmp_path / "c", {"e": {}, "l": [{}, torch.ones(1)], "d": {3: 4}})
    assert same(read_stock(tmp_path / "c"), {"l": [None, torch.ones(1)], "d": {"3": 4}})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_odd_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    base = torch.arange(24).reshape(2, 3, 4).to(dtype)
    state = {"t": base, "v": base[:, 1:, ::2], "s": base[0, 0, 0], "none": base[:, :0]}
    stock_save(tmp_path / "c", state)
    got = read_stock(tmp_path / "c")
    for name, tensor in state.items():
        assert got[name].dtype == dtype and got[name].shape == tensor.shape
        assert got[name].tolist() == tensor.tolist()


def test_strides_of_one_chunk_stay(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    stock_save(tmp_path / "c", {"i": image})
    got = read_stock(tmp_path / "c")["i"]
    assert got.stride() == image.stride() and torch.equal(got, image)


def test_without_planner_data_the_state_is_flat(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(tmp_path / "c")
    flat = {"a.b": torch.ones(2), "n": 3, "inner": {"x": 1}}
    dcp.save(flat, storage_writer=writer, planner=planner, no_dist=True)
    assert pickle.loads((tmp_path / "c" / ".metadata").read_bytes()).planner_data is None
    assert same(read_stock(tmp_path / "c"), flat)


def test_metadata_of_an_older_torch(saved: Path) -> None:
    """Before 2.3 there was no storage_meta, no version, and another TensorProperties."""

    def edit(metadata: Metadata) -> None:
        for name in ("planner_data", "storage_meta", "version"):
            metadata.__dict__.pop(name, None)
        for record in metadata.state_dict_metadata.values():
            if isinstance(record, TensorStorageMetadata):
                record.properties = OldProperties(dtype=record.properties.dtype)

    change(saved, edit)
    assert b"sharded_tensor.metadata" in (saved / ".metadata").read_bytes()
    expected = {"w": torch.arange(12.0).reshape(4, 3), "b": torch.ones(2), "step": 3}
    assert same(read_stock(saved), expected)


def save_sharded(rank: int, group: Any, path: str, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2))
    rows = torch.arange(world * 2 * 3.0).reshape(world * 2, 3)[2 * rank : 2 * rank + 2]
    box = ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu")
    state = {
        "rows": distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)]),
        "uneven": distribute_tensor(torch.arange(3), mesh, [Shard(0)]),
        "grid": distribute_tensor(torch.arange(48).reshape(6, 8), grid, [Shard(0), Shard(1)]),
        "nest": {"sharded": init_from_local_shards([LocalShard(rows, box)], world * 2, 3)},
        "same": torch.full((2,), 5.0),
        "epoch": 9,
    }
    dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_ranks_are_put_together(
    world: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    pool.run(save_sharded, str(tmp_path / "c"), world)
    assert same(
        read_stock(tmp_path / "c"),
        {
            "rows": torch.arange(40.0).reshape(10, 4),
            "uneven": torch.arange(3),
            "grid": torch.arange(48).reshape(6, 8),
            "nest": {"sharded": torch.arange(world * 2 * 3.0).reshape(world * 2, 3)},
            "same": torch.full((2,), 5.0),
            "epoch": 9,
        },
    )


def write_a_shard(rank: int, group: Any, path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    state = {"rows": distribute_tensor(torch.arange(40.0).reshape(10, 4), mesh, [Shard(0)])}
    with pytest.raises(UnsupportedLeafError) as caught:
        write_stock(Path(path) / str(rank), state)
    return str(caught.value)


def test_an_older_torch_reads_what_a_later_one_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 pickles six fields for the properties of a tensor, and older ones read five."""
    five = TensorProperties.__getstate__
    with monkeypatch.context() as later:
        later.setattr(TensorProperties, "__getstate__", lambda self: (*five(self)[:5], (3, 1)))
        write_stock(tmp_path / "dcp", {"w": torch.arange(6.0).reshape(2, 3), "step": 4})
    found = {"w": torch.zeros(2, 3), "step": 0}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(found["w"], torch.arange(6.0).reshape(2, 3)) and found["step"] == 4


def test_a_shard_alone_is_not_written_as_a_checkpoint(pool2: RankPool, tmp_path: Path) -> None:
    for message in pool2.run(write_a_shard, str(tmp_path)):
        assert "only a shard" in message and "at rows" in message
    assert not list(tmp_path.glob("*/.metadata"))


def test_write_stock_wants_a_new_directory(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write_stock(tmp_path, {"a": 1})
    with pytest.raises(UsageError, match="not empty"):
        write_stock(tmp_path / "x", {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    (tmp_path / "empty").mkdir()
    write_stock(tmp_path / "empty", {"a": 1})
    assert read_stock(tmp_path / "empty") == {"a": 1}


@pytest.mark.parametrize(
    "state", [{"a": {1: 2, "1": 3}}, {"a.b": 1, "a": {"b": 2}}, {"f": lambda: None}]
)
def test_write_stock_refuses_what_would_be_lost(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"cannot hold|is not written"):
        write_stock(tmp_path / "c", state)
    assert not (tmp_path / "c" / ".metadata").exists()


# Attacks ----------------------------------------------------------------------------------------


class Payload:
    """Pickles as a call."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call
        self.args = args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


def payloads(canary: Path) -> list[Payload]:
    touch = f"touch {canary}"
    return [
        Payload(os.system, touch),
        Payload(builtins.eval, f"__import__('os').system({touch!r})"),
        Payload(builtins.exec, f"open({str(canary)!r}, 'w')"),
        Payload(io.open, str(canary), "w"),
        Payload(getattr, Path, "touch"),
        Payload(Path.touch, canary),
    ]


PLACES: dict[str, Callable[[Metadata, Any], Any]] = {
    "whole": lambda m, p: p,
    "planner_data": lambda m, p: dataclasses.replace(m, planner_data=p),
    "storage_meta": lambda m, p: dataclasses.replace(m, storage_meta=p),
    "an unknown field": lambda m, p: m.__dict__.update(extra=p),
    "a tensor": lambda m, p: m.state_dict_metadata.update(w=p),
    "a size": lambda m, p: setattr(m.state_dict_metadata["w"], "size", p),
    "a piece": lambda m, p: m.storage_data.update({MetadataIndex("w", [0, 0]): p}),
    "a path": lambda m, p: m.planner_data.update(w=("w", p)),
}


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("place", list(PLACES))
def test_a_metadata_that_calls_is_refused(
    saved: Path, tmp_path: Path, place: str, number: int
) -> None:
    canary = tmp_path / "canary"
    payload = payloads(canary)[number]
    change(saved, lambda metadata: PLACES[place](metadata, payload))
    with pytest.raises(ManifestError, match=r"closed list|opcode|called"):
        read_stock(saved)
    assert not canary.exists()


def test_the_payloads_work(saved: Path, tmp_path: Path) -> None:
    """Torch's own reader runs them: the refusals above are not for lack of a charge."""
    canary = tmp_path / "canary"
    change(saved, lambda m: PLACES["planner_data"](m, payloads(canary)[0]))
    dcp.FileSystemReader(saved).read_metadata()
    assert canary.exists()


def test_older_protocols_and_setstate_tricks_are_refused(saved: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for data in (
        pickle.dumps(metadata, protocol=0),
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x82\x01.",  # an extension code
        b"\x80\x04N.",
        b"",
        b".",
        b"\x80\x04]\x94h\x00a.",
    ):
        with pytest.raises(ManifestError):
            decode(data)


def replace_item(path: Path, fqn: str, archive: bytes) -> None:
    """Append another archive to the data file, and have the metadata name it for `fqn`."""
    file = path / "__0_0.distcp"
    offset = file.stat().st_size
    with file.open("ab") as out:
        out.write(archive)
    change_piece(path, fqn, offset=offset, length=len(archive))


def torch_saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize("fqn", ["step", "w"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_item_that_calls_is_refused_by_name(
    saved: Path, tmp_path: Path, number: int, fqn: str
) -> None:
    canary = tmp_path / "canary"
    replace_item(saved, fqn, torch_saved({"deep": [payloads(canary)[number]]}))
    with pytest.raises(UnsupportedLeafError) as caught:
        read_stock(saved)
    assert caught.value.path == fqn
    assert not canary.exists()


def test_an_item_that_is_a_bare_pickle_is_refused(saved: Path, tmp_path: Path) -> None:
    replace_item(saved, "step", pickle.dumps(payloads(tmp_path / "canary")[0]))
    with pytest.raises(DigestError, match="not an intact archive"):
        read_stock(saved)
    assert not (tmp_path / "canary").exists()


def test_a_packed_archive_is_refused(saved: Path) -> None:
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_saved(torch.zeros(1 << 20)))) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    replace_item(saved, "step", packed.getvalue())
    with pytest.raises(ManifestError, match="compressed"):
        read_stock(saved)


# Malformed and damaged --------------------------------------------------------------------------


def test_a_flipped_byte_is_found(saved: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    info: _StorageInfo = metadata.storage_data[MetadataIndex("w", [0, 0])]
    file = saved / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(torch.arange(12.0).numpy().tobytes(), info.offset)
    data[at + 5] ^= 4
    file.write_bytes(data)
    with pytest.raises(DigestError, match=r"check_crc=False") as caught:
        read_stock(saved)
    assert caught.value.path == "w"
    assert read_stock(saved, check_crc=False)["w"].shape == (4, 3)


def test_a_file_cut_short(saved: Path) -> None:
    file = saved / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ManifestError, match="cut short"):
        read_stock(saved)


def test_a_missing_file_and_a_missing_metadata(saved: Path, tmp_path: Path) -> None:
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(ManifestError, match="missing"):
        read_stock(saved)
    with pytest.raises(ManifestError, match=r"no \.metadata"):
        read_stock(tmp_path / "nowhere")


def test_metadata_cut_anywhere(saved: Path) -> None:
    data = (saved / ".metadata").read_bytes()
    for end in range(0, len(data), 7):
        with pytest.raises(ManifestError):
            decode(data[:end])


@pytest.mark.parametrize(
    "fields",
    [
        *({"offset": n} for n in (1 << 40, -1, 1.5, True)),
        *({"length": n} for n in (1 << 40, 1 << 70, -5, 4)),
    ],
    ids=str,
)
def test_ranges_outside_of_the_file(saved: Path, fields: dict[str, Any]) -> None:
    change_piece(saved, "w", **fields)
    with pytest.raises(ManifestError):
        read_stock(saved)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", "\ud800", "x\ny", "gone"],
)
def test_names_outside_of_the_directory(saved: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes((saved / "__0_0.distcp").read_bytes())
    change_piece(saved, "w", relative_path=name)
    with pytest.raises(ManifestError):
        read_stock(saved)


def test_transforms_are_refused_by_name(saved: Path) -> None:
    change_piece(saved, "w", transform_descriptors=["stream.zstd"])
    with pytest.raises(UnsupportedLeafError, match=r"stream\.zstd") as caught:
        read_stock(saved)
    assert caught.value.path == "w"


def test_transforms_that_share_their_parts_are_not_written_out(saved: Path) -> None:
    vast: Any = ("x",)
    for _ in range(100):
        vast = (vast, vast)
    change_piece(saved, "w", transform_descriptors=vast)
    with pytest.raises(UnsupportedLeafError, match="stream transforms"):
        read_stock(saved)


def boxes(*pairs: tuple[list[int], list[int]]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in pairs]


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        (boxes(), "hold 0 of its 12"),
        (boxes(([0, 0], [3, 3])), "hold 9 of its 12"),
        (boxes(([0, 0], [2, 3]), ([1, 0], [2, 3])), "overlap"),
        (boxes(([0, 0], [2, 3]), ([0, 0], [2, 3])), "overlap"),
        (boxes(([0, 0], [2, 3]), ([2, 0], [1, 3]), ([2, 1], [2, 2])), "overlap"),
        (boxes(([0, 0], [5, 3])), "reaches past"),
        (boxes(([1, 0], [4, 3])), "reaches past"),
        (boxes(([0], [12])), "dimensions"),
    ],
)
def test_chunks_that_do_not_tile(saved: Path, chunks: list[ChunkStorageMetadata], why: str) -> None:
    def edit(metadata: Metadata) -> None:
        metadata.state_dict_metadata["w"].chunks = chunks
        at = 0
        for chunk in chunks:
            index = MetadataIndex("w", chunk.offsets)
            metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 1 << 20 | at, 60)
            at += 60

    change(saved, edit)
    with pytest.raises(ManifestError, match=why):
        read_stock(saved)


def test_a_pinwheel_tiles(tmp_path: Path) -> None:
    """Five boxes that no straight cut parts."""
    whole = torch.arange(9).reshape(3, 3)
    path = tmp_path / "c"
    pins = boxes(
        ([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])
    )
    stock_save(path, {"w": whole})
    data = b""

    def edit(metadata: Metadata) -> None:
        nonlocal data
        metadata.state_dict_metadata["w"].chunks = pins
        metadata.storage_data.clear()
        for pin in pins:
            (y, x), (h, w) = pin.offsets, pin.sizes
            archive = torch_saved(whole[y : y + h, x : x + w].clone())
            index = MetadataIndex("w", pin.offsets)
            metadata.storage_data[index] = _StorageInfo("x", len(data), len(archive))
            data += archive

    change(path, edit)
    (path / "x").write_bytes(data)
    assert torch.equal(read_stock(path)["w"], whole)


def test_one_range_for_two_items(saved: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex("w", [0, 0])]
    change_piece(saved, "b", offset=info.offset, length=info.length)
    with pytest.raises(ManifestError, match="overlap"):
        read_stock(saved)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3, 4),
        torch.zeros(4, 3, dtype=torch.int32),
        nn.Parameter(torch.zeros(4, 3)),
        "no",
        torch.zeros(1, 1).expand(4, 3),
        torch.zeros(4, 3).to_sparse(),
    ],
    ids=["shape", "dtype", "parameter", "text", "expanded", "sparse"],
)
def test_another_tensor_than_described(saved: Path, value: Any) -> None:
    replace_item(saved, "w", torch_saved(value))
    with pytest.raises(ManifestError, match="does not hold"):
        read_stock(saved)


def test_a_tensor_larger_than_its_file(saved: Path) -> None:
    def edit(metadata: Metadata) -> None:
        record: TensorStorageMetadata = metadata.state_dict_metadata["w"]
        record.size = torch.Size([1 << 30, 1 << 10])
        record.chunks = boxes(([0, 0], [1 << 30, 1 << 10]))

    change(saved, edit)
    with pytest.raises(ManifestError, match="larger than"):
        read_stock(saved)


@pytest.mark.parametrize(
    "paths",
    [
        {"w": ("a",), "b": ("a", "c")},
        {"w": ("a", "c"), "b": ("a",)},
        {"w": ("a",), "b": ("a",)},
        {"w": ("b",)},
        {"w": ("l", 0), "b": ("l", "x")},
        {"w": ("l", 1 << 40)},
        {"w": (0,)},
        {"w": ()},
        {"w": ("a", -1)},
        {"w": ("a", 1.5)},
        {"w": ("a",) * 1000},
        {"w": "a"},
        ["w"],
    ],
    ids=str,
)
def test_paths_that_make_no_state(saved: Path, paths: Any) -> None:
    change(saved, lambda m: dataclasses.replace(m, planner_data=paths))
    with pytest.raises(ManifestError):
        read_stock(saved)


def test_a_shared_list_of_chunks_costs_nothing(saved: Path) -> None:
    """A short pickle that describes very many chunks by sharing one list."""
    record = pickle.loads((saved / ".metadata").read_bytes()).state_dict_metadata["w"]
    record.size = torch.Size([0, 3])
    record.chunks = boxes(([0, 0], [0, 3])) * 3_000

    def edit(metadata: Metadata) -> None:
        for n in range(3_000):
            metadata.state_dict_metadata[f"w{n}"] = record
            metadata.storage_data[MetadataIndex(f"w{n}", [0, 0])] = _StorageInfo("x", 0, 0)

    change(saved, edit)
    begin = time.monotonic()
    with pytest.raises(ManifestError, match="more chunks"):
        read_stock(saved)
    assert time.monotonic() - begin < 10


def test_mutations_raise_relay_errors_only(saved: Path, tmp_path: Path) -> None:
    seed, count = 20240607, rounds(4000)
    print(f"seed {seed}")
    rng = random.Random(seed)
    original = (saved / ".metadata").read_bytes()
    begin, refused = time.monotonic(), 0
    for _ in range(count):
        data = bytearray(original)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.randrange(1, 20)]
            elif kind == 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 6))
            else:
                start = rng.randrange(len(data))
                data[at : at + 8] = data[start : start + rng.randrange(1, 40)]
        (saved / ".metadata").write_bytes(data)
        try:
            read_stock(saved)
        except RelayError:
            refused += 1
    assert refused > count // 2
    assert time.monotonic() - begin < 60


def test_mutated_data_raises_relay_errors_only(saved: Path) -> None:
    seed = 20240608
    print(f"seed {seed}")
    rng = random.Random(seed)
    file = saved / "__0_0.distcp"
    original = file.read_bytes()
    for number in range(rounds(400)):
        data = bytearray(original)
        for _ in range(rng.choice((1, 4))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(data)
        try:
            read_stock(saved, check_crc=number % 2 == 0)
        except RelayError:
            pass


# torch.save files -------------------------------------------------------------------------------


def test_torch_save_round_trip(tmp_path: Path) -> None:
    state = training_state()
    file = tmp_path / "s.pt"
    write_torch_save(file, {"old": 1})
    write_torch_save(file, state)
    got = read_torch_save(file)
    assert got["optimizer"]["state"].keys() == {0, 1, 2, 3, 4, 5}
    assert same(as_stock(got), as_stock(state))
    assert same(as_stock(torch.load(file, weights_only=True)), as_stock(state))
    assert [p.name for p in tmp_path.iterdir()] == ["s.pt"]


def test_a_flipped_byte_in_a_torch_save_file_is_found(tmp_path: Path) -> None:
    """In any record of the archive. What is between records is padding."""
    file = tmp_path / "s.pt"
    torch.save({"w": torch.arange(50.0), "step": 3}, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        spans = [(entry, entry.header_offset) for entry in archive.infolist() if entry.file_size]
    for entry, start in spans:
        name, extra = (int.from_bytes(whole[start + at :][:2], "little") for at in (26, 28))
        first = start + 30 + name + extra
        for at in range(first, first + entry.file_size, max(1, entry.file_size // rounds(8))):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(DigestError, match="checksum") as caught:
                read_torch_save(file)
            assert str(file) in str(caught.value)
    file.write_bytes(whole)
    assert same(read_torch_save(file), {"w": torch.arange(50.0), "step": 3})


def test_a_torch_save_file_without_checksums_is_read_on_request(tmp_path: Path) -> None:
    file = tmp_path / "s.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(50.0)}, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(read_torch_save(file, check_crc=False), {"w": torch.arange(50.0)})
    with pytest.raises(DigestError, match="check_crc=False"):
        read_torch_save(file)


def test_a_legacy_torch_save_file_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "s.pt", _use_new_zipfile_serialization=False)
    assert same(read_torch_save(tmp_path / "s.pt"), {"a": torch.ones(3)})


def test_a_torch_save_file_that_calls_is_refused(tmp_path: Path) -> None:
    for number, payload in enumerate(payloads(tmp_path / "canary")[:4]):
        for zipped in (True, False):
            file = tmp_path / f"{number}.pt"
            torch.save({"x": payload}, file, _use_new_zipfile_serialization=zipped)
            with pytest.raises(UnsupportedLeafError, match="refused"):
                read_torch_save(file)
    assert not (tmp_path / "canary").exists()


def test_no_torch_save_file(tmp_path: Path) -> None:
    file = tmp_path / "s.pt"
    with pytest.raises(CheckpointError, match="could not be read"):
        read_torch_save(file)
    for data in (b"", b"hello", pickle.dumps({"a": 1}), torch_saved([1, 2])[:-200]):
        file.write_bytes(data)
        with pytest.raises(ManifestError, match=r"torch\.save file"):
            read_torch_save(file)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "s.pt"
    write_torch_save(file, [1])
    with pytest.raises(UnsupportedLeafError):
        write_torch_save(file, lambda: None)
    assert read_torch_save(file) == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["s.pt"]


@pytest.mark.parametrize("write", [write_torch_save, write_stock])
def test_a_medium_that_is_full_is_named_and_nothing_is_left(tmp_path: Path, write: Any) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            write(tmp_path / "target", {"w": torch.ones(1 << 18)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "target", {"w": torch.ones(2)})
