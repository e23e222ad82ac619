"""Processes that end are noticed, and those that only have the number of one are not."""

from __future__ import annotations

import gc
import os
import queue
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ways import patched
from torchrelay.transports.meeting.departures import Departures
from torchrelay.transports.meeting.listener import listener_here

LONG = 20.0
ONE, ANOTHER = b"one process", b"another"
Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Processes that do nothing until they are killed."""
    started = []

    def another() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[-1]

    yield another
    for one in started:
        one.kill()
        one.communicate(timeout=LONG)


def settled() -> None:
    """The I/O thread has done what it was asked for."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    listener_here().run(done.put, None)
    done.get(timeout=LONG)


def pidfds() -> int:
    links = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.exists()]
    return sum("pidfd" in link for link in links)


def test_the_end_of_a_process_is_told_once(start: Start) -> None:
    gone: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    departures, before = Departures(gone.put), pidfds()
    first, second = start(), start()
    departures.watch(ONE, first.pid)
    departures.watch(ONE, first.pid)
    departures.watch(ANOTHER, second.pid)
    first.kill()
    assert gone.get(timeout=LONG) == ONE
    assert not departures.watches(ONE) and departures.watches(ANOTHER)
    second.kill()
    assert gone.get(timeout=LONG) == ANOTHER and gone.empty()
    settled()
    assert pidfds() == before


def test_a_process_that_is_no_more_is_not_watched(start: Start) -> None:
    departures, ended = Departures(pytest.fail), start()
    ended.kill()
    ended.wait(LONG)
    departures.watch(ONE, ended.pid)
    assert not departures.watches(ONE)


def test_a_kernel_that_cannot_watch_is_no_fault(start: Start) -> None:
    def refused(pid: int) -> int:
        raise PermissionError("no pidfds here")

    departures = Departures(pytest.fail)
    with patched(os, pidfd_open=refused):
        departures.watch(ONE, start().pid)
    assert not departures.watches(ONE)


def test_a_process_that_says_another_number_is_watched_by_that(start: Start) -> None:
    gone: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    departures, before = Departures(gone.put), pidfds()
    wrong, right = start(), start()
    departures.watch(ONE, wrong.pid)
    departures.watch(ONE, right.pid)
    wrong.kill()
    wrong.wait(LONG)
    settled()
    assert gone.empty() and departures.watches(ONE)
    right.kill()
    assert gone.get(timeout=LONG) == ONE
    settled()
    assert pidfds() == before


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_nothing_is_watched_for_a_watcher_that_has_ended(start: Start, ends: str) -> None:
    departures, before = Departures(pytest.fail), pidfds()
    departures.watch(ONE, start().pid)
    settled()
    assert pidfds() == before + 1
    if ends == "closed":
        departures.close()
        assert not departures.watches(ONE)
    else:
        kept = weakref.ref(departures)
        del departures
        gc.collect()
        assert kept() is None
    settled()
    assert pidfds() == before
