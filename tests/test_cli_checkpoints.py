"""The `torchrelay` commands on checkpoints, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import torchrelay as tr
from torchrelay.dropin.stock_dcp import read_stock


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from torchrelay.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tr.Checkpointer(tmp_path / "run") as held:
        for step in (1, 2):
            held.save(step, {"model": {"w": torch.full((3, 4), float(step))}, "step": step})
    return tmp_path / "run"


def test_ls_inspect_and_verify(place: Path) -> None:
    listing = command("ls", place)
    assert listing.returncode == 0 and "yes" in listing.stdout
    shown = command("inspect", place, "--step", 1)
    assert "model.w" in shown.stdout and "3x4" in shown.stdout
    assert command("verify", place).stdout.strip() == "step 2 holds"
    file = place / "step-2" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    broken = command("verify", place)
    assert broken.returncode == 1 and "model.w" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_looking_leaves_drafts_alone(place: Path) -> None:
    draft = place / "step-9.tmp-elsewhere-1-abcdef01"
    draft.mkdir()
    command("ls", place)
    assert draft.exists()


def test_convert_to_every_kind_and_back(place: Path, tmp_path: Path) -> None:
    for kind, target in (("torch", "file.pt"), ("dcp", "dcp")):
        there = command("convert", place, tmp_path / target, "--to", kind)
        assert there.returncode == 0, there.stderr
        back = command("convert", tmp_path / target, tmp_path / f"from-{kind}", "--step", 5)
        assert back.returncode == 0, back.stderr
        with tr.Checkpointer(tmp_path / f"from-{kind}") as held:
            got = held.load(step=5).state
        assert torch.equal(got["model"]["w"], torch.full((3, 4), 2.0)) and got["step"] == 2
    assert torch.equal(torch.load(tmp_path / "file.pt")["model"]["w"], torch.full((3, 4), 2.0))
    assert read_stock(tmp_path / "dcp")["step"] == 2


def test_convert_refuses_what_is_not_there(tmp_path: Path) -> None:
    found = command("convert", tmp_path / "nothing", tmp_path / "target")
    assert found.returncode == 1 and "no checkpoint there" in found.stderr


def test_export_hf(place: Path, tmp_path: Path) -> None:
    done = command("export-hf", place, tmp_path / "hf", "--step", 1)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], torch.ones(3, 4))
    again = command("export-hf", place, tmp_path / "hf")
    assert again.returncode == 1 and "not overwritten" in again.stderr
