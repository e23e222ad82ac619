"""Storage that does not answer: every call ends by its deadline, with a typed error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrelay as tr
from tests.support.ranks import wait_until_stopped
from tests.support.s3 import S3
from tests.support.saved import state, which
from torchrelay.dcp import Reader, Writer
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.root import StepRoot
from torchrelay.stores.local.step import LocalReader
from torchrelay.stores.local.store import LocalStore

TIMEOUT = 0.5
LATEST = 12.0
"""Seconds in which such a call is over on a machine that is busy; hung storage takes 60."""

CALLS: dict[str, list[tuple[type, str]]] = {
    "room": [(LocalStore, "free_bytes")],
    "the draft": [(Files, "make_dir")],
    "data files": [(Files, "create")],
    "data": [(Files, "write")],
    "the medium": [(Files, "sync")],
}


@contextmanager
def frozen(*calls: tuple[type, str]) -> Iterator[None]:
    """Within: these calls, and all that remove something, hang until the end."""
    thaw = threading.Event()
    calls += ((Files, "unlink"), (Files, "remove_dir"))

    def hang(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            thaw.wait(60)
            return original(*args, **options)

        return wait

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in calls:
            patch.setattr(owner, name, hang(getattr(owner, name)))
        try:
            yield
        finally:
            thaw.set()


def ended(
    call: Callable[[], object], kind: type[BaseException] = tr.errors.CheckpointError
) -> BaseException:
    """What a call raised, in time."""
    begun = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - begun < LATEST
    return caught.value


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
def test_a_save_to_a_frozen_file_system_ends_in_time(
    tmp_path: Path, what: str, background: bool
) -> None:
    if background and what in ("data files", "data"):
        pytest.skip("no such case: the writer process does that, see the stopped one")

    def save(step: int) -> object:
        if background:
            return ckpt.save_async(step, state(step), timeout=TIMEOUT).result(60)
        return ckpt.save(step, state(step), timeout=TIMEOUT)

    with tr.Checkpointer(tmp_path, timeout=30) as ckpt:
        ckpt.save(1, state(1))
        with frozen(*CALLS[what]):
            assert isinstance(ended(lambda: save(2)), tr.errors.StorageTimeoutError)
        ckpt.save(3, state(3))
        assert ckpt.steps() == [1, 3]
        assert which(ckpt.load().state, range(9)) == 3


def test_old_steps_that_cannot_be_removed_do_not_hold_up_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tr.Checkpointer(tmp_path, keep=tr.KeepLast(1), timeout=30) as ckpt:
        ckpt.save(1, state(1))
        begun = time.monotonic()
        with frozen():
            ckpt.save(2, state(2), timeout=2 * TIMEOUT)
        assert time.monotonic() - begun < LATEST
        assert "cannot remove old steps" in caplog.text
        assert ckpt.latest() == 2


def test_listing_and_reading_a_frozen_file_system_ends_in_time(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
    live = state(5)
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as ckpt:
        with frozen((StepRoot, "names")):
            calls = (ckpt.steps, ckpt.latest, lambda: ckpt.load(live), ckpt.verify)
            for call in calls:
                assert isinstance(ended(call), tr.errors.StorageTimeoutError)
            ended(lambda: tr.Checkpointer(tmp_path, timeout=TIMEOUT))
        assert which(live, range(9)) == 5
        assert ckpt.load(live).step == 1 and which(live, range(9)) == 1


@contextmanager
def frozen_reads() -> Iterator[None]:
    """Within: reads of data files hang."""
    thaw = threading.Event()
    original = LocalReader.read_into

    def wait(self: LocalReader, position: int, buffers: Sequence[memoryview]) -> None:
        thaw.wait(60)
        original(self, position, buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalReader, "read_into", wait)
        try:
            yield
        finally:
            thaw.set()


@pytest.mark.parametrize("into", [True, False], ids=["in place", "new"])
def test_reads_that_hang_while_a_state_is_landed_end_in_time(tmp_path: Path, into: bool) -> None:
    """Into new tensors nothing is lost; in place the destination is torn, and the error says so."""
    with tr.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state(1))
    live = state(5)
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as ckpt:
        with frozen_reads():
            kind = tr.errors.TornStateError if into else tr.errors.StorageTimeoutError
            fault = ended(lambda: ckpt.load(live if into else None, atomic=False), kind)
            assert "no answer in" in str(fault)
        assert ckpt.load(live, timeout=20).step == 1 and which(live, range(9)) == 1


def test_an_export_to_a_frozen_file_system_ends_in_time(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "steps", timeout=TIMEOUT) as ckpt:
        ckpt.save(1, {"model": {"w": torch.ones(3)}}, timeout=20)
        with frozen((Files, "write")):
            fault = ended(lambda: ckpt.export_hf(tmp_path / "hf"))
            assert isinstance(fault, tr.errors.StorageTimeoutError)


@pytest.mark.parametrize("where", ["the draft", "data files", "data", "the medium", "the commit"])
def test_torchs_own_save_to_a_frozen_file_system_ends_in_time(tmp_path: Path, where: str) -> None:
    writer = Writer(tmp_path / "step-1", timeout=TIMEOUT)
    calls = [(Files, "rename")] if where == "the commit" else CALLS[where]
    with frozen(*calls):
        save = partial(dcp.save, {"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
        fault = wrapped(save)
    kind = tr.errors.CommitUnknownError if where == "the commit" else tr.errors.StorageTimeoutError
    assert isinstance(fault, kind), fault


def wrapped(call: Callable[[], object]) -> BaseException:
    """What a call of torch's raised, in time, within torch's own error."""
    fault: Any = ended(call, CheckpointException)
    cause: BaseException = fault.failures[0][0]
    return cause


def test_torchs_own_load_from_a_frozen_file_system_ends_in_time(tmp_path: Path) -> None:
    saved = {"w": torch.ones(3)}
    dcp.save(saved, storage_writer=Writer(tmp_path / "step-1"), no_dist=True)
    live = {"w": torch.zeros(3)}
    for verify, kind in ((True, tr.errors.StorageTimeoutError), (False, tr.errors.TornStateError)):
        reader = Reader(tmp_path / "step-1", verify=verify, timeout=TIMEOUT)
        with frozen_reads():
            load = partial(dcp.load, live, storage_reader=reader, no_dist=True)
            assert isinstance(wrapped(load), kind)
    dcp.load(live, storage_reader=Reader(tmp_path / "step-1"), no_dist=True)
    assert torch.equal(live["w"], saved["w"])


def test_a_writer_process_that_stands_still_is_replaced(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, timeout=30) as ckpt:
        ckpt.save_async(1, state(1)).result(30)
        writer = ckpt._saver.writer.process.pid
        assert writer is not None
        os.kill(writer, signal.SIGSTOP)
        wait_until_stopped(writer)
        fault = ended(lambda: ckpt.save_async(2, state(2), timeout=TIMEOUT).result(60))
        assert isinstance(fault, tr.errors.StorageTimeoutError)
        ckpt.save_async(3, state(3)).result(30)
        assert ckpt.steps() == [1, 3] and ckpt._saver.writer.process.pid != writer


PROGRAM = """
import sys, threading, torch, torchrelay as tr
from torchrelay.dcp import Reader, Writer
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.step import LocalReader
ckpt = tr.Checkpointer(sys.argv[1], timeout=1)
ckpt.save(1, {"w": torch.ones(9)}, timeout=30)
Files.sync = lambda *args: threading.Event().wait(600)
try:
    ckpt.save(2, {"w": torch.ones(9)})
except tr.errors.StorageTimeoutError:
    print("in time")
"""


def test_a_program_ends_though_its_storage_hangs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "in time\n"), ran.stderr


def test_a_bucket_that_stalls_ends_every_call_in_time(s3: S3) -> None:
    pytest.importorskip("obstore")
    go = threading.Event()
    live = state(5)
    with tr.Checkpointer(s3.url("run"), timeout=60) as ckpt:
        ckpt.save(1, state(1))
    with tr.Checkpointer(s3.url("run"), timeout=1) as ckpt:
        s3.hook = lambda method, path: (go.wait(60), None)[1]
        try:
            for call in (
                lambda: ckpt.save(2, state(2)),
                lambda: ckpt.save_async(3, state(3)).result(60),
                ckpt.steps,
                ckpt.latest,
                lambda: ckpt.load(live),
                lambda: tr.Checkpointer(s3.url("run"), timeout=1),
            ):
                ended(call)
        finally:
            s3.hook = None
            go.set()
    assert which(live, range(9)) == 5
    with tr.Checkpointer(s3.url("run"), timeout=60) as ckpt:
        assert ckpt.load(live).step == 1 and which(live, range(9)) == 1
