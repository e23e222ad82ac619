"""A step costs what changed: files that did not are taken from the step before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torchrelay as tr
from tests.support.commands import command
from torchrelay.cli.commands.contents import verified
from torchrelay.cli.output import in_words
from torchrelay.options import CheckpointerOptions
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.reuse import CommittedFiles
from torchrelay.stores.local.step import LocalReader

SAVES = ["save", "save_async"]


class Job:
    """A large model that is not trained, and a small one that is."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        base = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
        self.model = torch.nn.ModuleDict({"base": base.requires_grad_(False)})
        self.model["adapter"] = torch.nn.Linear(512, 16)
        self.optimizer = torch.optim.AdamW(self.model["adapter"].parameters())

    def train(self) -> None:
        out = self.model["adapter"](self.model["base"](torch.ones(1, 512)))
        out.square().sum().backward()
        self.optimizer.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def dicts(self) -> dict[str, Any]:
        return {key: one.state_dict() for key, one in self.objects.items()}

    def copy(self) -> dict[str, torch.Tensor]:
        return {key: one.clone() for key, one in self.model.state_dict().items()}


def options(**chosen: Any) -> CheckpointerOptions:
    return CheckpointerOptions(**chosen)


def save(how: str, held: tr.Checkpointer, step: int, state: object, **more: Any) -> tr.Report:
    if how == "save":
        return held.save(step, state, **more)
    report = held.save_async(step, state, **more).result(timeout=60)
    assert isinstance(report, tr.Report)
    return report


def links(root: Path, step: int) -> dict[str, int]:
    files = (root / f"step-{step}").glob("*.safetensors")
    return {file.name: file.stat().st_nlink for file in files}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "steps"


@pytest.mark.parametrize("how", SAVES)
def test_a_frozen_model_is_written_once(how: str, root: Path) -> None:
    job, kept = Job(), {}
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in range(1, 5):
            job.train()
            kept[step] = job.copy()
            report = save(how, held, step, job.objects)
            trained = 3 * 4 * (512 * 16 + 16)
            if step == 1:
                assert report.bytes_reused == 0 and report.bytes_written == report.bytes
            else:
                assert report.bytes_reused > 8 << 20
                assert report.bytes_written is not None
                assert report.bytes_written < 1.1 * trained + 8192
                assert report.bytes == report.bytes_written + report.bytes_reused
            assert "reused" in str(report) or step == 1
            saved = held.record(step).saved
            assert (saved.reused, saved.since_full) == (report.bytes_reused, step - 1)
        assert max(links(root, 4).values()) == 4
        for order in (2, 4, 1):  # what others still have stays
            held.delete(order)
        assert held.steps() == [3] and held.verify(3) == 3
        for key, one in held.load(step=3).state["model"].items():
            assert torch.equal(one, kept[3][key])


@pytest.mark.parametrize("how", SAVES)
def test_it_is_learned_where_no_flag_tells(how: str, root: Path) -> None:
    """A module's state dict has detached tensors: whether they are trained is not known."""
    job, written = Job(), []
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in range(1, 7):
            job.train()
            written.append(save(how, held, step, job.dicts).bytes_written)
            got = held.load(step=step).state["model"]
            assert all(torch.equal(one, got[key]) for key, one in job.copy().items())
    trained = 3 * 4 * (512 * 16 + 16)
    assert all(one is not None and one < 1.1 * trained + 8192 for one in written[2:]), written


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.parametrize("change", ["data", "view", "in place", "foreach", "swap", "set"])
def test_a_write_that_autograd_does_not_see_is_found(how: str, change: str, root: Path) -> None:
    job = Job()
    weights = [layer.weight for layer in job.model["base"]]
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2):
            save(how, held, step, job.objects)
        before = job.copy()
        if change == "data":
            weights[3].data[100, 7] += 1
        elif change == "view":
            weights[3].detach().numpy()[0, 0] = 5  # no version counter sees it
        elif change == "in place":
            with torch.no_grad():
                weights[3].mul_(2)
        elif change == "foreach":
            torch._foreach_add_([one.data for one in weights[:2]], 1.0)
        elif change == "swap":
            weights[1].data, weights[2].data = weights[2].data, weights[1].data
        else:
            with torch.no_grad():
                weights[7].set_(torch.randn(512, 512))
        after = job.copy()
        assert any(not torch.equal(before[key], after[key]) for key in after)
        for step in (3, 4):
            save(how, held, step, job.objects)
        for step, expected in ((2, before), (3, after), (4, after)):
            got = held.load(step=step).state["model"]
            assert all(torch.equal(one, got[key]) for key, one in expected.items())


@pytest.mark.parametrize("how", SAVES)
def test_adapters_between_the_tensors_of_a_model(how: str, root: Path) -> None:
    """As LoRA has them: each large tensor has small ones next to it that are trained."""
    torch.manual_seed(1)
    names = [f"{n}.{part}" for n in range(8) for part in ("base.weight", "lora_A", "lora_B")]
    state = {
        name: torch.randn(512, 512) if "base" in name else torch.randn(4, 512) for name in names
    }
    written = []
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in range(1, 8):
            for name in names:
                if "lora" in name:
                    state[name] += 1
            written.append(save(how, held, step, {"model": state}).bytes_written)
            got = held.load(step=step).state["model"]
            assert all(torch.equal(one, got[name]) for name, one in state.items())
    trained = 16 * 4 * 512 * 4
    assert all(one is not None and one < 1.1 * trained for one in written[2:]), written


def test_what_thaws_moves_once_and_what_rests_stays_linked(root: Path) -> None:
    job, chosen = Job(), options(file_bytes=3 << 20)
    with tr.Checkpointer(root, no_dist=True, options=chosen) as held:
        for step in (1, 2):
            job.train()
            held.save(step, job.objects)
        written = []
        for step in range(3, 8):
            job.train()
            job.model["base"][3].weight.data.add_(1)
            written.append(held.save(step, job.objects).bytes_written)
    total = 8 * 4 * 512 * 513
    assert written[0] is not None and written[0] < total / 2  # its file, not all files
    assert written[-1] is not None and written[-1] < 1.5 * 4 * 512 * 512, written


def test_nothing_is_reused_where_that_is_not_wanted(root: Path) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True, options=options(reuse=False)) as held:
        for step in (1, 2, 3):
            assert held.save(step, job.objects).bytes_reused == 0
        assert set(links(root, 3)) == {"model.safetensors"}
        assert set(links(root, 3).values()) == {1}


def test_a_full_step_now_and_then(root: Path) -> None:
    job, since = Job(), []
    for first in (1, 4, 7):  # also over restarts
        with tr.Checkpointer(root, no_dist=True, options=options(full_every=3)) as held:
            for step in range(first, first + 3):
                job.train()
                held.save(step, job.objects)
                since.append(held.record(step).saved.since_full)
    assert since == [0, 1, 2, 0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", True])
def test_full_every_is_a_number_of_saves(value: Any, root: Path) -> None:
    with pytest.raises(tr.errors.UsageError, match="full_every"):
        tr.Checkpointer(root, no_dist=True, options=options(full_every=value))


def test_a_restarted_job_reuses_from_its_first_save(root: Path) -> None:
    job = Job()
    for first in (1, 3):
        with tr.Checkpointer(root, no_dist=True) as held:
            for step in (first, first + 1):
                job.train()
                report = held.save(step, job.objects)
                assert bool(report.bytes_reused) == (step > 1)


def test_a_step_that_was_saved_again_is_another_one(root: Path) -> None:
    """A rollback, an overwrite by another process: nothing is taken from what is gone."""
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2, 3):
            job.train()
            held.save(step, job.objects)
        held.rollback(1)
        job.train()
        assert held.save(2, job.objects).bytes_reused > 0  # of step 1
        job.model["base"][0].weight.data.zero_()
        with tr.Checkpointer(root, no_dist=True) as other:
            other.save(2, job.objects, overwrite=True)
        job.train()
        held.save(3, job.objects)
        got = held.load(step=3).state["model"]
        assert all(torch.equal(one, got[key]) for key, one in job.copy().items())
        held.save(3, job.objects, overwrite=True)
        assert held.verify(3) == 3


def test_retention_keeps_the_bytes_of_steps_that_stay(root: Path) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True, keep=2) as held:
        for step in range(1, 9):
            job.train()
            held.save(step, job.objects)
        assert held.steps() == [7, 8]
        assert all(held.verify(step) == step for step in (7, 8))
        assert max(links(root, 8).values()) == 2


class NoLinks(Files):
    code = errno.EPERM

    def link(self, name: str, within: int | str, path: str) -> None:
        raise OSError(self.code, os.strerror(self.code), path)


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[NoLinks]]:
    monkeypatch.setattr(Files, "link", NoLinks.link)
    monkeypatch.setattr(Files, "code", errno.EPERM, raising=False)
    yield NoLinks


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_without_links_the_bytes_are_written(
    code: int, root: Path, no_links: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "code", code, raising=False)
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2, 3):
            job.train()
            report = held.save(step, job.objects)
            assert report.bytes_reused == 0 and report.bytes_written == report.bytes
            assert report.instead == ({"link": os.strerror(code)} if step > 1 else {})
            assert held.verify(step) == step
        assert set(links(root, 3).values()) == {1}


def flip(file: Path, at: int = -1000) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    with file.open("r+b") as there:  # the same file, under all of its names
        there.write(content)


def shared_file(root: Path, step: int) -> Path:
    return next(root / f"step-{step}" / name for name, n in links(root, step).items() if n > 1)


def test_damage_without_links_is_not_carried_on(root: Path, no_links: object) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        held.save(1, job.objects)
        largest = max((root / "step-1").iterdir(), key=lambda file: file.stat().st_size)
        flip(largest)
        with pytest.raises(tr.errors.CheckpointError, match="damaged in step 1") as caught:
            held.save(2, job.objects)
        assert caught.value.phase == "reuse"
        held.save(2, job.objects)  # of memory, all of it
        assert held.verify(2) == 2 and held.steps() == [1, 2]


def test_a_damaged_file_is_damaged_in_every_step_that_has_it(root: Path) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        held.save(1, job.objects)
        before = job.copy()
        job.model["base"][0].weight.data.add_(1)
        for step in (2, 3, 4):
            job.train()
            held.save(step, job.objects)
        flip(shared_file(root, 4))
        for step in (2, 3, 4):
            with pytest.raises(tr.errors.DamagedError, match=f"step-{step}|step {step}"):
                held.verify(step)
        with pytest.warns(RuntimeWarning):
            loaded = held.load()
        assert loaded.step == 1
        assert all(torch.equal(one, before[key]) for key, one in loaded.state["model"].items())
        found = tr.recover([held.source()], no_dist=True, timeout=60)
        assert found.step == 1
        # Nothing is taken from a damaged step: the next one is whole.
        held.save(5, job.objects)
        assert held.verify(5) == 5


@pytest.mark.parametrize("seen", ["load", "verify"])
def test_damage_that_was_seen_in_an_older_step_is_not_carried_on(seen: str, root: Path) -> None:
    """The newest step has the damaged file too, and no one has read it there."""
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2, 3):
            job.train()
            held.save(step, job.objects)
        flip(shared_file(root, 3))
        with pytest.raises(tr.errors.DamagedError):
            getattr(held, seen)(step=1)
        assert held.save(4, job.objects).bytes_reused == 0 and held.verify(4) == 4
        job.train()
        assert held.save(5, job.objects).bytes_reused > 0 and held.verify(5) == 5


@pytest.mark.parametrize("how", SAVES)
def test_a_step_that_goes_during_a_save(
    how: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails, says so, and the next one writes everything."""
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        held.save(1, job.objects)
        holds = CommittedFiles.holds

        def gone(*arguments: Any) -> bool:
            found = holds(*arguments)
            shutil.rmtree(root / "step-1", ignore_errors=True)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(CommittedFiles, "holds", gone)
            with pytest.raises(tr.errors.CheckpointError) as caught:
                save(how, held, 2, job.objects)
        assert caught.value.phase == "reuse" and held.steps() == []
        assert save(how, held, 3, job.objects).bytes_reused == 0
        assert held.verify(3) == 3


def test_a_save_that_failed_for_another_reason_costs_no_more_later(root: Path) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        held.save(1, job.objects)
        with pytest.raises(tr.errors.UnsupportedLeafError):
            held.save(2, job.objects | {"bad": lambda: None})
        assert held.save(2, job.objects).bytes_reused > 0


@pytest.mark.parametrize("left", ["truncated", "removed"])
def test_a_file_that_is_not_there_any_more_is_written(left: str, root: Path) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2):
            held.save(step, job.objects)
        place = shared_file(root, 2)
        (root / "step-1" / place.name).unlink()
        place.unlink()
        if left == "truncated":
            place.write_bytes(b"short")
        report = held.save(3, job.objects)
        assert report.bytes_reused == 0 and held.verify(3) == 3


TOOLS = ["cp -r", "tar", *(["rsync -a"] if shutil.which("rsync") else [])]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_copy_of_one_step_is_complete(tool: str, root: Path, tmp_path: Path) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2, 3):
            job.train()
            held.save(step, job.objects)
    copy = tmp_path / "copy"
    copy.mkdir()
    if tool == "tar":
        subprocess.run(["tar", "cf", tmp_path / "a.tar", "-C", root, "step-3"], check=True)
        subprocess.run(["tar", "xf", tmp_path / "a.tar", "-C", copy], check=True)
    else:
        subprocess.run([*tool.split(), root / "step-3", copy], check=True)
    shutil.rmtree(root)
    with tr.Checkpointer(copy, no_dist=True) as held:
        got = held.load(step=held.verify(3)).state["model"]
        assert all(torch.equal(one, got[key]) for key, one in job.copy().items())
    loose: dict[str, torch.Tensor] = {}
    for file in sorted((copy / "step-3").glob("model*.safetensors")):
        loose.update(load_file(file))
    assert loose.keys() == job.copy().keys()
    assert all(torch.equal(one, loose[key]) for key, one in job.copy().items())


def test_hugging_face_opens_a_step(root: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=1000)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2):
            with torch.no_grad():
                model.transformer.ln_f.weight.add_(1)
            report = held.save(step, {"model": model})
        assert report.bytes_reused > 0
    config.save_pretrained(root / "step-2")
    found = transformers.GPT2LMHeadModel.from_pretrained(root / "step-2")
    expected = model.state_dict()
    assert all(torch.equal(one, expected[key]) for key, one in found.state_dict().items())


def test_space_is_needed_for_what_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2):
            held.save(step, job.objects)
        monkeypatch.setattr(type(held._store), "free_bytes", lambda self: 3 << 20)
        held.save(3, job.objects)  # 8 MiB, and little of it is written
        with (
            tr.Checkpointer(root, no_dist=True, options=options(reuse=False)) as other,
            pytest.raises(tr.errors.CheckpointError, match="no space"),
        ):
            other.save(4, job.objects)


def test_the_command_line_shows_it_and_reads_shared_bytes_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    with tr.Checkpointer(root, no_dist=True) as held:
        for step in (1, 2, 3):
            job.train()
            report = held.save(step, job.objects)
    shown = command("ls", str(root), "--json")
    assert [one["reused"] for one in json.loads(shown.stdout)] == [0] + [report.bytes_reused] * 2
    assert "reused" in command("ls", str(root)).stdout
    reads: list[str] = []
    whole = LocalReader.read_into

    def counted(reader: LocalReader, position: int, view: memoryview) -> None:
        reads.append(Path(reader._path).name)
        whole(reader, position, view)

    monkeypatch.setattr(LocalReader, "read_into", counted)
    monkeypatch.setattr(LocalReader, "read_cached", lambda *_: False)
    known: Any = set()
    for step in (1, 2, 3):
        before = len(reads)
        assert not in_words(verified(str(root), step, known=known))
        shared = [name for name in reads[before:] if links(root, step).get(name, 1) > 1]
        assert bool(shared) == (step == 1)
    flip(shared_file(root, 3))
    found = json.loads(command("verify", str(root), "--all", "--json").stdout)
    assert [bool(one["damage"]) for one in found] == [True, True, True]


def test_damage_that_the_mirror_mends_is_not_carried_on(root: Path, tmp_path: Path) -> None:
    job = Job()
    with tr.Checkpointer(root, mirror=tmp_path / "mirror", no_dist=True) as held:
        held.save(1, job.objects)
    flip(max((root / "step-1").glob("*.safetensors"), key=lambda file: file.stat().st_size))
    with tr.Checkpointer(root, mirror=tmp_path / "mirror", no_dist=True) as held:
        with pytest.warns(RuntimeWarning, match="mirror"):
            assert held.restore(job.objects) == 1
        assert held.save(2, job.objects).bytes_reused == 0 and held.verify(2) == 2
