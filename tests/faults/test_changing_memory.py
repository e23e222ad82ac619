"""Memory that changes while it is saved, unseen by autograd: what is committed verifies, whatever
was caught. What autograd sees is an error, and no step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrelay as tr
from torchrelay.dcp import Writer
from torchrelay.describing.region import Stream
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.shares import share as shares
from torchrelay.shares.share import Pipeline
from torchrelay.stores.local.files import Files
from torchrelay.stores.writer.file_writer import FileSpec


def changed_before_each_write(monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor) -> list[int]:
    """Another thread's change, at the worst moment: hashing is over and writing begins."""
    write = Files.write
    changes: list[int] = []
    unseen = tensor.numpy()

    def late(self: Files, fd: int, data: Any, position: int) -> None:
        np.add(unseen, 1, out=unseen)
        changes.append(position)
        write(self, fd, data, position)

    monkeypatch.setattr(Files, "write", late)
    return changes


@pytest.mark.parametrize("rows", [16, 3000], ids=["one chunk", "chunks of several pieces"])
def test_a_change_between_hashing_and_writing_is_not_committed_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    tensor = torch.zeros(rows, 256, dtype=torch.int32)
    changes = changed_before_each_write(monkeypatch, tensor)
    with tr.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": {"w": tensor}})
        assert ckpt.verify(1) == 1
        found = ckpt.load(step=1).state["model"]["w"]
    assert len(changes) > 1  # the data, and the commit record
    assert 0 <= int(found.min()) <= int(found.max()) <= len(changes)


def test_many_small_tensors_that_change_verify_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gathered from many places."""
    memory = torch.zeros(500, 300, dtype=torch.int32)
    changed_before_each_write(monkeypatch, memory)
    with tr.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": {f"w{row}": memory[row, :200] for row in range(500)}})
        assert ckpt.verify(1) == 1


def test_a_change_between_hashing_and_writing_by_torchs_own_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(16, 256, dtype=torch.int32)
    changed_before_each_write(monkeypatch, tensor)
    dcp.save({"w": tensor}, storage_writer=Writer(tmp_path / "step-1"), no_dist=True)
    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        assert ckpt.verify(1) == 1


def test_a_thread_that_trains_on_beside_a_save(tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.int32)
    over, unseen = threading.Event(), tensor.numpy()

    def train() -> None:
        while not over.is_set():
            np.add(unseen, 1, out=unseen)

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    try:
        with tr.Checkpointer(tmp_path, keep=tr.KeepLast(2)) as ckpt:
            for step in range(1, 6):
                ckpt.save(step, {"w": tensor})
                assert ckpt.verify(step) == step
            assert ckpt.steps() == [4, 5]
    finally:
        over.set()
        trainer.join(30)


class HashingOnHost:
    """Digests of all chunks, made of live memory before it is copied, as by a GPU."""

    def __init__(self, files: Sequence[FileSpec], streams: Sequence[Stream]) -> None:
        self._parts = list(zip(files, streams, strict=True))

    def hashed(self) -> list[FileSpec]:
        found = []
        for file, stream in self._parts:
            whole = torch.empty(file.nbytes, dtype=torch.uint8)
            stream.read(0, file.nbytes, whole)
            chunks = whole.split(file.chunk_bytes)
            found.append(file._replace(digests=b"".join(map(digest_of, chunks))))
        return found


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_memory_that_changes_after_a_gpu_has_hashed_it_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Here the host stands in for a GPU: both hash where the tensors are, and then copy them."""
    tensor = torch.zeros(256, 300, dtype=torch.int32)
    state = {"model": {"w": tensor.t()}}  # strided memory is copied before it is written
    stage = Pipeline.stage
    changes: list[int] = []

    def changing(self: Pipeline, workers: int) -> None:
        if changes:
            tensor[changes.pop()] += 1
        stage(self, workers)

    monkeypatch.setattr(shares, "DeviceHashing", HashingOnHost)
    monkeypatch.setattr(Pipeline, "stage", changing)
    with tr.Checkpointer(tmp_path, options=tr.options.CheckpointerOptions(stage_on="host")) as ckpt:

        def save(step: int) -> None:
            if way == "save":
                ckpt.save(step, state)
            else:
                ckpt.save_async(step, state).result(20)

        save(1)
        changes.append(7)
        with pytest.raises(tr.errors.CheckpointError, match="changed while it was saved"):
            save(2)
        save(3)
        assert ckpt.steps() == [1, 3]
        assert ckpt.verify(1) == 1 and ckpt.verify(3) == 3


def test_a_file_that_a_thread_still_writes_to_stays_open_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number might be another file's by the time that the thread uses it."""
    tensor = torch.zeros(256, 300, dtype=torch.int32)
    write, stage = Files.write, Pipeline.stage
    writing, go_on, wrote = threading.Event(), threading.Event(), threading.Event()
    used: list[tuple[int, bool]] = []

    def slow(self: Files, fd: int, data: Any, position: int) -> None:
        if not used:
            before = os.fstat(fd).st_ino
            used.append((fd, False))
            writing.set()
            go_on.wait(20)
            with suppress(OSError):
                used[0] = fd, os.fstat(fd).st_ino == before
            wrote.set()
        write(self, fd, data, position)

    def changing(self: Pipeline, workers: int) -> None:
        stage(self, workers)
        assert writing.wait(20)
        tensor.add_(1)

    with tr.Checkpointer(tmp_path) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(Files, "write", slow)
            patch.setattr(Pipeline, "stage", changing)
            with pytest.raises(tr.errors.CheckpointError, match="changed while it was saved"):
                ckpt.save(1, {"model": {"w": tensor.t()}})
            go_on.set()
            assert wrote.wait(20)
        assert used[0][1], "it was closed"
        end = time.monotonic() + 20
        while any(".safetensors" in name for name in open_files()):
            assert time.monotonic() < end, "it stays open"
            time.sleep(0.01)
        ckpt.save(2, {"model": {"w": tensor.t()}})
        assert ckpt.steps() == [2] and ckpt.verify(2) == 2


def open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(str(entry.readlink()))
    return found
