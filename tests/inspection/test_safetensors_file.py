"""Safetensors files: those that the library writes, those we write, and those nobody should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.held_source import HeldSource
from torchrelay.dropin.conversion import loaded
from torchrelay.errors import CheckpointError, DamagedError, UsageError
from torchrelay.inspection.safetensors_file import SafetensorsSource, write_safetensors
from torchrelay.progress import Progress

TENSORS = {
    "model.w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.b": torch.tensor([1, 2, 3], dtype=torch.bfloat16),
    "empty": torch.empty(0, 2),
    "scalar": torch.tensor(7),
}


def test_the_librarys_file_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found, _ = loaded(tmp_path / "m.safetensors", None)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_our_file_of_sharded_tensors_is_read_by_the_library(tmp_path: Path) -> None:
    boxes = {"model.w": [((0, 0), (3, 1)), ((0, 1), (3, 3))]}
    source = HeldSource(TENSORS, boxes)
    target = tmp_path / "m.safetensors"
    target.write_bytes(b"what was there before")
    seen: list[Progress] = []
    nbytes = write_safetensors(source, source.contents.tensors, target, seen.append)
    assert nbytes == target.stat().st_size and seen[-1] == (nbytes, nbytes)
    found = load_file(target)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_state_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tensors"):
        write_safetensors(HeldSource({}), (), tmp_path / "m.safetensors", lambda told: None)
    assert not any(tmp_path.iterdir())


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    source = HeldSource(TENSORS)
    tensors = source.contents.tensors
    target = tmp_path / "m.safetensors"
    target.write_bytes(b"old")

    def fail(told: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left"):
        write_safetensors(source, tensors, target, fail)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def forged(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (b"\xff" * 8, "a header of"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "a header of"),
        (forged(b"not json"), "header is not what the format says"),
        (forged(b"[" * 50_000), "header is not what the format says"),
        (forged({"a": 5}), "header is not what the format says"),
        (forged({"a": entry("F99")}), "dtype 'F99'"),
        (forged({"a": entry(shape=[-2])}), "shape"),
        (forged({"a": entry(shape=[1 << 61, 1 << 61])}), "has bytes"),
        (forged({"a": entry(shape=[3])}), "has bytes"),
        (forged({"a": entry(offsets=[4, 12])}), "has bytes"),
        (forged({"a": entry(), "b": entry()}), "has bytes"),
        (forged({"a": entry()}, bytes(9)), "are described"),
        (forged({"a": entry()}, bytes(7)), "are described"),
    ],
)
def test_a_file_that_lies_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(DamagedError, match=says):
        SafetensorsSource(tmp_path / "m.safetensors")
