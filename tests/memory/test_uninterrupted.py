"""Work that no exception out of a signal handler breaks in two."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from torchrelay.memory import threads
from torchrelay.memory.uninterrupted import uninterrupted

pytestmark = pytest.mark.timeout(method="thread")  # these tests have the signal for themselves


class Hit(BaseException):
    """What a signal handler raises."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Raises `Hit` in this thread, after so many seconds."""

    def hit(number: int, frame: FrameType | None) -> None:
        raise Hit

    before = signal.signal(signal.SIGALRM, hit)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_it_returns_and_raises() -> None:
    def fail() -> None:
        raise KeyError("why")

    assert uninterrupted(lambda: 7) == 7
    with pytest.raises(KeyError, match="why"):
        uninterrupted(fail)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(lambda: signal.default_int_handler(2, None))


def test_it_is_done_in_the_modes_of_the_caller() -> None:
    def modes() -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert uninterrupted(modes) == modes()


def test_an_exception_is_raised_once_the_call_is_over(alarm: Callable[[float], None]) -> None:
    hurried, steps = threading.Event(), []

    def act() -> None:
        assert hurried.wait(10)
        time.sleep(0.05)
        steps.append("over")

    begun = time.monotonic()
    alarm(0.01)
    with pytest.raises(Hit):
        uninterrupted(act, hurry=hurried.set)
    assert steps == ["over"] and time.monotonic() - begun < 10


def test_exceptions_again_and_again_do_not_end_it_before(alarm: Callable[[float], None]) -> None:
    steps = []

    def act() -> None:
        time.sleep(0.2)
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0.2)  # what was on its way comes up before the call is over
        steps.append("over")

    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    with pytest.raises(Hit):
        uninterrupted(act)
    assert steps == ["over"]


def test_a_call_that_had_not_begun_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception comes when the call is known, and before a thread has it."""
    called: list[int] = []
    known = threads.Running()

    def late(job: Callable[[], None], name: str, among: list[threads.Running]) -> None:
        among.append(known)
        raise Hit

    monkeypatch.setattr(threads, "run", late)
    with pytest.raises(Hit):
        uninterrupted(lambda: called.append(1))
    assert known.wait(0) and not called


def test_nothing_is_kept_alive_by_a_call_that_failed() -> None:
    class Thing:
        pass

    def act() -> None:
        thing = Thing()
        alive.append(thing)
        raise ValueError(id(thing))

    alive: list[Any] = []
    gc.disable()
    try:
        for _ in range(3):
            with contextlib.suppress(ValueError):
                uninterrupted(act)
        seen = [weakref.ref(thing) for thing in alive]
        alive.clear()
        assert [ref() for ref in seen] == [None] * 3
    finally:
        gc.enable()
