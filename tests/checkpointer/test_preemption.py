"""`reached_preemption`: all ranks stop at the same step, whichever of them got the signal."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.forks import in_process
from tests.support.ranks import RankPool
from tests.support.saved import equal
from torchrelay.checkpointer import preemption
from torchrelay.checkpointer.preemption import StopAgreement
from torchrelay.coordination.group_store import GroupStore, StoreLost

SEED = 9


# The rule, without processes ---------------------------------------------------------------------


class _Clock:
    """The time of whichever rank is at it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def stops(seed: int, world: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step at which each rank stops, in a job whose ranks run ahead of each other as far as
    its collectives let them, and get their signals at any time."""
    rng = random.Random(seed)
    clock = _Clock()
    monkeypatch.setattr(preemption, "time", clock)
    store = GroupStore(dist.HashStore())
    ranks = [StopAgreement(store, rank, world) for rank in range(world)]
    first, every = rng.choice([0, 1, 500]), rng.choice([1, 10])
    ahead = rng.choice([0, 1, 3])  # calls that a rank may be ahead of the slowest
    asked = {rank: rng.randrange(40) for rank in rng.sample(range(world), rng.randint(1, world))}
    calls = [0] * world
    stopped: dict[int, int] = {}
    for _ in range(100_000):
        free = [r for r in range(world) if r not in stopped and calls[r] <= min(calls) + ahead]
        if len(stopped) == world:
            break
        assert free, f"seed {seed}: ranks at {calls} wait for those that stopped: {stopped}"
        rank = rng.choice(free)
        clock.now += rng.choice([0.0, 0.01, 0.4])
        asks = calls[rank] >= asked.get(rank, 1 << 30)
        step = first + every * calls[rank]
        calls[rank] += 1
        if ranks[rank].is_due(asks) and ranks[rank].stops_at(step, asks):
            stopped[rank] = step
    return [stopped[rank] for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4, 7])
def test_ranks_that_run_ahead_stop_at_the_same_step(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(200):
        found = stops(seed, world, monkeypatch)
        assert len(set(found)) == 1, f"seed {seed}: {found}"


def test_the_store_is_used_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(preemption, "time", clock)
    store = GroupStore(dist.HashStore())
    rank = StopAgreement(store, 0, 2)
    used = []
    for number in range(1000):
        clock.now = number / 100
        if rank.is_due(False):
            used.append(clock.now)
            assert not rank.stops_at(number, False)
    assert len(used) == 10


# Ranks with signals ------------------------------------------------------------------------------


def mine(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((8,), float(step)), "own": torch.full((3,), 100.0 * rank + step)}


def signal_later(rng: random.Random, to_me: bool) -> threading.Thread:
    delay, gap = rng.random() * 0.3, rng.random() * 0.2

    def send() -> None:
        for wait in (delay, gap) if to_me else ():  # twice, as an impatient scheduler does
            time.sleep(wait)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def train(rank: int, group: Any, root: str, seed: int, trials: int, how: str) -> list[Any]:
    """Loops that are asked to stop at random times; what came of each."""
    preemption.LOOK_SECONDS = 0.05
    rng = random.Random(seed)
    found = []
    for trial in range(trials):
        to = set(range(group.size())) if rng.random() < 0.5 else {rng.randrange(group.size())}
        checkpointer = tr.Checkpointer(f"{root}/{trial}", group=group, timeout=20)
        before = signal.getsignal(signal.SIGTERM)
        checkpointer.reached_preemption(0)
        sender = signal_later(rng, rank in to)
        end, step, reached = time.monotonic() + 20, 0, False
        while not reached and time.monotonic() < end:
            time.sleep(0.002 * ((step + rank) % 3))  # the slowest rank is another one each time
            dist.all_reduce(torch.ones(4), group=group)
            step += 1
            if how == "in the background" and step % 4 == 0:
                checkpointer.save_async(step, mine(rank, step), overwrite=True)
            reached = checkpointer.reached_preemption(step)
        checkpointer.save(step, mine(rank, step), overwrite=True)
        assert checkpointer.reached_preemption(step + 1), "from then on"
        sender.join(20)
        checkpointer.close()
        restored = signal.getsignal(signal.SIGTERM) == before
        with tr.Checkpointer(f"{root}/{trial}", no_dist=True) as after:
            newest = after.load()
            whole = equal(newest.state["w"], mine(rank, step)["w"])
            found.append((reached, step, newest.step, whole, restored))
        dist.barrier(group)
    return found


def check(results: list[list[Any]]) -> None:
    for trial, ranks in enumerate(zip(*results, strict=True)):
        context = f"trial {trial}: {ranks}"
        assert len({step for _, step, *_ in ranks}) == 1, context
        for reached, step, newest, whole, restored in ranks:
            assert reached and whole and newest == step and restored, context


@pytest.mark.parametrize("how", ["alone", "in the background"])
def test_ranks_save_at_the_same_step_whichever_got_the_signal(
    pool2: RankPool, tmp_path: Path, how: str
) -> None:
    print(f"seed {SEED}")
    trials = 6 if how == "alone" else 3
    check(pool2.run(train, str(tmp_path), SEED, trials, how, timeout=90))


def test_four_ranks_save_at_the_same_step(pool4: RankPool, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    check(pool4.run(train, str(tmp_path), SEED, 3, "alone", timeout=90))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "in the background"])
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_jobs_of_two_and_four_ranks(
    pool2: RankPool, pool4: RankPool, tmp_path: Path, how: str, seed: int
) -> None:
    for pool in (pool2, pool4):
        root = str(tmp_path / str(pool.world_size))
        check(pool.run(train, root, seed, 20, how, timeout=300))


def ask_alone(rank: int, group: Any, root: str) -> list[str]:
    """Rank 1 never calls it: rank 0 neither waits nor stops, and says why."""
    preemption.WARN_SECONDS = 0.2
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchrelay").addHandler(handler)
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        if rank == 0:
            checkpointer.reached_preemption(0)
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 20
            for step in range(1, 1 << 30):
                begun = time.monotonic()
                assert not checkpointer.reached_preemption(step)
                assert time.monotonic() - begun < 5
                if lines or begun > end:
                    break
            # The signal was for a loop that has ended: it must not end the process of the tests.
            checkpointer._preemption._stopped = True
        dist.barrier(group)
    logging.getLogger("torchrelay").removeHandler(handler)
    return lines


def test_a_rank_that_does_not_ask_is_named(pool2: RankPool, tmp_path: Path) -> None:
    told, others = pool2.run(ask_alone, str(tmp_path), timeout=60)
    assert len(told) == 1 and "ranks 1 do not call reached_preemption" in told[0] and not others


def cost(rank: int, group: Any, root: str) -> float:
    """Seconds of a call, on average, of a job without a signal."""
    with tr.Checkpointer(root, group=group, timeout=20) as checkpointer:
        checkpointer.reached_preemption(0)
        calls = 20_000
        begun = time.perf_counter()
        for step in range(1, calls):
            checkpointer.reached_preemption(step)
        return (time.perf_counter() - begun) / calls


def test_a_call_costs_next_to_nothing(pool2: RankPool, tmp_path: Path) -> None:
    seconds = max(pool2.run(cost, str(tmp_path), timeout=60))
    print(f"{seconds * 1e6:.1f} us")
    assert seconds < 200e-6, "a training step takes thousands of times as long"


# One process -------------------------------------------------------------------------------------


def one_process(root: str) -> list[Any]:
    found: list[Any] = []
    passed: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: passed.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: passed.append(number))
    with tr.Checkpointer(root, no_dist=True) as checkpointer:
        os.kill(os.getpid(), signal.SIGTERM)
        found.append(list(passed))  # before the first call a signal does what it always did
        found.append(checkpointer.reached_preemption(1))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        found += [checkpointer.reached_preemption(2), checkpointer.reached_preemption(3)]
        checkpointer.save(3, mine(0, 3))
    found.append(list(passed))  # the caller knew of it
    with tr.Checkpointer(
        root, no_dist=True, options=tr.options.CheckpointerOptions(signals=(signal.SIGUSR1,))
    ) as checkpointer:
        found.append(checkpointer.reached_preemption(4))
        os.kill(os.getpid(), signal.SIGUSR1)
    found.append(list(passed))  # the caller never learned of this one: it takes effect at the end
    with tr.Checkpointer(
        root, no_dist=True, options=tr.options.CheckpointerOptions(read_only=True)
    ) as checkpointer:
        found.append(checkpointer.steps())
    return found


def test_signals_of_one_process(tmp_path: Path) -> None:
    term, user = int(signal.SIGTERM), int(signal.SIGUSR1)
    assert in_process(one_process, str(tmp_path)) == [
        [term],
        False,
        True,
        True,
        [term],
        False,
        [term, user],
        [3],
    ]


def test_signals_are_watched_in_the_main_thread(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                checkpointer.reached_preemption(1)
            except tr.errors.UsageError as fault:
                raised.append(fault)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(20)
        assert len(raised) == 1 and "main thread" in str(raised[0])
    with pytest.raises(tr.errors.UsageError, match="closed"):
        checkpointer.reached_preemption(2)


def test_a_signal_to_the_writer_process_does_not_end_it(tmp_path: Path) -> None:
    """A scheduler may signal every process of a job."""
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=30) as checkpointer:
        checkpointer.save_async(1, mine(0, 1)).result(20)
        writer = checkpointer._saver.writer.process.pid
        assert writer is not None
        os.kill(writer, signal.SIGTERM)
        checkpointer.save_async(2, mine(0, 2)).result(20)
        assert checkpointer._saver.writer.process.pid == writer
        assert equal(checkpointer.load(step=2).state, mine(0, 2))


# A store that does not answer --------------------------------------------------------------------


class _HeldStore(GroupStore):
    """Requests of one kind wait here, on their threads, until the store may have them."""

    def __init__(self, store: Any, method: str, key: str) -> None:
        super().__init__(store)
        self._method, self._key = method, key
        self.go, self.came = threading.Event(), threading.Event()

    def _ask(self, method: str, key: Any, *values: Any, whole: bool = False) -> Any:
        if method == self._method and (key == self._key or key == [self._key]):
            self.came.set()
            assert self.go.wait(60)
        return super()._ask(method, key, *values, whole=whole)


def test_a_look_without_an_answer_commits_its_rank_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(seconds: float) -> None:
        monkeypatch.setattr(preemption, "STORE_SECONDS", seconds)

    monkeypatch.setattr(preemption, "LOOK_SECONDS", 0.0)
    waits(0)
    base = dist.HashStore()
    held = _HeldStore(base, "check", "asked")
    late, other = StopAgreement(held, 1, 2), StopAgreement(GroupStore(base), 0, 2)
    assert not late.stops_at(0, False)
    assert held.came.wait(20)
    waits(60)
    assert not other.stops_at(0, True)
    waits(0)
    assert not any(late.stops_at(step, False) for step in range(1, 5))  # it trains on
    held.go.set()
    waits(60)
    assert not late.stops_at(5, False)  # now it knows, and says that it passes step 5
    assert base.check(["rank/1"])
    assert [other.stops_at(step, False) for step in range(1, 7)] == [False] * 5 + [True]
    assert late.stops_at(6, False)


@pytest.mark.parametrize("ends", ["late", "lost"])
def test_a_rank_that_others_count_on_passes_no_step_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    base = dist.HashStore()
    held = _HeldStore(base, "compare_set", "passed")
    held.go.set()
    rank, other = StopAgreement(held, 1, 2, 0.3), StopAgreement(GroupStore(base), 0, 2)
    assert not rank.stops_at(0, True)
    held.go.clear()
    for _ in range(2):
        with pytest.raises(tr.errors.StorageTimeoutError, match="at step 1, which may not pass it"):
            rank.stops_at(1, True)
    assert not other.stops_at(0, False)  # closes
    assert other.stops_at(1, False)
    if ends == "late":
        held.go.set()
        rank._timeout = 60
        assert rank.stops_at(1, True)
    else:
        held.go.set()
        rank._timeout = 60
        with pytest.raises(tr.errors.CheckpointError, match="has passed step 1, after an error"):
            rank.stops_at(2, True)


def test_a_rank_that_the_others_do_not_count_on_passes_without_a_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Lost(GroupStore):
        def _ask(self, method: str, key: Any, *values: Any, whole: bool = False) -> Any:
            raise StoreLost("the store is gone")

    rank = StopAgreement(Lost(dist.HashStore()), 0, 2)
    assert not rank.stops_at(0, False) and not caplog.text
    assert not rank.stops_at(1, True) and "the store is gone" in caplog.text


class _FaultyStore(GroupStore):
    """Requests fail before or after they are carried out."""

    def __init__(self, store: Any, rng: random.Random) -> None:
        super().__init__(store)
        self._rng, self.sound = rng, False

    def _ask(self, method: str, key: Any, *values: Any, whole: bool = False) -> Any:
        fate = 1.0 if self.sound else self._rng.random()
        if fate < 0.2:
            raise StoreLost("the request was lost")
        found = super()._ask(method, key, *values, whole=whole)
        if fate < 0.4:
            raise StoreLost("the answer was lost")
        return found


@pytest.mark.parametrize("world", [2, 5])
def test_ranks_stop_at_the_same_step_whatever_requests_fail(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "LOOK_SECONDS", 0.0)
    for seed in range(60):
        rng = random.Random(seed)
        base = dist.HashStore()
        ranks = [StopAgreement(_FaultyStore(base, rng), rank, world) for rank in range(world)]
        asked, steps = {rng.randrange(world): rng.randrange(6)}, [0] * world
        stopped: dict[int, int] = {}
        for _ in range(20_000):
            free = [r for r in range(world) if r not in stopped and steps[r] <= min(steps) + 2]
            if not free:
                break
            rank = rng.choice(free)
            with suppress(StoreLost):  # it asks again for the same step
                if ranks[rank].stops_at(steps[rank], steps[rank] >= asked.get(rank, 1 << 30)):
                    stopped[rank] = steps[rank]
                else:
                    steps[rank] += 1
        assert len(stopped) == world and len(set(stopped.values())) == 1, f"seed {seed}: {stopped}"


def two_after_each_other(rank: int, group: Any, root: str) -> list[Any]:
    """The end of one checkpointer's job, where only rank 0 learned of a signal, and another one."""
    preemption.LOOK_SECONDS = 0.0
    with tr.Checkpointer(root, group=group, timeout=20) as first:
        assert not first.reached_preemption(0)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not first.reached_preemption(1)
            first._preemption._stopped = True  # or the signal would end this process
    dist.barrier(group)
    with tr.Checkpointer(root, group=group, timeout=20) as second:
        found = [second.reached_preemption(step) for step in range(3)]
        dist.barrier(group)
        found += [second.reached_preemption(step) for step in range(3, 6)]
        dist.barrier(group)
    return found


def test_a_checkpointer_does_not_take_up_the_agreement_of_an_earlier_one(
    pool2: RankPool, tmp_path: Path
) -> None:
    assert pool2.run(two_after_each_other, str(tmp_path), timeout=60) == [[False] * 6] * 2
