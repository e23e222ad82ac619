"""Sources that lie, drip or do not fit: a recovery uses the others, and names what was wrong."""

from __future__ import annotations

import socket
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay as tr
from tests.endpoint.liars import answering, asked
from tests.recovery.test_recover import Job, damage, saved
from torchrelay.deadlines import Deadline
from torchrelay.sources.places import StoreSource


def lists(body: bytes) -> Any:
    """A server that lists steps and has nothing else."""

    def act(line: socket.socket) -> None:
        while True:
            first = asked(line)
            said = body if "/steps.json" in first else b"no\n"
            status = "200 OK" if "/steps.json" in first else "404 Not Found"
            line.sendall(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(said)}\r\n\r\n".encode() + said
            )

    return act


HUGE = [
    b'{"steps":[{"step":1000000000000000000000000000000,"snapshot":"%s","bytes":1}]}' % (b"0" * 32),
    b'{"steps":[{"step":9223372036854775808,"snapshot":"%s","bytes":1}]}' % (b"0" * 32),
    b'{"steps":[{"step":-1,"snapshot":"%s","bytes":1}]}' % (b"0" * 32),
    b'{"steps":[{"step":7,"snapshot":"%s","bytes":1e99}]}' % (b"0" * 32),
    b'{"steps":[{"step":7,"snapshot":"zz","bytes":1}]}',
    b'{"steps":[{"step":7,"snapshot":"%s","bytes":1,"volumes":-5}]}' % (b"0" * 32),
]


@pytest.mark.parametrize("body", HUGE)
def test_numbers_out_of_range_are_refused_and_the_honest_source_is_used(
    tmp_path: Path, body: bytes
) -> None:
    job = Job()
    job.train(1)
    saved(tmp_path, job)
    with answering(lists(body)) as liar, tr.serve(job.state(), step=1, no_dist=True) as good:
        got = tr.recover(into=Job().state(), sources=[liar, tmp_path], no_dist=True, timeout=20)
        assert got.step == 1 and got.report.source == str(tmp_path)
        pulled = tr.pull([liar, good.url], no_dist=True, timeout=20)
        assert pulled.step == 1 and liar in pulled.report.failed
        with pytest.raises(tr.errors.RelayError):
            tr.pull(liar, no_dist=True, timeout=5)


class Dripping(StoreSource):
    """A near source with many newer steps, which takes all the time that it is given."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.cost = 0
        self.opened = 0

    def open(self, step: int, deadline: Deadline) -> Any:
        self.opened += 1
        while not deadline.passed:
            time.sleep(0.01)
        raise tr.errors.TransferTimeoutError("no time is left to read the step", phase="data")


def test_a_source_that_drips_is_dropped_with_all_its_steps(tmp_path: Path) -> None:
    job = Job()
    saved(tmp_path / "good", job)
    for _ in range(10):
        job.train(1)
        saved(tmp_path / "slow", job)
    slow = Dripping(tmp_path / "slow")
    got = tr.recover(into=Job().state(), sources=[slow, tmp_path / "good"], no_dist=True, timeout=4)
    assert got.step == 0 and slow.opened == 1
    assert "no time is left" in str(got.report)


def test_a_mismatch_names_the_source_and_the_step(tmp_path: Path) -> None:
    saved(tmp_path, Job())
    with pytest.raises(tr.errors.MismatchError) as caught:
        tr.recover(into={"model": nn.Linear(8, 4)}, sources=[tmp_path], no_dist=True, timeout=60)
    assert str(tmp_path) in str(caught.value) and caught.value.step == 0


def test_a_source_that_does_not_fit_is_skipped_where_another_fits(tmp_path: Path) -> None:
    """A newer step of another model is no reason to fail; it is named in a warning."""
    with tr.Checkpointer(tmp_path / "other", no_dist=True) as there:
        for step in (50, 60):
            there.save(step, {"model": nn.Linear(3, 3).state_dict(), "step": step})
    job = Job()
    job.train(2)
    saved(tmp_path / "run", job)
    again = Job()
    with pytest.warns(RuntimeWarning, match="other.*does not fit"):
        sources = [tmp_path / "other", tmp_path / "run"]
        got = tr.recover(into=again.state(), sources=sources, no_dist=True, timeout=60)
    assert got.step == 2 and got.report.source == str(tmp_path / "run")
    assert "does not fit" in str(got.report)
    with warnings.catch_warnings(), pytest.raises(tr.errors.MismatchError, match="other"):
        warnings.simplefilter("ignore")
        tr.recover(into=again.state(), sources=[tmp_path / "other"], no_dist=True, timeout=60)


def test_older_steps_of_a_source_that_does_not_fit_are_not_taken(tmp_path: Path) -> None:
    """The run has changed its model since: that is a mistake to be told, not to be undone."""
    saved(tmp_path, Job())
    with tr.Checkpointer(tmp_path, no_dist=True) as there:
        there.save(9, {"model": nn.Linear(3, 3).state_dict(), "step": 9})
    with warnings.catch_warnings(), pytest.raises(tr.errors.MismatchError) as caught:
        warnings.simplefilter("ignore")
        tr.recover(into=Job().state(), sources=[tmp_path], no_dist=True, timeout=60)
    assert caught.value.step == 9


def test_a_source_that_fits_but_is_damaged_does_not_hide_the_mismatch(tmp_path: Path) -> None:
    job = Job()
    saved(tmp_path / "run", job)
    damage(tmp_path / "run", 0)
    with tr.Checkpointer(tmp_path / "other", no_dist=True) as there:
        there.save(9, {"model": {"w": torch.ones(3)}, "step": 9})
    with warnings.catch_warnings(), pytest.raises(tr.errors.RelayError) as caught:
        warnings.simplefilter("ignore")
        sources = [tmp_path / "other", tmp_path / "run"]
        tr.recover(into=Job().state(), sources=sources, no_dist=True, timeout=60)
    assert "other" in str(caught.value)
