"""The last save of ranks that are told to end: all at the same tick, and nothing breaks it off."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.cuts import stores_with
from tests.support.forks import servers
from tests.support.ranks import Exited, RankPool, run_ranks
from tests.support.saved import equal
from torchrelay.checkpointer.saves import stopping
from torchrelay.checkpointer.saves.stopping import Stopping
from torchrelay.stores.local.files import Files

SEED = 9


# The rule, without processes ---------------------------------------------------------------------


class _Clock:
    """The time of whichever rank is at it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def stops(seed: int, world: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tick at which each rank stops, in a job whose ranks run ahead of each other as far as
    its collectives let them, and get their signals at any time."""
    rng = random.Random(seed)
    clock = _Clock()
    monkeypatch.setattr(stopping, "time", clock)
    board = dist.HashStore()
    ranks = [Stopping(board, world) for _ in range(world)]  # type: ignore[arg-type]
    ahead = rng.choice([0, 1, 3])  # iterations that a rank may be ahead of the slowest
    asked = {rank: rng.randrange(40) for rank in rng.sample(range(world), rng.randint(1, world))}
    ticks = [0] * world
    stopped: dict[int, int] = {}
    for _ in range(100_000):
        free = [r for r in range(world) if r not in stopped and ticks[r] <= min(ticks) + ahead]
        if len(stopped) == world:
            break
        assert free, f"seed {seed}: ranks at {ticks} wait for those that stopped: {stopped}"
        rank = rng.choice(free)
        clock.now += rng.choice([0.0, 0.01, 0.4])
        ticks[rank] += 1
        if ranks[rank].tick(ticks[rank] >= asked.get(rank, 1 << 30)):
            stopped[rank] = ticks[rank]
    return [stopped[rank] for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4, 7])
def test_ranks_that_run_ahead_stop_at_the_same_tick(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(200):
        found = stops(seed, world, monkeypatch)
        assert len(set(found)) == 1, f"seed {seed}: {found}"


def test_a_tick_asks_the_store_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr(stopping, "time", clock)
    asked = []

    class Board:
        def check(self, names: list[str]) -> bool:
            asked.append(clock.now)
            return False

    rank = Stopping(Board(), 2)  # type: ignore[arg-type]
    for number in range(1000):
        clock.now = number / 100
        assert not rank.tick(False)
    assert len(asked) == 10


# Ranks with signals ------------------------------------------------------------------------------


def mine(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((8,), float(step)), "own": torch.full((3,), 100.0 * rank + step)}


class Trainer:
    """A loop with a collective in each iteration, as data parallel training has."""

    def __init__(self, rank: int, group: Any, root: str, **options: Any) -> None:
        self.rank, self.group = rank, group
        self.step = 0
        self.passed = 0  # signals that did what they did before
        self._before = signal.signal(signal.SIGTERM, self._pass)
        self.checkpointer = tr.Checkpointer(
            root, group=group, timeout=20, save_on_signal=self.state, **options
        )

    def _pass(self, number: int, frame: Any) -> None:
        self.passed += 1

    def state(self) -> tuple[int, Any]:
        return self.step, mine(self.rank, self.step)

    def iterate(self) -> None:
        """An iteration; the slowest rank is another one each time."""
        time.sleep(0.002 * ((self.step + self.rank) % 3))
        dist.all_reduce(torch.ones(4), group=self.group)
        self.step += 1

    def close(self) -> tuple[int, list[int], bool]:
        """How many signals were passed on, the steps there are, whether the newest is right."""
        try:
            self.checkpointer.close()
        finally:
            signal.signal(signal.SIGTERM, self._before)
        with tr.Checkpointer(self.checkpointer.url, group=False) as after:
            steps = after.steps()
            w = after.load().state["w"] if steps else None
            whole = bool(steps) and equal(w, torch.full((8,), float(steps[-1])))
        return self.passed, steps, whole


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
    """Loops that are told to end at random times; what came of each."""
    stopping.LOOK_SECONDS = 0.05
    rng = random.Random(seed)
    found = []
    for trial in range(trials):
        to = set(range(group.size())) if rng.random() < 0.5 else {rng.randrange(group.size())}
        trainer = Trainer(rank, group, f"{root}/{trial}")
        sender = signal_later(rng, rank in to)
        end = time.monotonic() + 20
        stopped = False
        while not stopped and time.monotonic() < end:
            trainer.iterate()
            if how == "tick":
                stopped = trainer.checkpointer.tick(trainer.step)
                assert stopped == trainer.checkpointer.stopped
            elif trainer.step % 4 == 0:
                act = (
                    trainer.checkpointer.save if how == "save" else trainer.checkpointer.save_async
                )
                act(trainer.step, mine(rank, trainer.step))
                stopped = trainer.checkpointer.stopped
        sender.join(20)  # what comes late does what it did before
        found.append((stopped, trainer.step, rank in to, *trainer.close()))
    return found


def check(results: list[list[Any]], how: str) -> None:
    for trial, ranks in enumerate(zip(*results, strict=True)):
        context = f"trial {trial}: {ranks}"
        assert len({step for _, step, *_ in ranks}) == 1, context
        for stopped, step, signalled, passed, steps, whole in ranks:
            assert stopped and whole and steps[-1] == step, context
            assert passed >= 1 if signalled else passed == 0, context
            if how == "tick":
                assert steps == [step], context


@pytest.mark.parametrize("how", ["tick", "save", "save_async"])
def test_ranks_make_the_last_save_at_the_same_step_whoever_got_the_signal(
    pool2: RankPool, tmp_path: Path, how: str
) -> None:
    print(f"seed {SEED}")
    trials = 6 if how == "tick" else 2
    check(pool2.run(train, str(tmp_path), SEED, trials, how, timeout=90), how)


def test_four_ranks_make_the_last_save_at_the_same_tick(pool4: RankPool, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    check(pool4.run(train, str(tmp_path), SEED, 3, "tick", timeout=90), "tick")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tick", "save", "save_async"])
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_jobs_of_two_and_four_ranks_make_their_last_save(
    pool2: RankPool, pool4: RankPool, tmp_path: Path, how: str, seed: int
) -> None:
    for pool in (pool2, pool4):
        root = str(tmp_path / str(pool.world_size))
        check(pool.run(train, root, seed, 20, how, timeout=300), how)


def end_by_default(rank: int, group: Any, root: str) -> tuple[bool, list[int]]:
    """Rank 0 gets a signal that ends it; the other one leaves its loop."""
    stopping.LOOK_SECONDS = 0.05
    step = 0
    checkpointer = tr.Checkpointer(
        root, group=group, timeout=20, save_on_signal=lambda: (step, mine(rank, step))
    )
    for step in range(1, 10_000):
        dist.all_reduce(torch.ones(4), group=group)
        if rank == 0 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if checkpointer.tick(step):
            break
    return checkpointer.stopped, checkpointer.steps()


def test_the_signal_ends_its_rank_after_the_last_save_and_the_others_leave_their_loop(
    tmp_path: Path,
) -> None:
    results = run_ranks(
        end_by_default, 2, str(tmp_path), expect_exit={0: -signal.SIGTERM}, timeout=90
    )
    assert results[0] == Exited(-signal.SIGTERM)
    stopped, steps = results[1]
    assert stopped and len(steps) == 1 and steps[0] > 5


# One process on its own --------------------------------------------------------------------------


class SlowCommit(Files):
    """A commit that takes longer than the time between two signals."""

    def __init__(self, began: Any) -> None:
        self._began = began

    def rename(self, old: str, new: str) -> None:
        self._began.send("saving")
        time.sleep(0.3)
        super().rename(old, new)


def end_alone(link: Any, root: str) -> None:
    torch.set_num_threads(1)
    with stores_with(SlowCommit(link)):
        tr.Checkpointer(root, timeout=30, save_on_signal=lambda: (9, mine(0, 9)))
    link.send("ready")
    while True:
        time.sleep(10)


@pytest.mark.parametrize("gap", [0.0, 0.05])
def test_a_second_signal_does_not_break_off_the_last_save(tmp_path: Path, gap: float) -> None:
    ours, theirs = servers.Pipe()
    process = servers.Process(target=end_alone, args=(theirs, str(tmp_path)), daemon=True)
    process.start()
    try:
        assert ours.poll(60) and ours.recv() == "ready"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert ours.poll(30) and ours.recv() == "saving"
        for _ in range(3):
            time.sleep(gap)
            os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        assert process.exitcode == -signal.SIGTERM
    finally:
        process.kill()
        process.join(20)
    with tr.Checkpointer(tmp_path, group=False) as after:
        assert after.steps() == [9] and equal(after.load().state, mine(0, 9))


def test_a_signal_to_the_writer_process_does_not_end_it(tmp_path: Path) -> None:
    """A scheduler may signal every process of a job."""
    with tr.Checkpointer(tmp_path, group=False, timeout=30) as checkpointer:
        checkpointer.save_async(1, mine(0, 1)).result(20)
        writer = checkpointer._saver._shares.process.pid
        assert writer is not None
        os.kill(writer, signal.SIGTERM)
        checkpointer.save_async(2, mine(0, 2)).result(20)
        assert checkpointer._saver._shares.process.pid == writer
        assert equal(checkpointer.load(step=2).state, mine(0, 2))
