"""Threads that are used again."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

import pytest

from torchrelay.deadlines import LOOK_UP, wait_until_set
from torchrelay.memory import threads
from torchrelay.memory.thread_pool import run_on_threads

SECONDS = 20.0


def idle() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == threads.IDLE]


def settled(running: threads.Running) -> threading.Thread:
    """The thread that has done this, once it is idle."""
    assert running.wait(SECONDS)
    ends = threading.Event()
    for _ in range(2000):
        for one in idle():
            if one.ident == running._thread:
                return one
        ends.wait(0.01)
    raise AssertionError("it did not get idle")


def test_one_that_is_done_does_the_next() -> None:
    seen: list[tuple[int, str]] = []

    def note() -> None:
        seen.append((threading.get_ident(), threading.current_thread().name))

    first = threads.run(note, "test", niceness=1)
    thread = settled(first)
    second = threads.run(note, "again", niceness=1)
    assert second.wait(SECONDS)
    assert [name for _, name in seen] == ["torchrelay-test", "torchrelay-again"]
    assert seen[0][0] == seen[1][0] == thread.ident


def test_one_that_is_busy_does_not_hold_up_the_next() -> None:
    go = threading.Event()
    blocked = [threads.run(lambda: go.wait(SECONDS), "test") for _ in range(5)]
    assert threads.run(lambda: None, "test").wait(SECONDS)
    assert not any(one.wait(0) for one in blocked)
    go.set()
    assert all(one.wait(SECONDS) for one in blocked)


def test_it_knows_where_it_runs() -> None:
    told: list[bool] = []
    ready = threading.Event()

    def look() -> None:
        ready.wait(SECONDS)
        told.append(running.here)

    running = threads.run(look, "test")
    ready.set()
    assert running.wait(SECONDS)
    assert told == [True] and not running.here


def test_what_is_raised_is_told_and_the_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))

    def fail() -> None:
        raise ValueError("lost")

    thread = settled(threads.run(fail, "test", niceness=2))
    assert told == [ValueError]
    again = threads.run(lambda: None, "test", niceness=2)
    assert again.wait(SECONDS) and again._thread == thread.ident


def test_nothing_is_kept_alive_by_one_that_waits() -> None:
    import gc
    import weakref

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    settled(threads.run(lambda thing=thing: None, "test"))  # type: ignore[misc]
    del thing
    gc.collect()
    assert gone() is None


def test_one_that_waits_in_vain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "KEPT_SECONDS", 0.05)
    running = threads.run(lambda: None, "test", niceness=3)
    assert running.wait(SECONDS)
    thread = next((one for one in threading.enumerate() if one.ident == running._thread), None)
    if thread is not None:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert threads.run(lambda: None, "test", niceness=3).wait(SECONDS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_process_has_threads_of_its_own() -> None:
    settled(threads.run(lambda: None, "test"))
    child = os.fork()
    if child == 0:
        os._exit(0 if threads.run(lambda: None, "test").wait(SECONDS) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_those_that_were_made_ready_are_used_and_no_more_are_made() -> None:
    threads.get_ready(6)
    waiting = set(threads._idle[0])
    assert len(waiting) >= 6
    threads.get_ready(6)
    assert set(threads._idle[0]) == waiting
    go, seen = threading.Event(), set()

    def work() -> None:
        seen.add(threading.get_ident())
        go.wait(SECONDS)

    before = threading.active_count()
    running = [threads.run(work, "test") for _ in range(6)]
    assert threading.active_count() == before
    go.set()
    assert all(one.wait(SECONDS) for one in running) and len(seen) == 6


def test_no_wait_is_so_long_that_an_interrupt_before_it_is_slept_through() -> None:
    asked: list[float] = []

    class Late(threading.Event):
        """One that comes at the fourth look."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            asked.append(timeout)
            return len(asked) > 3

    assert wait_until_set(Late()) and asked == [LOOK_UP] * 4
    asked.clear()
    assert wait_until_set(Late(), SECONDS) and asked == [LOOK_UP] * 4
    asked.clear()
    assert not wait_until_set(Late(), LOOK_UP / 2) and 0 < asked.pop() <= LOOK_UP / 2 and not asked
    assert not wait_until_set(threading.Event(), -1.0)


def test_one_that_is_ended_before_it_begins_never_does() -> None:
    among: list[threads.Running] = []
    blocked, go = threading.Event(), threading.Event()

    def wait() -> None:
        blocked.set()
        go.wait(SECONDS)

    busy = threads.run(wait, "test", among=among)
    assert among == [busy] and blocked.wait(SECONDS)
    lost = threads.Running()  # registered; an exception came before it had a thread
    lost.end()
    lost.end()
    assert lost.wait(0) and not busy.wait(0)
    go.set()
    busy.end()
    assert busy.wait(0)


def test_an_interrupt_while_work_is_shared_out_waits_for_what_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory that it writes to is the caller's again when this returns."""
    here, begun, go, done = threading.get_ident(), threading.Event(), threading.Event(), []
    end = threads.Running.end

    def act(task: int) -> None:
        if threading.get_ident() == here:
            assert begun.wait(SECONDS)
            return
        begun.set()
        assert go.wait(SECONDS)
        done.append(task)

    def interrupted(self: threads.Running, seconds: float | None = None) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(threads.Running, "end", let_go)
        raise KeyboardInterrupt

    def let_go(self: threads.Running) -> None:
        go.set()
        end(self)

    monkeypatch.setattr(threads.Running, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_on_threads(range(2), lambda: act, 2)
    go.set()
    assert len(done) == 1


def test_a_second_interrupt_does_not_end_the_wait_for_those_that_still_work() -> None:
    ended: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def end(self) -> None:
            ended.append(self.name)
            if ended.count(self.name) == 1:
                raise KeyboardInterrupt

    works: list[Any] = [Work("a"), Work("b")]
    threads.end_all(works)
    assert ended[-2:] == ["a", "b"]


def test_two_that_ask_at_once_have_the_same_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no lock of the interpreter has one of them ask after the other."""
    both = threading.Barrier(2, timeout=60)

    def made() -> Any:
        both.wait()  # each is on the way to being the first
        return deque()

    monkeypatch.setattr(threads, "deque", made)
    found: list[Any] = []
    some = [threading.Thread(target=lambda: found.append(threads._idle_of(7))) for _ in range(2)]
    for one in some:
        one.start()
    for one in some:
        one.join(60)
    assert len(found) == 2 and found[0] is found[1]
