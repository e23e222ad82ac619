"""A state comes back from the freshest place that verifies, and the report says why from there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import torchrelay as tr
from tests.support import flat
from tests.support.forge import flip
from torchrelay.endpoint.reshare.seed import Seed
from torchrelay.record.encoding import decode_at_rest, encode_at_rest
from torchrelay.sources.endpoint import EndpointSource


class Job:
    """A training whose data depend on the step alone."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.step}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            torch.manual_seed(100 + self.step)
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            self.step += 1
        return losses

    def take(self, got: tr.Loaded) -> None:
        self.step = got.state["step"]


def losses_of_an_undisturbed_run(steps: int) -> list[float]:
    return Job().train(steps)


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL at which nobody answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def saved(root: Path, job: Job) -> None:
    with tr.Checkpointer(root, no_dist=True) as there:
        there.save(job.step, job.state())


def damage(root: Path, step: int) -> None:
    file = root / f"step-{step}" / "model.safetensors"
    flip(file, file.stat().st_size - 9)


def test_damage_and_distance_are_passed_over_and_explained(tmp_path: Path, nobody: str) -> None:
    """The newest steps on two disks have a flipped byte, a live peer is one step behind, and an
    endpoint cannot be reached."""
    job = Job()
    job.train(3)
    saved(tmp_path / "disk", job)
    job.train(1)
    with tr.serve(job.state(), step=4, no_dist=True, timeout=60) as peer:
        job.train(1)
        for name in ("disk", "buddy"):
            saved(tmp_path / name, job)
            damage(tmp_path / name, 5)
        sources = [tmp_path / "disk", str(tmp_path / "buddy"), nobody, peer.url]
        again = Job()
        got = tr.recover(into=again.state(), sources=sources, timeout=60)
        assert got.step == 4 and got.report.source == peer.url
        lines = str(got.report).splitlines()
        assert len(lines) == 6
        for line, words in zip(
            lines,
            (
                ("step 4:", "bytes"),
                ("disk", "step 5 was passed over", "its other steps are behind step 4"),
                ("buddy", "step 5 was passed over", "are not those written"),
                (nobody, "no step", "does not answer"),
                (peer.url, "step 4 was taken"),
                ("ask", "land"),
            ),
            strict=True,
        ):
            assert all(word in line for word in words), line
        again.take(got)
        assert again.train(6) == losses_of_an_undisturbed_run(10)[4:]
        before = {name: value.clone() for name, value in again.model.state_dict().items()}
        with pytest.raises(tr.errors.RecoveryError) as nothing:
            tr.recover(into=again.state(), sources=sources, min_step=5, timeout=60)
        text = str(nothing.value)
        assert all(name in text for name in ("disk", "buddy", nobody, peer.url)), text
        assert "below min_step, 5" in text and text.count("step 5 was passed over") == 2
        after = again.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_an_older_step_of_a_damaged_place_is_taken(tmp_path: Path) -> None:
    job = Job()
    for _ in range(2):
        job.train(1)
        saved(tmp_path, job)
    damage(tmp_path, 2)
    with tr.Checkpointer(tmp_path, no_dist=True) as there:
        got = tr.recover(into=Job().state(), sources=[there], timeout=60)
    assert got.step == 1
    assert "step 2 was passed over" in str(got.report)


def test_memory_is_nearer_than_a_disk(tmp_path: Path) -> None:
    job = Job()
    saved(tmp_path, job)
    with tr.serve(job.state(), step=0, no_dist=True, timeout=60) as peer:
        got = tr.recover(sources=[tmp_path, peer.url], timeout=60)
    assert got.report.source == peer.url
    assert "another source is nearer" in str(got.report)


def make_old(root: Path, step: int) -> None:
    record = root / f"step-{step}" / "manifest.json"
    found = decode_at_rest(record.read_bytes())
    origin = msgspec.structs.replace(found.saved, time="2020-01-01T00:00:00Z")
    record.write_bytes(encode_at_rest(msgspec.structs.replace(found, origin=origin)))


def test_a_lower_step_that_is_fresh_is_taken(tmp_path: Path) -> None:
    """It was saved again after the higher ones, with overwrite=True."""
    job = Job()
    for _ in range(5):
        saved(tmp_path, job)
        job.train(1)
    for step in (4, 3, 2, 0):
        make_old(tmp_path, step)
    got = tr.recover(
        into=Job().state(),
        sources=[tmp_path],
        timeout=60,
        options=tr.options.RecoverOptions(max_age_seconds=600),
    )
    assert got.step == 1
    text = str(got.report)
    assert "step 4 was passed over" in text and "2 other steps are too old" in text, text
    make_old(tmp_path, 1)
    with pytest.raises(tr.errors.RecoveryError, match="4 other steps are too old"):
        tr.recover(
            sources=[tmp_path], timeout=60, options=tr.options.RecoverOptions(max_age_seconds=600)
        )


def test_what_is_too_old_is_not_taken(tmp_path: Path) -> None:
    job = Job()
    saved(tmp_path, job)
    make_old(tmp_path, 0)
    with pytest.raises(tr.errors.RecoveryError, match="max_age is 60 s"):
        tr.recover(
            sources=[tmp_path], timeout=60, options=tr.options.RecoverOptions(max_age_seconds=60)
        )
    assert tr.recover(sources=[tmp_path], timeout=60).step == 0


def test_a_state_that_does_not_fit_is_no_reason_to_go_back(tmp_path: Path) -> None:
    job = Job()
    saved(tmp_path, job)
    with pytest.raises(tr.errors.MismatchError):
        tr.recover(into={"model": nn.Linear(8, 4)}, sources=[tmp_path], timeout=60)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sources": []},
        {"sources": [7]},
        {"sources": ["x"], "min_step": -1},
        {"sources": ["x"], "device": "moon"},
    ],
)
def test_bad_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(tr.errors.UsageError):
        flat.recover(**wrong)


def test_parts_of_a_state_are_recovered(tmp_path: Path) -> None:
    job = Job()
    job.train(2)
    saved(tmp_path, job)
    again = Job()
    got = tr.recover(into=again.model, key="model", sources=[tmp_path], timeout=60)
    assert got.step == 2 and got.state is again.model
    for name, value in job.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    assert set(tr.recover(include="step", sources=[tmp_path], timeout=60).state) == {"step"}
    with pytest.raises(tr.errors.MismatchError, match="model, optimizer, step"):
        tr.recover(key="modle", sources=[tmp_path], timeout=60)


def test_new_tensors_keep_the_memory_that_was_served_to_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step was fetched into memory of this process: it is there once, and not copied."""
    lent: list[int] = []
    real = Seed.lend

    def lend(self: Seed, name: str, start: int, nbytes: int) -> memoryview:
        lent.append(nbytes)
        return real(self, name, start, nbytes)

    monkeypatch.setattr(Seed, "lend", lend)
    state = {"w": torch.randn(2000, 1000), "step": 4}
    with tr.serve(state, step=4, timeout=60) as endpoint:
        source = EndpointSource(endpoint.url, same_host=False)
        got = tr.recover(
            sources=[source],
            no_dist=True,
            timeout=60,
            options=tr.options.RecoverOptions(reshare=True),
        )
    assert lent == [state["w"].nbytes] and got.step == 4
    assert torch.equal(got.state["w"], state["w"])
    got.state["w"].add_(1)  # the seed is closed: the memory is the tensor's
    assert torch.equal(got.state["w"], state["w"] + 1)
