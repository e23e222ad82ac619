"""What a `Pending` says while its save is written, and after."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from concurrent import futures
from pathlib import Path

import pytest

import torchrelay as tr
from tests.support.cuts import stores_with
from tests.support.saved import state, which
from torchrelay.stores.local.files import Files


class HeldCommit(Files):
    """A medium on which a commit waits until it may go on."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def rename(self, old: str, new: str) -> None:
        assert self.go.wait(60)
        super().rename(old, new)


def interrupt_soon() -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("ask", ["exception", "result"])
def test_an_interrupt_while_waiting_is_raised_and_the_save_is_finished(
    tmp_path: Path, ask: str
) -> None:
    files = HeldCommit()
    with stores_with(files):
        ckpt = tr.Checkpointer(tmp_path, no_dist=True, timeout=60)
    with ckpt:
        pending = ckpt.save_async(1, state(1))
        with pytest.raises(KeyboardInterrupt):
            interrupt_soon()
            getattr(pending, ask)(30)
        assert not pending.done()
        files.go.set()
        assert pending.exception(30) is None
        assert which(ckpt.load().state, [1]) == 1


def test_it_is_a_future_of_the_standard_library(tmp_path: Path) -> None:
    files = HeldCommit()
    with stores_with(files):
        ckpt = tr.Checkpointer(tmp_path, no_dist=True, timeout=60)
    with ckpt:
        called: queue.SimpleQueue[tr.Pending] = queue.SimpleQueue()
        pending = ckpt.save_async(1, state(1))
        pending.add_done_callback(called.put)
        assert isinstance(pending, futures.Future) and pending.running() and not pending.cancel()
        assert futures.wait([pending], timeout=0) == (set(), {pending})
        assert called.empty()
        files.go.set()
        assert list(futures.as_completed([pending], timeout=60)) == [pending]
        assert called.get(timeout=60) is pending and pending.succeeded()

        async def awaited() -> tr.Report:
            return await asyncio.wrap_future(ckpt.save_async(2, state(2)))

        report = asyncio.run(awaited())
        assert (report.step, report.skipped) == (2, None)


def test_a_save_that_is_skipped_says_so_in_its_result(tmp_path: Path) -> None:
    files = HeldCommit()
    with stores_with(files):
        ckpt = tr.Checkpointer(tmp_path, no_dist=True, timeout=60)
    with ckpt:
        first = ckpt.save_async(1, state(1))
        second = ckpt.save_async(2, state(2), on_busy="skip")
        report = second.result(0)
        assert report.skipped == second.skipped == "another save is in progress"
        assert (report.step, report.bytes) == (2, 0) and not second.succeeded()
        assert str(report) == "step 2: skipped: another save is in progress"
        files.go.set()
        assert first.result(60).skipped is None and ckpt.steps() == [1]


def test_a_failure_is_that_of_the_future(tmp_path: Path) -> None:
    files = HeldCommit()
    files.rename = refuse  # type: ignore[method-assign]
    with stores_with(files):
        ckpt = tr.Checkpointer(tmp_path, no_dist=True, timeout=60)
    pending = ckpt.save_async(1, state(1), on_error="warn")
    futures.wait([pending], timeout=60)
    assert isinstance(pending.exception(0), tr.errors.CheckpointError) and not pending.succeeded()
    with pytest.raises(tr.errors.CheckpointError, match="Permission denied"):
        pending.result(0)
    ckpt.close()


def refuse(old: str, new: str) -> None:
    raise PermissionError(13, "Permission denied", new)
