"""A run of a training job with kills, and its results: losses, weights, times of recovery."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torchrelay.demo.launcher import Launcher, LaunchError, WorkerMessage
from torchrelay.demo.worker import Brought, Plan

PAUSE = 0.05  # seconds between two looks at what happens by time
FAILURES = 4  # starts that may fail, one after the other, before it is given up

Phases = dict[str, float]
PHASES = ("detect", "start", "fetch", "verify", "land", "train")


class Kill(NamedTuple):
    """A kill after a step: of a worker, or of its host with the keeper there."""

    step: int
    what: Literal["worker", "host"]
    rank: int


class Comeback:
    """The recovery after a kill, up to the first new step."""

    def __init__(self, kill: Kill | None, step: int) -> None:
        self.what = "a failure" if kill is None else f"a {kill.what}"
        self.step = step  # that was done when it came
        self.killed = self.noticed = time.monotonic()
        self.ready: dict[int, float] = {}
        self.brought: dict[int, tuple[float, Brought]] = {}
        self.phases: Phases = {}  # seconds

    def end(self, first_step: float) -> None:
        back, brought = max(self.brought.values(), key=lambda one: one[0])
        self.back_at, self.summary = brought.step, brought.summary  # the step that was brought back
        ready = max(self.ready.values(), default=self.noticed)
        verify = brought.seconds.get("verify", 0.0)
        land = brought.seconds.get("land", 0.0) + brought.seconds.get("commit", 0.0)
        self.phases = {
            "detect": self.noticed - self.killed,
            "start": ready - self.noticed,
            "fetch": max(0.0, back - ready - verify - land),
            "verify": verify,
            "land": land,
            "train": first_step - back,
        }

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


class TrainingRun(NamedTuple):
    """The losses of each step by rank, and a digest of each rank's weights in the end."""

    losses: dict[int, dict[int, float]]
    weights: dict[int, str]
    comebacks: list[Comeback]
    differing: list[int]  # steps that were done twice, with another loss


class Story:
    """One run, from its first start to its end. `on_step` is called with each newest step,
    `on_event` with a sentence about each thing that happens."""

    def __init__(
        self,
        plan: Plan,
        hosts: Sequence[str],
        kills: Sequence[Kill] = (),
        on_step: Callable[[int], object] = lambda _: None,
        on_event: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._kills = list(kills)
        self._on_step, self._on_event = on_step, on_event
        self.launcher = Launcher(plan, list(hosts))
        self.run = TrainingRun({}, {}, [], [])
        self._trouble: Comeback | None = None
        self._failures: list[str] = []  # of this start: why workers ended
        self._last = 0
        self._tries = 0  # starts since the last new step
        self.patience = FAILURES

    def play(self, seconds: float) -> TrainingRun:
        """Start the job and see it to its end; `LaunchError` where it does not come there."""
        end = time.monotonic() + seconds
        try:
            self.launcher.start()
            while len(self.run.weights) < len(self.launcher.hosts):
                left = end - time.monotonic()
                if left <= 0:
                    raise LaunchError(f"not over in {seconds:g} s: {self._failures[-1:]}")
                ends = [self._is_end(one) for one in self.launcher.receive(min(left, PAUSE))]
                if any(ends):
                    self._start_again()
                self.tick()
            self.launcher.dismiss()
        finally:
            self.launcher.stop()
        return self.run

    def tick(self) -> None:
        """Called all the time: what is to happen by now happens."""
        if self._kills and self._kills[0].step <= self._last and self._trouble is None:
            self._disturb(self._kills.pop(0))

    def _is_end(self, message: WorkerMessage) -> bool:
        """Note a message; returns whether a worker has died."""
        trouble = self._trouble
        if message.word == "ready" and trouble is not None:
            trouble.ready[message.rank] = message.time
        elif message.word == "recovered" and trouble is not None:
            trouble.brought[message.rank] = message.time, message.value
        elif message.word == "loss":
            self._loss(message)
        elif message.word == "kept":
            self._step(message)
        elif message.word == "done":
            self.run.weights[message.rank] = message.value
        elif message.word == "failed":
            self._failures.append(message.value)
        elif message.word == "ended":
            self._failures.append(f"worker {message.rank} ended with exit code {message.value}")
        return message.word in ("ended", "failed") and message.rank not in self.run.weights

    def _loss(self, message: WorkerMessage) -> None:
        step, loss = message.value
        known = self.run.losses.setdefault(step, {}).setdefault(message.rank, loss)
        if known != loss:
            self.run.differing.append(step)

    def _step(self, message: WorkerMessage) -> None:
        """A rank has done a step, and kept it."""
        step, trouble = message.value[0], self._trouble
        if trouble is not None and step > trouble.step and trouble.brought:
            trouble.end(message.time)
            self.run.comebacks.append(trouble)
            self._trouble = None
        self._tries = 0 if step > self._last else self._tries
        self._last = max(self._last, step)
        self._on_step(step)

    def _disturb(self, kill: Kill) -> None:
        host = self.launcher.hosts[kill.rank]
        self._trouble = Comeback(kill, self._last)
        if kill.what == "worker":
            self._on_event(f"worker {kill.rank} on host {host} is killed after step {kill.step}")
            self.launcher.kill(kill.rank, signal.SIGKILL)
        else:
            self._on_event(f"host {host} is lost after step {kill.step}, keeper and all")
            self.launcher.lose_host(host)
            spare = f"{host}-again"
            self.launcher.hosts = [spare if one == host else one for one in self.launcher.hosts]

    def _start_again(self) -> None:
        self._tries += 1
        if self._tries > self.patience:
            raise LaunchError("workers fail again and again:\n" + "\n".join(self._failures))
        if self._trouble is None or self._tries > 1:  # not by one of our kills
            for failure in self._failures:
                self._on_event(f"a worker has failed: {failure.strip().splitlines()[-1]}")
        if self._trouble is None or self._trouble.brought:
            self._trouble = Comeback(None, self._last)
        self._trouble.noticed = time.monotonic()
        for message in self.launcher.stop():
            if message.word == "loss":
                self._loss(message)
        # They all come to the end again, also those that were there.
        self.run.weights.clear()
        self._failures.clear()
        self._on_event("all workers are ended and started again")
        self.launcher.start()
