"""Calls that end at any line: bad arguments, Ctrl-C, exceptions out of signal handlers.

Whatever ended a call, weights are old or new when it is over and stay so, and the next call
between the same two ranks is right.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.faults import CHUNK, attempt, received, sent, verdict, weights
from tests.support.interrupts import SIGNAL, heeding_ctrl_c, press_ctrl_c, raising
from tests.support.ways import WAYS, by, every_way, taking
from torchrelay.dropin import PGTransport

OLD, LONG = 100, 25.0
SOON = 15.0  # seconds: not the deadline, on a busy machine
SHORT = 0.4  # seconds for a call whose peer was interrupted
CPU = torch.device("cpu")
LIBRARY = str(Path(tr.__file__).parent)


pytestmark = pytest.mark.timeout(method="thread")  # these tests have the signal for themselves


class Hit(BaseException):
    """What a signal handler raises."""


# Bad arguments take nothing from the group


BAD: dict[str, dict[str, Any]] = {
    "route": {"route": "memroy"},
    "device": {"device": "gpu"},
    "device that is none": {"device": 3.5},
    "progress": {"progress": 3},
    "step": {"step": -1},
    "timeout": {"timeout": 0},
}


def bad_recv(rank: int, group: Any) -> Any:
    relay, live = tr.Relay(group, chunk_bytes=CHUNK), weights(OLD)
    if rank == 0:
        return sent(relay, 1, 1, LONG)
    said = {}
    for name, bad in BAD.items():
        try:
            relay.recv(0, into=live, **bad)
        except tr.errors.UsageError as fault:
            said[name] = str(fault)
    return said, received(relay, 0, live, OLD, 1, LONG)


def test_a_recv_with_bad_arguments_does_not_wedge_the_pair(pool2: Any) -> None:
    ours, (said, theirs) = pool2.run(bad_recv, fresh_group=True)
    assert set(said) == set(BAD), said
    assert ours.error is None and theirs.error is None and theirs.weights == 1


def torch_sender(rank: int, group: Any) -> Any:
    """A relay does not take the message of a rank that runs torch's own class."""
    limit, state = timedelta(seconds=LONG), weights(1)["w"]
    if rank == 0:
        PGTransport(group, limit, CPU, protocol="torch").send_checkpoint([1], {"w": state})
        return True
    out = attempt(lambda: tr.Relay(group, timeout=0.5).recv(0))
    got: Any = PGTransport(group, limit, CPU).recv_checkpoint(0)
    return out.error == "TransferTimeoutError" and torch.equal(got["w"], state)


def test_a_message_of_torchs_protocol_is_left_to_the_class_that_reads_it(pool2: Any) -> None:
    assert pool2.run(torch_sender, fresh_group=True) == [True, True]


# Ctrl-C while a call waits


def wait_in(call: str, seconds: float = 10) -> None:
    """Until a function of the library of this name is on the stack of some thread."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for frame in sys._current_frames().values():
            at: FrameType | None = frame
            while at is not None:
                if at.f_code.co_name == call and at.f_code.co_filename.startswith(LIBRARY):
                    return
                at = at.f_back
        time.sleep(0.005)
    raise AssertionError(f"nobody came to {call}")


def interrupted(rank: int, group: Any, victim: int) -> Any:
    """The victim waits for a peer that has not come, and is interrupted."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK), weights(OLD)
    hit = False
    if rank == victim:

        def press() -> None:
            wait_in("step" if rank == 0 else "expect")
            press_ctrl_c()

        finger = threading.Thread(target=press)
        with heeding_ctrl_c():
            finger.start()
            begun = time.monotonic()
            try:
                if rank == 0:
                    relay.send(weights(1), 1, timeout=LONG)
                else:
                    relay.recv(0, into=live, timeout=LONG)
            except KeyboardInterrupt:
                hit = time.monotonic() - begun < SOON
            finally:
                finger.join()
    dist.barrier(group)
    if rank == 0:
        return hit, sent(relay, 2, 1, LONG)
    return hit, received(relay, 0, live, OLD, 2, LONG)


@pytest.mark.parametrize("victim", [0, 1])
@every_way
def test_ctrl_c_while_a_call_waits_does_not_wedge_the_pair(
    pool2: Any, way: str, victim: int
) -> None:
    results = pool2.run(by, way, interrupted, victim, fresh_group=True)
    assert [hit for hit, _ in results] == [rank == victim for rank in (0, 1)]
    assert [out.error for _, out in results] == [None, None], results
    assert results[1][1].weights == 2


# Exceptions at random lines, and at random times


class AtLine:
    """Within: a signal, whose handler raises `Hit`, at the n-th line of the library that this
    thread comes to.

    A `with` line comes up again when its block is left. Nothing is raised there: Python would not
    call `__exit__`, and handles no signal at that place either.
    """

    def __init__(self, nth: int) -> None:
        self.left, self.hit = nth, False
        self._entered: set[tuple[int, int]] = set()

    def __enter__(self) -> AtLine:
        self._raising = raising(Hit)
        self._raising.__enter__()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._raising.__exit__(None, None, None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not self._is_left(frame):
            self.left -= 1
            if self.left == 0:
                self.hit = True
                sys.settrace(None)
                signal.raise_signal(SIGNAL)
        return self._line

    def _is_left(self, frame: FrameType) -> bool:
        """Whether this is the `with` line of a block that is over."""
        here = id(frame), frame.f_lineno
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if not text.startswith("with "):
            return False
        known = here in self._entered
        self._entered.add(here)
        return known


@contextlib.contextmanager
def at_time(seconds: float) -> Iterator[None]:
    """Within: a signal handler raises `Hit` after that time."""
    over = False

    def handler(number: int, frame: FrameType | None) -> None:
        if not over:
            raise Hit

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Pair:
    """The two calls of one rank, by one door."""

    def __init__(self, rank: int, group: Any, door: str) -> None:
        self.rank, self.group, self.door, self.live = rank, group, door, weights(OLD)
        self.relay = tr.Relay(group, chunk_bytes=CHUNK) if door in WAYS else None

    def call(self, seed: int, timeout: float) -> None:
        if self.relay is not None:
            if self.rank == 0:
                self.relay.send(weights(seed), 1, step=seed, timeout=timeout)
            else:
                self.relay.recv(0, into=self.live, timeout=timeout)
            return
        transport = PGTransport(
            self.group,
            timedelta(seconds=timeout),
            CPU,
            lambda: self.live,
            protocol=self.door,  # type: ignore[arg-type]
        )
        if self.rank == 0:
            transport.send_checkpoint([1], weights(seed))
        else:
            got: Any = transport.recv_checkpoint(0)
            self.live["seed"] = got["seed"]  # torch's protocol writes tensors alone in place


def shaken(rank: int, group: Any, door: str, seed: int, trials: int) -> dict[str, int]:
    """Calls of which one side is hit, each followed by one that must be right."""
    chance, counts = random.Random(seed), {"hit": 0, "new": 0, "old": 0}
    now = OLD
    with taking(door) if door in WAYS else contextlib.nullcontext():
        pair = Pair(rank, group, door)
        pair.call(1, LONG)
        now = 1
        for trial in range(trials):
            victim, by_line = chance.randrange(2), chance.random() < 0.5
            nth, seconds = chance.randrange(1, 60), 10 ** chance.uniform(-4.5, -1.5)
            where = f"seed {seed}, trial {trial}, rank {victim}, line {nth}, {seconds:.6f} s"
            faulty, healthy = 1000 + trial, 2000 + trial
            hit: Any = AtLine(nth) if by_line else at_time(seconds)
            if rank != victim:
                hit = contextlib.nullcontext()
            # torch's protocol cannot be called off: the other side is there until the end.
            limit = SHORT if door != "torch" else 3.0
            try:
                with hit:
                    pair.call(faulty, limit)
            except Hit:
                counts["hit"] += 1
            except tr.errors.RelayError:
                pass
            after = verdict(pair.live, now, faulty)
            dist.barrier(group)
            assert rank == 0 or after != "torn", where
            assert rank == 0 or verdict(pair.live, now, faulty) == after, f"later: {where}"
            counts["new" if after == faulty else "old"] += 1
            try:
                pair.call(healthy, LONG)
            except tr.errors.RelayError as fault:
                raise AssertionError(where) from fault
            assert rank == 0 or verdict(pair.live, healthy) == healthy, where
            now = healthy
    return counts


DOORS = (*WAYS, "relay")


@pytest.mark.parametrize("door", DOORS)
def test_exceptions_at_random_lines_leave_the_next_call_right(pool2: Any, door: str) -> None:
    results = pool2.run(shaken, door, 14, 6, timeout=60, fresh_group=True)
    assert results[0]["hit"] and results[1]["hit"], results


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("door", DOORS)
def test_many_exceptions_at_random_lines(pool2: Any, door: str, seed: int) -> None:
    results = pool2.run(shaken, door, seed, 120, timeout=500, fresh_group=True)
    assert results[0]["hit"] and results[1]["hit"], results
