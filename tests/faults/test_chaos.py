"""Random parts of a training job die at random times, and it ends with the weights of a run that
nothing happened to."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.keeper.jobs import end_keepers, is_running
from tests.support.netns import Switch, Unavailable, enter_host
from torchrelay.demo.job import Settings
from torchrelay.demo.launcher import WorkerMessage
from torchrelay.demo.story import Story, TrainingRun
from torchrelay.demo.worker import KeptByWorker, Plan, Site

HOSTS = ("a", "a", "b", "b")
PATIENCE = 15.0  # seconds after which a worker gives up on another
QUIET = (0.0, 0.3)  # seconds from a new step to the next disturbance
PACE = 0.1  # seconds of a step at least: a run is not over before all has happened to it


class Chaos(Story):
    """Kills something, waits until training continues, and kills something else."""

    def __init__(self, plan: Plan, kinds: list[str], seed: int) -> None:
        super().__init__(plan, HOSTS, on_event=self.say)
        self._begun = time.monotonic()
        self.say(f"seed {seed}")
        self.patience = 100  # starts may fail: a cable may be out, or another kill come
        self._random = random.Random(seed)
        self._kinds = list(kinds)
        self._random.shuffle(self._kinds)
        self._due: float | None = None
        self._struck_at = 0  # the step at which something was last done to the job
        self.switch: Switch | None = None  # that the hosts are at
        self._cut: tuple[int, float] | None = None  # which of them is cut off, and until when
        self.done: Counter[str] = Counter()
        self.lost: list[str] = []  # comebacks to a step before the last one that was kept
        self._kept: dict[int, KeptByWorker] = {}  # by rank, in keepers that live
        self.keepers: set[int] = set()  # that there ever were
        self._gone: set[int] = set()  # those that were killed
        self._copied = 0  # the last step that every keeper had whole: its own and the copies
        self._copiers: set[int] = set()  # those keepers
        self._floor = 0  # what was safe at the last start

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:7.2f} s  {text}", flush=True)

    def tick(self) -> None:
        self._mend()
        if not self._kinds or self._trouble is not None or self._last <= self._struck_at:
            return
        if self._kinds[-1] == "host" and self._copied <= self._struck_at:
            return  # a keeper that was lost has its copies to make first
        now = time.monotonic()
        if self._due is None:
            self._due = now + self._random.uniform(*QUIET)
        if now >= self._due:
            self._due = None
            self._struck_at = self._last
            self._strike(self._kinds.pop())

    def _strike(self, kind: str) -> None:
        rank = self._random.randrange(len(self.launcher.hosts))
        host = self.launcher.hosts[rank]
        self.say(f"{kind}: worker {rank}, host {host}, after step {self._last}")
        self.done[kind] += 1
        if kind == "worker":
            self.launcher.kill(rank)
        elif kind == "stop":
            self.launcher.kill(rank, signal.SIGSTOP)
        elif kind == "keeper":
            self._lose_memory(host)
            self.launcher.kill_keeper(host)
        elif kind == "cut":
            self.cut_off(host)
        else:
            self._lose_memory(host)
            self.launcher.lose_host(host)

    def note(self, rank: int, kept: KeptByWorker) -> None:
        """Steps of a keeper that is dead by now do not count, whenever they are reported."""
        self.keepers.add(kept.keeper)
        if kept.keeper in self._gone:
            return
        before = self._kept.get(rank, KeptByWorker()).step
        self._kept[rank] = kept._replace(step=max(kept.step, before))
        copied = min(one.copied for one in self._kept.values())
        if len(self._kept) == len(HOSTS) and copied > self._copied:
            self._copied = copied
            self._copiers = {one.keeper for one in self._kept.values()}

    @property
    def safe(self) -> int:
        """The newest step that is in memory for all ranks: their keepers' own, or copies."""
        own = min(
            (self._kept.get(rank, KeptByWorker()).step for rank in range(len(HOSTS))), default=0
        )
        return max(own, self._copied if self._copiers - self._gone else 0)

    def _lose_memory(self, host: str) -> None:
        """A host's memory is gone, and with it the steps that are newer than the copies."""
        self._gone.add(self.launcher.keepers.get(host, 0))
        for rank, name in enumerate(HOSTS):
            if name == host:
                self._kept.pop(rank, None)

    def cut_off(self, host: str) -> None:
        """Pull a host's cable until the others have given it up."""
        assert self.switch is not None
        place = sorted(set(HOSTS)).index(host)
        self.switch.connect(place, up=False)
        self._cut = place, time.monotonic() + PATIENCE

    def _mend(self) -> None:
        if self._cut is not None and time.monotonic() > self._cut[1] and self.switch is not None:
            self.switch.connect(self._cut[0], up=True)
            self._cut = None

    def _start_again(self) -> None:
        self._floor = self.safe
        super()._start_again()

    def _is_end(self, message: WorkerMessage) -> bool:
        if message.word == "kept":
            self.note(message.rank, message.value[1])
        if message.word == "failed":
            self.say(f"worker {message.rank}: {message.value.strip().splitlines()[-1][:300]}")
        if message.word == "recovered" and message.value.step < self._floor:
            self.lost.append(
                f"step {message.value.step} after {self._floor}: {message.value.summary}"
            )
        return super()._is_end(message)


def settings(steps: int) -> Settings:
    return Settings(
        width=32, layers=1, vocabulary=64, tokens=8, batch=2, steps=steps, save_every=10**6
    )


def calm(folder: Path, steps: int) -> TrainingRun:
    folder.mkdir()
    plan = Plan(settings(steps), str(folder), None, PATIENCE)
    return Story(plan, HOSTS).play(300)


def disturbed(
    folder: Path,
    steps: int,
    kinds: list[str],
    seed: int,
    seconds: float,
    switch: Switch | None = None,
) -> Chaos:
    """A run that things happen to; with a switch its hosts are network namespaces."""
    folder.mkdir()
    job = f"chaos-{os.getpid()}-{seed}"
    sites = None if switch is None else sites_at(switch)
    plan = Plan(settings(steps), str(folder), job, PATIENCE, PACE, sites)
    chaos = Chaos(plan, kinds, seed)
    chaos.switch = switch
    try:
        chaos.play(seconds)
    finally:
        end_keepers(job)
        for host in set(HOSTS):
            chaos.launcher.kill_keeper(host)  # in a namespace its name is not found
    return chaos


def sites_at(switch: Switch) -> dict[str, Site]:
    return {
        host: Site(partial(enter_host, switch.door(place)), f"{switch.address(place)}:0")
        for place, host in enumerate(sorted(set(HOSTS)))
    }


def check(chaos: Chaos, expected: TrainingRun, kinds: list[str]) -> None:
    assert sum(chaos.done.values()) == len(kinds), chaos.done
    assert chaos.run.weights == expected.weights, "the weights are those of an undisturbed run"
    assert not chaos.lost, "every comeback is at the last step that was kept, or later"
    assert not chaos.run.differing and chaos.run.losses == expected.losses
    for one in chaos.run.comebacks:
        print(one.what, one.step, one.back_at, {k: round(v, 2) for k, v in one.phases.items()})


def nothing_is_left(chaos: Chaos) -> None:
    """All memory is of files without a name, which are gone with the last process that has them."""
    end = time.monotonic() + 30
    for pid in chaos.keepers - {0}:
        while is_running(pid):
            assert time.monotonic() < end, f"keeper {pid} is still there"
            time.sleep(0.01)


@pytest.mark.timeout(400)  # a machine that is busy takes long to start processes
def test_a_few_kills(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    kinds = ["worker", "keeper", "host"]
    expected = calm(tmp_path / "calm", 20)
    chaos = disturbed(tmp_path / "chaos", 20, kinds, seed, 300)
    check(chaos, expected, kinds)
    nothing_is_left(chaos)


@pytest.fixture
def switch() -> Iterator[Switch]:
    try:
        made = Switch(len(set(HOSTS)))
    except Unavailable as missing:
        pytest.skip(str(missing))
    with made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_is_cut_off(tmp_path: Path, switch: Switch) -> None:
    """The cable of a host is pulled, and plugged in again."""
    seed = random.SystemRandom().randrange(1 << 32)
    kinds = ["cut", "worker"]
    expected = calm(tmp_path / "calm", 20)
    check(disturbed(tmp_path / "chaos", 20, kinds, seed, 200, switch), expected, kinds)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(tmp_path: Path, switch: Switch) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    kinds = ["worker"] * 18 + ["keeper"] * 12 + ["host"] * 11 + ["stop"] * 5 + ["cut"] * 4
    expected = calm(tmp_path / "calm", 300)
    chaos = disturbed(tmp_path / "chaos", 300, kinds, seed, 1500, switch)
    check(chaos, expected, kinds)
    nothing_is_left(chaos)
