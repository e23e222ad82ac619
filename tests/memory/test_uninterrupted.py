"""Work that no exception out of a signal handler breaks in two."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch

from torchrelay.memory.uninterrupted import hurried, uninterrupted

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
        assert signal.getsignal(signal.SIGALRM) is hit  # it was put back
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


def test_it_is_done_on_the_thread_of_the_caller() -> None:
    """With the locks that it holds, its thread-locals, its default device and its modes."""
    lock, local = threading.RLock(), threading.local()
    local.value = 5

    def act() -> tuple[int, int, torch.device]:
        with lock:
            return threading.get_ident(), local.value, torch.empty(0).device

    def look() -> None:
        local.value = 5
        with lock, torch.device("meta"):
            wanted = threading.get_ident(), 5, torch.device("meta")
            seen.append(uninterrupted(act) == hurried(act, lambda: None) == wanted)

    seen: list[bool] = []
    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    assert seen == [True, True]


def test_a_handler_runs_when_the_work_is_over(alarm: Callable[[float], None]) -> None:
    steps: list[str] = []

    def act() -> int:
        for number in range(3):
            signal.raise_signal(signal.SIGALRM)
            steps.append(f"line {number}")
        return 7

    with pytest.raises(Hit):
        uninterrupted(act)
    assert steps == ["line 0", "line 1", "line 2"]

    signal.signal(signal.SIGUSR1, lambda *_: steps.append("handler"))
    steps.clear()

    def noted() -> int:
        signal.raise_signal(signal.SIGUSR1)
        steps.append("line")
        return 7

    try:
        assert uninterrupted(noted) == 7
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert steps == ["line", "handler"]


def test_every_handler_runs_though_each_of_them_raises(alarm: Callable[[float], None]) -> None:
    ran: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        ran.append(number)
        raise Hit(number)

    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
    before = [signal.signal(number, handler) for number in numbers]

    def act() -> None:
        for number in numbers:
            signal.raise_signal(number)
        raise ValueError("of the work")

    try:
        for way in (uninterrupted, lambda act: hurried(act, lambda: None)):
            ran.clear()
            with pytest.raises(Hit):
                way(act)
            assert sorted(ran) == sorted(numbers)
            assert all(signal.getsignal(number) is handler for number in numbers)
    finally:
        for number, one in zip(numbers, before, strict=True):
            signal.signal(number, one)


def test_another_thread_leaves_the_handlers_alone(alarm: Callable[[float], None]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    inside, over, seen = threading.Event(), threading.Event(), []

    def act() -> None:
        inside.set()
        assert over.wait(10)
        seen.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=uninterrupted, args=(act,))
    thread.start()
    assert inside.wait(10)
    with pytest.raises(Hit):
        signal.raise_signal(signal.SIGALRM)
    over.set()
    thread.join(10)
    assert seen == [before]


def test_a_handler_that_the_work_sets_stays() -> None:
    def mine(number: int, frame: FrameType | None) -> None:
        pass

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        uninterrupted(lambda: signal.signal(signal.SIGUSR1, mine))
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_work_inside_of_work_waits_for_all_of_it(alarm: Callable[[float], None]) -> None:
    steps: list[str] = []

    def inner() -> None:
        signal.raise_signal(signal.SIGALRM)
        steps.append("inner")

    def outer() -> None:
        uninterrupted(inner)
        hurried(inner, lambda: steps.append("never"))
        steps.append("outer")

    with pytest.raises(Hit):
        uninterrupted(outer)
    assert steps == ["inner", "inner", "outer"]


def test_an_exception_is_raised_once_the_call_is_over(alarm: Callable[[float], None]) -> None:
    hurry, steps = threading.Event(), []

    def act() -> None:
        assert hurry.wait(10)
        time.sleep(0.05)
        steps.append("over")

    begun = time.monotonic()
    alarm(0.01)
    with pytest.raises(Hit):
        hurried(act, hurry.set)
    assert steps == ["over"] and time.monotonic() - begun < 10


@pytest.mark.parametrize("way", [uninterrupted, lambda act: hurried(act, lambda: None)])
def test_exceptions_again_and_again_do_not_end_it_before(
    alarm: Callable[[float], None], way: Any
) -> None:
    steps = []

    def act() -> None:
        time.sleep(0.2)
        signal.setitimer(signal.ITIMER_REAL, 0)
        time.sleep(0.2)  # what was on its way comes up before the call is over
        steps.append("over")

    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    with pytest.raises(Hit):
        way(act)
    assert steps == ["over"]


@pytest.mark.parametrize("way", [uninterrupted, lambda act: hurried(act, lambda: None)])
def test_signals_at_any_time_find_all_of_it_done_or_nothing(
    alarm: Callable[[float], None], way: Any
) -> None:
    """Many more calls than lines: signals come while handlers are replaced and put back, too."""
    handler, done, hits, silent = signal.getsignal(signal.SIGALRM), [0, 0], 0, 0

    def act() -> None:
        done[0] += 1
        sum(range(50))
        done[1] += 1

    random = Random(5)
    for _ in range(4000):
        before = done[0]
        try:
            signal.setitimer(signal.ITIMER_REAL, 10 ** random.uniform(-5.5, -3.5))
            way(act)
            signal.setitimer(signal.ITIMER_REAL, 0)
            silent += 1
        except Hit:
            hits += 1
        assert done[0] == done[1] and done[0] - before in (0, 1)
        assert signal.getsignal(signal.SIGALRM) is handler
    print(f"{hits} hits, {silent} calls without one, {done[0]} done")
    assert hits > 100


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
