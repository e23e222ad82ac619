"""Threads of a transfer, and exceptions of signal handlers while they are started and stopped."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from torchrelay.memory import threads
from torchrelay.transports.streams.workers import Workers

SECONDS = 20.0


def interrupted_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next thread is started, and then an exception comes up."""
    original = threads.run

    def run(*args: Any, **options: Any) -> threads.Running:
        monkeypatch.undo()
        original(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "run", run)


def test_no_job_runs_after_a_stop_whatever_came_up_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults: list[object] = []
    workers = Workers(2, faults.append)
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert go.wait(SECONDS)
        done.set()

    interrupted_after(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        workers.submit(job)
    assert begun.wait(SECONDS)
    stopping = threads.run(workers.stop, "test")
    assert not stopping.wait(0.2)  # one that does not wait is over at once
    go.set()
    assert stopping.wait(SECONDS) and done.is_set() and not faults


def test_a_stop_ends_every_thread_that_waits_for_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not known must not take what another one needs to end."""
    workers = Workers(2, lambda fault: None)
    ran = [threading.Event() for _ in range(3)]
    interrupted_after(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        workers.submit(ran[0].set)
    for event in ran[1:]:
        workers.submit(event.set)
    assert all(event.wait(SECONDS) for event in ran)
    stopping = threads.run(workers.stop, "test")
    assert stopping.wait(SECONDS)
    assert all(running.wait(SECONDS) for running in workers._running)
