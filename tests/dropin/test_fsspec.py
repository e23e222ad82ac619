"""Checkpoints that torch's writer over fsspec has written, at a local path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrelay as tr
from torchrelay.dropin.checkpointer import TorchCheckpointer
from torchrelay.dropin.conversion import convert
from torchrelay.dropin.stock_dcp import read_stock, write_stock

pytest.importorskip("fsspec", reason="torch's reader and writer over fsspec need it")


def storages() -> tuple[Any, Any]:
    """The writer and the reader: public from torch 2.14 on, and before that in a private module."""
    try:
        return dcp.FsspecWriter, dcp.FsspecReader  # type: ignore[attr-defined]
    except AttributeError:
        from torch.distributed.checkpoint import _fsspec_filesystem as private

        return private.FsspecWriter, private.FsspecReader


def state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "epoch": 4, "empty": torch.zeros(0)}


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_it_wrote_is_read_and_converted(tmp_path: Path, scheme: str) -> None:
    write, _ = storages()
    folder = tmp_path / "stock"
    dcp.save(state(), storage_writer=write(f"{scheme}{folder}"), no_dist=True)
    for found in (read_stock(folder), _converted(folder, tmp_path / "steps")):
        assert found["epoch"] == 4 and found["empty"].shape == (0,)
        assert torch.equal(found["model"]["w"], state()["model"]["w"])


def _converted(folder: Path, steps: Path) -> Any:
    convert(folder, steps)
    with tr.Checkpointer(steps, no_dist=True) as there:
        return there.load().state


def test_it_reads_what_we_write(tmp_path: Path) -> None:
    _, read = storages()
    write_stock(tmp_path / "ours", {"w": torch.arange(6.0)})
    into = {"w": torch.zeros(6)}
    dcp.load(into, storage_reader=read(str(tmp_path / "ours")), no_dist=True)
    assert torch.equal(into["w"], torch.arange(6.0))


def test_our_checkpointer_saves_and_loads_through_it(tmp_path: Path) -> None:
    write, read = storages()
    place = str(tmp_path / "both")
    checkpointer = TorchCheckpointer(write(place), read(place), no_dist=True)
    checkpointer.save(state())
    into = {"model": {"w": torch.zeros(2, 3)}, "epoch": 0, "empty": torch.zeros(0)}
    checkpointer.load(into)
    assert into["epoch"] == 4 and torch.equal(into["model"]["w"], state()["model"]["w"])  # type: ignore[index]
