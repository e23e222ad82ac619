"""What a command prints in rare cases: into a pipe that closes, of nothing, of a mistyped URL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchrelay as tr
from tests.support.commands import command

PROGRAM = "from torchrelay.cli import main; main()"


@pytest.mark.parametrize("tensors", [2, 4000], ids=["a line", "more than a pipe holds"])
def test_a_reader_that_has_seen_enough_ends_the_command(tmp_path: Path, tensors: int) -> None:
    state = {f"weight {n}": torch.zeros(1) for n in range(tensors)}
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        checkpointer.save(1, {"model": state})
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does that has its lines
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "inspect", str(tmp_path), "--shards"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_machine_without_keepers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.keeper.process.KeeperName.all", list)
    assert command("keeper") == (0, "no keeper of yours runs on this machine\n", "")
    assert command("keeper", "--json") == (0, "[]\n", "")


@pytest.mark.parametrize("word", ["notaurl", "ftp://host:1", "http://", "http://host:x"])
def test_a_mistyped_url_is_repeated(word: str, tmp_path: Path) -> None:
    done = command("pull", word, "-o", tmp_path / "out")
    assert done.returncode == 1 and repr(word) in done.stderr and "http://HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    "word", ["http://u:secret@host:1", "u:secret@host", "http://h:1/?t=secret"]
)
def test_a_token_in_a_url_is_not_repeated(word: str, tmp_path: Path) -> None:
    done = command("pull", word, "-o", tmp_path / "out")
    assert done.returncode == 1 and "secret" not in done.stderr
    assert "TORCHRELAY_TOKEN" in done.stderr
