"""A place that plainly holds steps, ours or another tool's, is never a first start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrelay as tr
from tests.recovery.test_recover import Job, saved
from tests.support.s3 import S3


def reason(place: str | Path | tr.Checkpointer) -> str:
    """Why nothing is recovered from a place that is not empty."""
    with pytest.raises(tr.errors.RecoveryError) as caught:
        tr.recover(into=Job().state(), sources=[place], no_dist=True, timeout=20)
    return str(caught.value)


def _step_itself(root: Path) -> tuple[Path, str]:
    return root / "step-0", f"did you mean {root}?"


def _parent(root: Path) -> tuple[Path, str]:
    return root.parent, f"did you mean {root}?"


def _grandparent(root: Path) -> tuple[Path, str]:
    return root.parent.parent, f"did you mean {root}?"


def _lost_manifest(root: Path) -> tuple[Path, str]:
    (root / "step-0" / "manifest.json").unlink()
    return root, f"{root / 'step-0'} has the name of a step, but it has no manifest.json"


def _lost_manifest_itself(root: Path) -> tuple[Path, str]:
    (root / "step-0" / "manifest.json").unlink()
    return root / "step-0", "model.safetensors looks like a data file of a step"


def _renamed(root: Path) -> tuple[Path, str]:
    (root / "step-0").rename(root / "step-003")
    return root, f"{root / 'step-003'} looks like a step that was renamed: did you mean step-3?"


def _copied(root: Path) -> tuple[Path, str]:
    (root / "step-0").rename(root / "best")
    return root, f"{root / 'best'} has the manifest.json of a step, and is not named step-N"


def _copied_itself(root: Path) -> tuple[Path, str]:
    (root / "step-0").rename(root / "best")
    return root / "best", f"{root / 'best'} has the manifest.json of a step itself"


def _dcp(root: Path) -> tuple[Path, str]:
    shutil.rmtree(root)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root, no_dist=True)
    return root, f"{root} is a checkpoint of torch.distributed.checkpoint"


def _dcp_steps(root: Path) -> tuple[Path, str]:
    shutil.rmtree(root)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root / "step-5", no_dist=True)
    return root, f"{root / 'step-5'} is a checkpoint of torch.distributed.checkpoint"


def _other_tool(name: str) -> Callable[[Path], tuple[Path, str]]:
    def make(root: Path) -> tuple[Path, str]:
        shutil.rmtree(root)
        place = root / name
        place.parent.mkdir(parents=True)
        place.touch()
        return root, name.partition("/")[0]

    return make


CASES: dict[str, Callable[[Path], tuple[Path, str]]] = {
    "a step": _step_itself,
    "the parent": _parent,
    "the parent of the parent": _grandparent,
    "without its manifest": _lost_manifest,
    "a step without its manifest": _lost_manifest_itself,
    "renamed": _renamed,
    "copied": _copied,
    "a step that was copied": _copied_itself,
    "dcp": _dcp,
    "steps of dcp": _dcp_steps,
    **{
        name: _other_tool(name)
        for name in (
            "checkpoint-500/model.safetensors",
            "epoch=3-step=100.ckpt",
            "global_step100/mp_rank_00_model_states.pt",
            "iter_0000100/model_optim_rng.pt",
            "step_7/state.bin",
            "STEP-7/state.bin",
            "ckpt12.pt",
            "last.ckpt",
            "3/_CHECKPOINT_METADATA",
            "latest_checkpointed_iteration.txt",
        )
    },
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("named", [True, False])
def test_a_directory_that_holds_steps_is_no_first_start(
    make: Callable[[Path], tuple[Path, str]], named: bool, tmp_path: Path
) -> None:
    root = tmp_path / "runs" / "a" / "b"
    saved(root, Job())
    place, text = make(root)
    if named:
        assert text in reason(place)
    else:
        with tr.Checkpointer(
            place, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
        ) as there:
            assert text in reason(there)


def first_start(place: str | Path) -> bool:
    got = tr.recover(into=Job().state(), sources=[place], no_dist=True, timeout=20)
    with tr.Checkpointer(
        place, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as there:
        return got is None and there.restore(Job().state()) is None


def test_what_is_no_step_does_not_end_a_first_start(tmp_path: Path) -> None:
    """Drafts of saves that were killed, logs, settings, the code of the job."""
    draft = tmp_path / "step-7.tmp-host-12-9f2c33aa"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"1")
    moved = tmp_path / "step-6.old-host-12-9f2c33aa"
    moved.mkdir()
    (tmp_path / "logs" / "version_0").mkdir(parents=True)
    (tmp_path / "logs" / "version_0" / "events.out.tfevents.17.host").touch()
    (tmp_path / ".git" / "step-3").mkdir(parents=True)
    (tmp_path / ".git" / "step-3" / "manifest.json").touch()
    for name in ("config.json", "train.py", "metrics.csv", "step.log", "stepping-stones.txt"):
        (tmp_path / name).touch()
    assert first_start(tmp_path)


def test_a_bucket_that_holds_steps_is_no_first_start(s3: S3, tmp_path: Path) -> None:
    with tr.Checkpointer(s3.url("runs/a"), no_dist=True) as there:
        there.save(3, {"w": torch.ones(3)})
    assert f"did you mean {s3.url('runs/a')}?" in reason(s3.url("runs/a/step-3"))
    assert f"did you mean {s3.url('runs/a')}?" in reason(s3.url("runs"))
    for key, text in (
        ("b/step-003/manifest.json", "did you mean step-3?"),
        ("c/checkpoint-500/model.safetensors", "checkpoint-500"),
        ("d/.metadata", "torch.distributed.checkpoint"),
        ("e/step-4/model.safetensors", "step-4 has the name of a step"),
    ):
        assert s3.ask("PUT", f"/bucket/{key}", b"x")[0] == 200
        assert text in reason(s3.url(key[0]))
    assert s3.ask("PUT", "/bucket/f/step-4/host-7-0a0a0a0a/model.safetensors", b"x")[0] == 200
    assert s3.ask("PUT", "/bucket/f/", b"")[0] == 200  # a "folder" of the web console
    assert first_start(s3.url("f"))
    assert first_start(s3.url("nothing"))
