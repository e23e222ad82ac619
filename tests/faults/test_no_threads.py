"""A process that may start no more threads: calls succeed with fewer, or both sides say why."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support import flat
from tests.support.faults import CHUNK, Outcome, received, sent, verdict, weights
from tests.support.no_threads import no_memory_for_threads, only_threads
from tests.support.ranks import RankPool
from tests.support.ways import WAYS, by
from torchrelay.dropin import PGTransport
from torchrelay.memory import threads
from torchrelay.memory.bounded import bounded
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.transports.meeting import listener
from torchrelay.transports.streams.workers import Workers

LONG = 40.0
OLD = 100
MOST = 5  # threads that the victim may still start
SAID = "cannot start a thread"


def test_what_was_not_started_is_over() -> None:
    others: list[threads.Running] = []
    with only_threads(0) as refused:
        with pytest.raises(tr.errors.ResourceError, match=f"{SAID}.*ulimit -u"):
            threads.run(lambda: None, "test", among=others)
        assert others[0].wait(0) and refused
        threads.end_all(others)
        with pytest.raises(tr.errors.ResourceError, match=SAID):
            threads.start(lambda: None, "test")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_tasks_are_shared_out_to_the_threads_that_there_are(count: int) -> None:
    done: list[int] = []
    with only_threads(count) as refused:
        run_on_threads(range(20), lambda: done.append, 8)
        assert refused
    assert sorted(done) == [*range(20)]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_workers_do_every_job_and_report_those_that_fail(count: int) -> None:
    done: list[int] = []
    faults: list[Any] = []
    last = threading.Event()

    def job(number: int) -> None:
        done.append(number)
        if number == 7:
            raise ValueError("seven")
        if number == 9:
            last.set()

    with only_threads(count):
        workers = Workers(3, faults.append)
        for number in range(10):
            workers.submit(lambda number=number: job(number))  # type: ignore[misc]
        assert last.wait(LONG)
        workers.stop()
    assert sorted(done) == [*range(10)] and [str(fault) for fault in faults] == ["seven"]


def test_a_bounded_call_is_made_all_the_same() -> None:
    with only_threads(0) as refused:
        assert bounded(lambda: 7, 5.0, "look") == 7
        with pytest.raises(KeyError):
            bounded(lambda: {}["x"], 5.0, "look")
        assert refused


def test_a_listener_that_cannot_start_leaves_nothing_open() -> None:
    count = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with only_threads(0), pytest.raises(tr.errors.ResourceError, match=SAID):
            listener.Listener()
    assert len(list(Path("/proc/self/fd").iterdir())) <= count


# Transfers


def test_the_kernel_refuses_a_thread() -> None:
    with no_memory_for_threads():
        with pytest.raises(tr.errors.ResourceError, match=SAID):
            threads.run(lambda: None, "test")
        done: list[int] = []
        run_on_threads(range(9), lambda: done.append, 4)
        assert sorted(done) == [*range(9)]
    assert threads.run(lambda: None, "test").wait(LONG)


def limited(rank: int, group: Any, victim: int, several: bool) -> list[tuple[str, Outcome]]:
    """Transfers in which one side may start 0, 1, 2 ... threads, and one in which the kernel
    refuses them. A right one follows each."""
    found = []
    relay, live, now = tr.Relay(group, chunk_bytes=CHUNK), weights(OLD), OLD
    for count in range(MOST + 1):
        step = 2 * count + 1
        limit: Any = only_threads(count) if count < MOST else no_memory_for_threads()
        with limit if rank == victim else contextlib.nullcontext():
            if rank == 0:
                out = sent(relay, step, 1, LONG)
            else:
                out = received(relay, [0] if several else 0, live, now, step, LONG)  # type: ignore[arg-type]
        found.append((f"{count} threads", out))
        dist.barrier(group)
        if rank == 0:
            after = sent(relay, step + 1, 1, LONG)
        else:
            after = received(relay, 0, live, OLD, step + 1, LONG)
        now = step + 1
        assert after.error is None, (count, after)
        assert rank == 0 or verdict(live, now) == now, count
        dist.barrier(group)
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_both_sides_say_why_or_have_the_state(
    pool2: RankPool, way: str, victim: int, several: bool
) -> None:
    results = pool2.run(by, way, limited, victim, several, timeout=150, fresh_group=True)
    fine = 0
    for sender, receiver in zip(*results, strict=True):
        where, ends = sender[0], (sender[1], receiver[1])
        print(where, *ends, sep="\n  ")
        if ends[1].error is None:
            assert ends[0].error is None and ends[1].weights not in ("torn", None), where
            fine += 1
            continue
        assert ends[victim].error == "ResourceError" and SAID in ends[victim].text, where
        assert ends[1 - victim].error in ("PeerAbortedError", "PeerLostError"), where
        assert SAID in ends[1 - victim].text, where
        assert ends[1].weights != "torn"
    assert fine


def dropped_in(rank: int, group: Any) -> str:
    """torch's protocol: what was posted on the group keeps its memory."""
    transport = PGTransport(group, LONG, torch.device("cpu"), protocol="torch")
    if rank == 0:
        with only_threads(0), pytest.raises(tr.errors.ResourceError, match=SAID):
            transport.send_checkpoint([1], weights(1))
        return "said"
    return "not called"


def test_torchs_protocol_says_so_too(pool2: RankPool) -> None:
    said = pool2.run(dropped_in, timeout=60, fresh_group=True)
    assert said == ["said", "not called"]


# Steps


@pytest.mark.parametrize("count", [0, 1, 2])
def test_steps_are_saved_and_loaded_or_it_is_said_why(count: int, tmp_path: Path) -> None:
    said: list[str] = []

    def attempt(call: Any) -> Any:
        try:
            with only_threads(count):
                return call()
        except tr.errors.ResourceError as fault:
            assert SAID in str(fault)
            said.append(call.__name__)
            return None

    state, into = weights(1), weights(2)
    with tr.Checkpointer(tmp_path, timeout=LONG) as there:

        def save() -> Any:
            return there.save(1, state)

        def save_async() -> Any:
            return there.save_async(2, state).result(LONG)

        def load() -> Any:
            return there.load(into)

        for call in (save, save_async, load):
            attempt(call)
        print(said)
        assert "save" not in said
        there.save(3, state)
        there.save_async(4, state).result(LONG)
        assert there.load(into).step == 4
    assert verdict(into, 1) == 1


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("same_host", [True, False])
def test_a_step_is_pulled_and_followed(count: int, same_host: bool) -> None:
    into = weights(2)
    how: Any = {"same_host": same_host, "no_dist": True, "timeout": LONG}
    with (
        tr.serve(weights(1), step=1, no_dist=True, timeout=LONG) as endpoint,
        tr.subscribe(endpoint.url, into=into, **how) as updates,
    ):
        with only_threads(count):
            flat.pull(endpoint.url, into=into, **how)
            assert verdict(into, 1) == 1
            endpoint.publish(weights(3), step=2).result(LONG)
            assert updates.update().step == 2 and verdict(into, 3) == 3
        endpoint.publish(weights(4), step=3).result(LONG)
        assert updates.update().step == 3 and verdict(into, 4) == 4
