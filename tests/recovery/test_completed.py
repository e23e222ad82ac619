"""A source that fails is not the end of a recovery: others give the chunks that it did not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.forge import flip
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.front import Endpoint
from torchrelay.progress import Progress
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.stores.reading import chunks as reading

MEGABYTES = 24


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(1 << 18, generator=generator) for n in range(MEGABYTES)}


def blank() -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in state().items()}


def saved(root: Path, step: int = 5) -> Path:
    with tr.Checkpointer(root, no_dist=True) as there:
        there.save(step, state())
    (file,) = (root / f"step-{step}").glob("*.safetensors")
    return file


def check(into: dict[str, Any]) -> None:
    for name, value in state().items():
        assert torch.equal(into[name], value), name


@pytest.mark.parametrize("atomic", [True, False])
def test_damaged_chunks_come_from_another_place(tmp_path: Path, atomic: bool) -> None:
    """Each place has its own damage; together they have everything."""
    first, second = saved(tmp_path / "first"), saved(tmp_path / "second")
    size = first.stat().st_size
    flip(first, size // 2)
    flip(second, size - 5)
    into = blank()
    got = tr.recover(
        into=into,
        sources=[first.parents[1], second.parents[1]],
        timeout=60,
        options=tr.options.RecoverOptions(atomic=atomic),
    )
    check(into)
    one, other = str(first.parents[1]), str(second.parents[1])
    given = got.report.sources
    assert set(given) == {one, other}
    assert 0 < given[other] <= 1 << 20, "one chunk came from the second place"
    lines = str(got.report).splitlines()[1:]
    assert one in lines[0] and "except" in lines[0] and "are not those written" in lines[0]
    assert other in lines[1] and "bytes that the one taken did not give are from here" in lines[1]


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_files_that_are_cut_or_gone_come_from_another_place(tmp_path: Path, harm: str) -> None:
    first, second = saved(tmp_path / "first"), saved(tmp_path / "second")
    if harm == "gone":
        first.unlink()
    else:
        os.truncate(first, first.stat().st_size // 2)
    into = blank()
    got = tr.recover(into=into, sources=[first.parents[1], second.parents[1]], timeout=60)
    check(into)
    assert sum(got.report.sources.values()) >= got.report.bytes


def test_damage_in_both_places_is_no_state(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "first"), saved(tmp_path / "second")
    middle = first.stat().st_size // 2
    flip(first, middle)
    flip(second, middle)
    into = blank()
    with pytest.raises(tr.errors.RecoveryError) as nothing:
        tr.recover(into=into, sources=[first.parents[1], second.parents[1]], timeout=60)
    assert str(nothing.value).count("step 5 was passed over") == 2
    assert not any(value.any() for value in into.values()), "the destination is as it was"


def test_other_bytes_of_the_same_step_are_not_mixed_in(tmp_path: Path) -> None:
    first = saved(tmp_path / "first")
    flip(first, first.stat().st_size // 2)
    with tr.Checkpointer(tmp_path / "other", no_dist=True) as there:
        there.save(5, state(seed=9))
    into = blank()
    got = tr.recover(into=into, sources=[first.parents[1], tmp_path / "other"], timeout=60)
    assert got.report.source == str(tmp_path / "other")
    for name, value in state(seed=9).items():
        assert torch.equal(into[name], value)


class FarEndpoint:
    """An endpoint that is read over TCP, and killed when some of the step has come. It counts how
    often it was asked."""

    cost = 1

    def __init__(self, endpoint: Endpoint) -> None:
        self._source = EndpointSource(endpoint.url, same_host=False)
        self.name, self.pid = endpoint.url, endpoint._server.process.pid
        self.end = self._source.end
        self.asked: list[str] = []

    def steps(self, deadline: Deadline) -> list[int]:
        self.asked.append("steps")
        return self._source.steps(deadline)

    def open(self, step: int, deadline: Deadline) -> RemoteStep:
        self.asked.append("open")
        return self._source.open(step, deadline)


def test_a_source_is_listed_once_and_its_step_opened_once(tmp_path: Path) -> None:
    disk = saved(tmp_path / "disk").parents[1]
    with tr.serve(state(), step=5, no_dist=True, timeout=60) as endpoint:
        far = FarEndpoint(endpoint)
        into = blank()
        got = tr.recover(into=into, sources=[disk, far], timeout=60)
    check(into)
    assert got.report.source == far.name and far.asked == ["steps", "open"]


def test_an_endpoint_that_dies_half_way_is_completed_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "TASK_BYTES", 1 << 20)  # as many requests as a large state has
    disk = saved(tmp_path / "disk").parents[1]
    endpoint = tr.serve(state(), step=5, no_dist=True, timeout=60)
    far = FarEndpoint(endpoint)
    killed: list[int] = []

    def watch(progress: Progress) -> None:
        if progress.done and not killed:
            killed.append(far.pid)
            os.kill(far.pid, signal.SIGKILL)

    into = blank()
    got = tr.recover(
        into=into,
        sources=[far, disk],
        timeout=60,
        options=tr.options.RecoverOptions(progress=watch),
    )
    check(into)
    assert killed and got.report.source == far.name
    assert set(got.report.sources) == {far.name, str(disk)}
    assert 0 < got.report.sources[str(disk)] < got.report.bytes, str(got.report)
    assert "except" in str(got.report)
    endpoint.close()
