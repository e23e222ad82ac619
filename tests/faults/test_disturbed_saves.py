"""What others do to a root, a draft, a policy or a working directory while a job saves."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

import torchrelay as tr
from tests.support.s3 import S3
from tests.support.saved import state, which
from torchrelay.checkpointer import Keep
from torchrelay.dcp import Writer
from torchrelay.stores.local.files import Files
from torchrelay.stores.tokens import host_name
from torchrelay.stores.writer.file_writer import FileWriter


class Broken(Keep):
    def wanted(self, steps: Sequence[int]) -> set[int]:
        raise ZeroDivisionError("a policy of the user's own")


def test_a_policy_that_raises_does_not_fail_a_committed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tr.Checkpointer(tmp_path, keep=Broken()) as ckpt:
        assert ckpt.save(1, state(1)).step == 1
        saved = ckpt.save_async(2, state(2)).result(60)
        assert saved is not None and ckpt.steps() == [1, 2]
    assert "ZeroDivisionError: a policy of the user's own" in caplog.text


def test_retention_trusts_no_memory_of_a_step_having_been_good(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, keep=tr.KeepLast(2)) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
        os.truncate(tmp_path / "step-2" / "model.safetensors", 9)
        ckpt.save(3, state(3))
        assert 1 in ckpt.steps() and which(ckpt.load(step=1).state, range(9)) == 1


AT_THE_END = """
import sys, torch, torchrelay as tr
ckpt = tr.Checkpointer(sys.argv[1], keep=tr.KeepLast(1))
ckpt.save(1, {"w": torch.ones(9)})
ckpt.save_async(2, {"w": torch.ones(9)})
"""


@pytest.mark.slow
def test_old_steps_in_a_bucket_are_removed_at_the_end_of_a_program(
    s3: S3,
) -> None:
    """The interpreter ends while the last save is being written."""
    pytest.importorskip("obstore")
    go = threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT" and "step-2" in path:
            go.wait(2)  # until the program is at its end

    s3.hook = hold
    command = [sys.executable, "-c", AT_THE_END, s3.url("run")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0 and "could not be removed" not in ran.stderr, ran.stderr
    s3.hook = None
    with tr.Checkpointer(s3.url("run")) as ckpt:
        assert ckpt.steps() == [2]


# A draft that is not what was written ------------------------------------------------------------


def after_writing(monkeypatch: pytest.MonkeyPatch, disturb: Any) -> None:
    finish = FileWriter.finish

    def disturbed(self: FileWriter) -> list[bytes]:
        digests = finish(self)
        disturb()
        return digests

    monkeypatch.setattr(FileWriter, "finish", disturbed)


@pytest.mark.parametrize("how", ["removed", "cut"])
@pytest.mark.parametrize("door", ["Checkpointer", "dcp.save"])
def test_a_file_that_is_gone_from_the_draft_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, door: str
) -> None:
    def disturb() -> None:
        (file,) = tmp_path.glob("step-2.tmp-*/model.safetensors")
        if how == "removed":
            file.unlink()
        else:
            os.truncate(file, 9)

    with tr.Checkpointer(tmp_path, no_dist=True) as ckpt:
        ckpt.save(1, state(1))
        after_writing(monkeypatch, disturb)
        with pytest.raises(
            (tr.errors.CheckpointError, dcp.CheckpointException), match=r"model\.saf"
        ):
            if door == "Checkpointer":
                ckpt.save(2, state(2))
            else:
                writer = Writer(tmp_path / "step-2")
                dcp.save({"model": state(2)["model"]}, storage_writer=writer, no_dist=True)
        monkeypatch.undo()
        assert ckpt.steps() == [1] and which(ckpt.load().state, range(9)) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_an_object_that_is_gone_from_the_draft_is_not_committed(
    s3: S3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore")
    with tr.Checkpointer(s3.url("run")) as ckpt:

        def disturb() -> None:
            (gone,) = [line for line in s3.seen("^PUT") if "model.safetensors" in line]
            assert s3.ask("DELETE", gone.split()[1].partition("?")[0])[0] == 204

        after_writing(monkeypatch, disturb)
        with pytest.raises(tr.errors.CheckpointError, match=r"model\.safetensors"):
            ckpt.save(1, state(1))
        assert ckpt.steps() == []


# A root with other things in it ------------------------------------------------------------------


def test_a_folder_inside_a_step_stops_neither_pruning_nor_overwriting(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, keep=tr.KeepLast(1)) as ckpt:
        ckpt.save(1, state(1))
        notes = tmp_path / "step-1" / "notes"
        notes.mkdir()
        (notes / "a.txt").write_text("mine")
        assert ckpt.verify(1) == 1 and ckpt.holds(1)
        ckpt.save(1, state(2), overwrite=True)
        (tmp_path / "step-1" / "notes").mkdir()
        ckpt.save(2, state(3))
        ckpt.save(3, state(4))
        assert ckpt.steps() == [3]
        assert [path.read_text() for path in tmp_path.glob("*/notes/a.txt")] == ["mine"]
    with tr.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [3] and which(ckpt.load().state, range(9)) == 4


def test_a_folder_of_a_steps_name_without_a_record_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "notes.txt").write_text("mine")
    with tr.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [] and ckpt.latest() is None
        with pytest.raises(tr.errors.StepNotFoundError):
            ckpt.load(step=5)
        with pytest.raises(
            tr.errors.CheckpointError, match=r"not a step.*manifest.*move it"
        ) as caught:
            ckpt.save(5, state(5))
        assert not isinstance(caught.value, tr.errors.StepExistsError)
        ckpt.save(5, state(5), overwrite=True)
        assert ckpt.steps() == [5] and which(ckpt.load().state, range(9)) == 5
        assert [path.read_text() for path in tmp_path.glob("*/notes.txt")] == ["mine"]


def test_a_read_only_file_system_with_leftovers_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tr.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    (tmp_path / "step-2").rename(tmp_path / "step-2.old-elsewhere-1-ab")
    host = host_name()
    (tmp_path / "step-1").rename(tmp_path / f"step-1.old-{host}-1-cd")
    (tmp_path / f"step-3.tmp-{host}-1-ef").mkdir()

    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(args[1]))

    for name in ("rename", "unlink", "remove_dir", "make_dir", "create"):
        monkeypatch.setattr(Files, name, refuse)
    with tr.Checkpointer(tmp_path) as ckpt:
        assert ckpt.steps() == [1, 2]
        assert which(ckpt.load().state, range(9)) == 2
        assert which(ckpt.load(step=1).state, range(9)) == 1
        with pytest.raises(tr.errors.CheckpointError, match="Read-only"):
            ckpt.save(3, state(3))


# A working directory with other modules in it ----------------------------------------------------

PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import os, torch, torchrelay as tr
ckpt = tr.Checkpointer({root!r})
ckpt.save(0, {{"w": torch.ones(9)}})
os.chdir({shadows!r})
sys.path.insert(0, {shadows!r})
print(ckpt.save_async(1, {{"w": torch.ones(9)}}).result(60).step)
ckpt.close()
"""


def test_modules_in_the_working_directory_do_not_break_the_writer_process(tmp_path: Path) -> None:
    shadows = tmp_path / "shadows"
    shadows.mkdir()
    for name in ("queue", "types", "socket", "ctypes", "msgspec", "torchrelay", "enum"):
        (shadows / f"{name}.py").write_text(f"raise RuntimeError('the wrong {name}')\n")
    sources = [str(Path(module.__file__).parents[1]) for module in (tr, msgspec, xxhash, numpy)]
    program = PROGRAM.format(paths=sources, shadows=str(shadows), root=str(tmp_path / "root"))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(shadows / "nowhere")},
    )
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr
    assert torch.equal(tr.Checkpointer(tmp_path / "root").load().state["w"], torch.ones(9))
