"""What a `Pending` says while its save is written, and after."""

from __future__ import annotations

import os
import signal
import threading
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
