"""Calls that hang are left behind at their deadline."""

from __future__ import annotations

import threading
import time

import pytest

from torchrelay.errors import ResourceError, StorageTimeoutError
from torchrelay.memory import threads
from torchrelay.memory.bounded import bounded


def test_what_it_returns_and_raises_comes_through() -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "none", "there")

    assert bounded(lambda: 7, 10, "count") == 7
    with pytest.raises(FileNotFoundError, match="there"):
        bounded(fail, 10, "count")


def test_a_call_that_hangs_is_left_behind() -> None:
    go, over = threading.Event(), threading.Event()

    def hang() -> None:
        go.wait(60)
        over.set()

    begun = time.monotonic()
    with pytest.raises(StorageTimeoutError, match=r"cannot list the steps: no answer.*\[/there\]"):
        bounded(hang, 0.1, "list the steps", file="/there")
    assert time.monotonic() - begun < 30 and not over.is_set()
    go.set()
    assert over.wait(30)


def test_without_time_nothing_is_begun() -> None:
    with pytest.raises(StorageTimeoutError):
        bounded(lambda: pytest.fail("was called"), 0, "list the steps")


def test_where_no_thread_starts_the_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ResourceError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threads, "run", refuse)
    assert bounded(threading.get_ident, 10, "count") == threading.get_ident()
