"""The caller's own code runs on the caller's thread, and an interrupt does not break it in two.

`load_state_dict`, `state_dict` and codecs may depend on a lock that is held around the call, on
thread-locals, and on torch's modes of the thread, such as its default device.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support import flat
from tests.support.interrupts import Interrupt, interrupted, lines_of, raising
from tests.support.ranks import RankPool
from tests.support.rounds import rounds
from torchrelay.dropin import PGTransport

pytestmark = pytest.mark.timeout(method="thread")  # these tests have the signal for themselves
TIMEOUT = 20.0
LOCK = threading.RLock()
LOCAL = threading.local()


def at_home() -> None:
    """Raise unless this runs where `holding` is around the call."""
    if not LOCK.acquire(timeout=5):
        raise AssertionError("another thread than the caller's, which holds the lock")
    LOCK.release()
    assert LOCAL.value == 5
    assert torch.empty(0).device.type == "meta"
    assert torch.is_autocast_enabled("cpu")


@contextlib.contextmanager
def holding() -> Iterator[None]:
    LOCAL.value = 5
    with LOCK, torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        yield


class Counter:
    """An object with a state, which takes it in two steps. `during` runs between them."""

    def __init__(self, number: int, during: Callable[[], Any] = at_home) -> None:
        self.first = self.second = number
        self.during = during

    def state_dict(self) -> dict[str, int]:
        self.during()
        return {"number": self.second}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["number"]
        self.during()
        self.second = state["number"]

    @property
    def number(self) -> int:
        assert self.first == self.second, (self.first, self.second)
        return self.first


class Counting(torch.nn.Module):
    """A module that runs code of its own when it is loaded."""

    def __init__(self, number: int, during: Callable[[], Any] = at_home) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((50, 40), float(number), device="cpu"))
        self.extra, self.during = number, during

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.during()
        self.extra = state

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        self.during()
        return super().load_state_dict(*args, **options)


class Point:
    """A registered type."""

    during = staticmethod(at_home)

    def __init__(self, x: int) -> None:
        self.x = x


def _decode(state: dict[str, int]) -> Point:
    Point.during()
    return Point(state["x"])


tr.register(Point, name="tests.Point", encode=lambda point: {"x": point.x}, decode=_decode)


def state_of(number: int, during: Callable[[], Any] = at_home) -> dict[str, Any]:
    return {
        "object": Counter(number, during),
        "module": Counting(number, during),
        "t": torch.full((3000,), float(number), device="cpu"),
        "point": Point(number),
        "plain": number,
    }


def numbers_in(state: dict[str, Any]) -> set[float]:
    module, t = state["module"], state["t"]
    values = [state["object"].number, module.extra, state["point"].x, state["plain"]]
    return {*map(float, values), *module.w.unique().tolist(), *t.unique().tolist()}


def quiet() -> None:
    pass


def check_here(load: Callable[[Any], Any]) -> None:
    """A load with a lock held and in modes of the thread: in the main thread, and in another."""
    into = state_of(1)
    wrong: list[str] = []

    def run() -> None:
        try:
            with holding():
                load(into)
        except BaseException as fault:
            wrong.append(repr(fault))

    for number in range(2):
        for one in ("t", "plain"):
            into[one] = torch.full((3000,), 1.0) if one == "t" else 1
        if number:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        else:
            run()
        assert not wrong, wrong
        assert numbers_in(into) == {2.0}


def test_a_load_runs_the_callers_code_on_its_thread(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there:
        there.save(1, state_of(2, quiet))
        check_here(there.load)
    check_here(lambda into: tr.recover(sources=[tmp_path], into=into))


@pytest.mark.parametrize("same_host", [True, False])
def test_a_pull_runs_the_callers_code_on_its_thread(same_host: bool) -> None:
    with tr.serve(state_of(2, quiet), step=1, timeout=TIMEOUT) as endpoint:
        how: Any = {"same_host": same_host, "timeout": TIMEOUT, "no_dist": True}
        check_here(lambda into: flat.pull(endpoint.url, into=into, **how))

        def update(into: Any) -> None:
            with tr.subscribe(endpoint.url, into=into, **how) as updates:
                updates.update()

        check_here(update)


def receive(rank: int, group: Any, way: str) -> set[float]:
    into = state_of(1)
    with tr.Relay(group, timeout=TIMEOUT) as relay:
        if rank == 0:
            relay.send(state_of(2, quiet), to=1)
            return {2.0}
        with holding():
            if way == "drop-in":
                transport = PGTransport(
                    group, TIMEOUT, torch.device("cpu"), lambda: into, protocol="relay"
                )
                into = transport.recv_checkpoint(0)  # type: ignore[assignment]
            else:
                relay.recv(0 if way == "one" else [0], into=into)
    return numbers_in(into)


@pytest.mark.parametrize("way", ["one", "several", "drop-in"])
def test_a_receive_runs_the_callers_code_on_its_thread(pool2: RankPool, way: str) -> None:
    assert pool2.run(receive, way, timeout=60, fresh_group=True) == [{2.0}, {2.0}]


def interrupting() -> None:
    signal.raise_signal(signal.SIGUSR2)


def receive_and_be_interrupted(rank: int, group: Any, several: bool) -> tuple[str, set[float]]:
    """Rank 1 is interrupted in each `load_state_dict`, in its middle."""
    into, said = state_of(1, quiet), ""

    def during() -> None:
        if into["object"].first == 2:  # else it gives its state
            interrupting()

    into["object"].during = into["module"].during = during
    Point.during = staticmethod(quiet)  # type: ignore[method-assign]
    with tr.Relay(group, timeout=TIMEOUT) as relay, raising(Interrupt):
        if rank == 0:
            with contextlib.suppress(tr.errors.PeerLostError):  # rank 1 gave up, it says
                relay.send(state_of(2, quiet), to=1)
            return said, {2.0}
        try:
            relay.recv([0] if several else 0, into=into)
        except Interrupt:
            said = "Interrupt"
    into["object"].during = into["module"].during = quiet
    return said, numbers_in(into)


@pytest.mark.parametrize("several", [False, True])
def test_an_interrupt_waits_for_the_callers_code(pool2: RankPool, several: bool) -> None:
    _, theirs = pool2.run(receive_and_be_interrupted, several, timeout=60, fresh_group=True)
    assert theirs == ("Interrupt", {2.0})


PARTS = ("landing/commit/", "loading/loader.py", "loading/rank_load.py", "memory/unint")


@pytest.mark.timeout(300)  # a load for each line
@pytest.mark.parametrize("way", ["load", "pull", "pull over TCP", "recover"])
def test_objects_are_of_one_version_wherever_an_interrupt_comes(way: str, tmp_path: Path) -> None:
    """At every line of the commit in the library. A load from files may leave tensors half new."""
    Point.during = staticmethod(quiet)  # type: ignore[method-assign]
    state, into = state_of(2, quiet), state_of(1, quiet)
    how: Any = {"same_host": way == "pull", "no_dist": True, "timeout": TIMEOUT}
    with (
        tr.Checkpointer(tmp_path, timeout=TIMEOUT) as there,
        tr.serve(state, step=1, timeout=TIMEOUT) as endpoint,
    ):
        there.save(1, state)

        def load() -> None:
            nonlocal into
            into = state_of(1, quiet)
            if way == "load":
                there.load(into)
            elif way == "recover":
                tr.recover(sources=[endpoint.url], into=into, timeout=TIMEOUT)
            else:
                flat.pull(endpoint.url, into=into, **how)

        lines = lines_of(load, PARTS)
        assert len(lines) > 60
        old = new = 0
        for line in lines[:: len(lines) // rounds(len(lines), 4)]:
            if not interrupted(load, PARTS, line):
                continue
            found = {into["object"].number} if way == "load" else numbers_in(into)
            assert found in ({1}, {2}), line
            old, new = old + (found == {1}), new + (found == {2})
        print(f"{old} old, {new} new, of {len(lines)} lines")
        assert old and new
