"""A mirror in a bucket whose service fails, stalls and dies, and jobs that are killed meanwhile.

A trainer in a process of its own saves step after step; after each it waits for the test, which has
broken the service, or killed something, by then. Whatever happens, the saves succeed, each step in
the mirror is whole and verifies, and a job comes back to the newest step of both places.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.forks import servers, take_environment
from tests.support.ranks import RankPool
from tests.support.rounds import rounds
from tests.support.s3 import DROP, LOSE, S3
from tests.support.saved import equal, state
from tests.support.saver import is_gone

SECONDS = 90.0
STEPS = 50
SEED = 20
MODES = ("works", "works", "fails", "refuses", "loses", "stalls", "dies")


def train(root: str, url: str, environment: dict[str, str], keep: int, link: Connection) -> None:
    """Restores, reports ("start", step, whether it was exact), and does what it is told to: "save"
    a step, "look" at its copies, "close". Reports each with the step, the process that copies and
    the number of failures."""
    take_environment(environment)
    torch.set_num_threads(1)
    mirror = tr.Mirror(url, keep=3)
    with tr.Checkpointer(root, keep=keep, mirror=mirror, timeout=30, no_dist=True) as ckpt:
        into = state(0)
        step = ckpt.restore(into) or 0
        link.send(("start", step, equal(into, state(step))))
        mirrored = ckpt._stored._mirror
        assert mirrored is not None and mirrored._mirroring is not None
        while (word := link.recv()) != "close":
            if word == "save":
                step += 1
                ckpt.save_async(step, state(step)).result(SECONDS)
            link.send((word, step, mirrored._mirroring._process.pid, mirrored.failures))
    link.send(("close", step, None, mirrored.failures))


class Job:
    """A trainer that can be killed."""

    def __init__(self, root: Path, url: str, keep: int = 2) -> None:
        self.link, theirs = servers.Pipe()
        arguments = (str(root), url, dict(os.environ), keep, theirs)
        self.process = servers.Process(target=train, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.copier: int | None = None
        self.failures = 0
        self.begun, exact = self._answer("start")
        assert exact

    def _answer(self, word: str) -> Any:
        assert self.link.poll(SECONDS), f"no {word}"
        found, *values = self.link.recv()
        assert found == word
        return values

    def ask(self, word: str) -> int:
        """Have it do something; its step."""
        self.link.send(word)
        step, self.copier, self.failures = self._answer(word)
        return int(step)

    def close(self) -> None:
        self.ask("close")
        self.process.join(SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)
        end = time.monotonic() + SECONDS
        while self.copier is not None and not is_gone(self.copier):
            assert time.monotonic() < end, "the process that copies outlives its trainer"
            time.sleep(0.01)


@contextmanager
def job_at(root: Path, url: str, keep: int = 2) -> Iterator[Job]:
    job = Job(root, url, keep)
    try:
        yield job
    finally:
        job.process.kill()


class Service:
    """A bucket's service that can be made to fail (503), refuse, stall, lose answers or be dead."""

    def __init__(self, s3: S3, rng: random.Random) -> None:
        self.s3, self._rng = s3, rng
        self.mode = "works"
        self.seen = threading.Event()  # a request that writes came while it was not working
        self._freed = threading.Event()
        s3.hook = self._verdict

    def turn(self, mode: str) -> None:
        self.mode = mode
        self._freed.set()  # those that were stalled are answered
        self._freed, self.seen = threading.Event(), threading.Event()

    def _verdict(self, method: str, path: str) -> int | None:
        mode, freed = self.mode, self._freed
        if mode == "dies":
            self.seen.set()
            return DROP
        if mode == "works" or method in ("GET", "HEAD"):
            return None
        self.seen.set()
        if mode == "fails":
            return 503 if self._rng.random() < 0.7 else None
        if mode == "refuses":
            return 403
        if mode == "loses":
            return LOSE if self._rng.random() < 0.7 else None
        freed.wait(SECONDS)  # stalls
        return None


def check_mirror(url: str) -> list[int]:
    """Each step that the mirror lists is whole, verifies, and is the step that was saved."""
    options = tr.options.CheckpointerOptions(read_only=True)
    with tr.Checkpointer(url, no_dist=True, options=options, timeout=SECONDS) as there:
        steps = there.steps()
        for step in steps:
            assert there.holds(step) and there.verify(step) == step
            assert equal(there.load(step=step).state, state(step))
    return steps


def wait_for_copy(s3: S3, step: int) -> None:
    """Until the mirror has a step, or a newer one."""
    end = time.monotonic() + SECONDS
    while not any(step <= found for found in committed(s3)):
        assert time.monotonic() < end, f"step {step} was not copied"
        time.sleep(0.05)


def committed(s3: S3) -> list[int]:
    puts = s3.seen(r"^PUT .*/manifest\.json$")
    return [int(line.split("/step-")[1].split("/")[0]) for line in puts]


@pytest.mark.timeout(900)
def test_steps_are_copied_whatever_happens_to_service_trainer_and_copies(
    s3: S3, tmp_path: Path
) -> None:
    print(f"seed {SEED}")
    rng, url = random.Random(SEED), s3.url("mirror")
    service = Service(s3, rng)
    root, last, done, kills = tmp_path / "root", rounds(STEPS), 0, {"trainer": 0, "copier": 0}
    closed = False
    while not closed:
        with job_at(root, url) as job:
            assert job.begun == done
            while done < last:
                service.turn(rng.choice(MODES))
                done = job.ask("save")
                if service.mode != "works" and rng.random() < 0.7:
                    service.seen.wait(2)  # the copy has come so far
                fate = rng.random()
                if fate < 0.25 and job.copier is not None:
                    with suppress(ProcessLookupError):
                        os.kill(job.copier, signal.SIGKILL)
                    kills["copier"] += 1
                elif fate < 0.4:
                    job.kill()
                    kills["trainer"] += 1
                    break
                elif fate < 0.6 and service.mode == "works" and not job.failures:
                    wait_for_copy(s3, done)
            else:
                service.turn("works")
                job.close()
                closed = True
        service.turn("works")
        check_mirror(url)
    print(kills)
    shutil.rmtree(root)
    with job_at(root, url) as job:
        assert job.begun == last  # `close` has copied it, tried again if need be
        assert job.ask("save") == last + 1
        job.close()
        assert job.failures == 0
    assert check_mirror(url)[-1] == last + 1


def objects(s3: S3, pattern: str) -> list[str]:
    """Data objects that were sent, by their names."""
    return [line.rpartition("/")[2].partition("?")[0] for line in s3.seen(rf"^PUT .*{pattern}")]


@pytest.mark.parametrize("victim", ["trainer", "copier"])
def test_a_copy_that_was_killed_continues(s3: S3, tmp_path: Path, victim: str) -> None:
    """All but one file was sent. The step is the newest one when the job is back, or the copy is
    tried again."""
    held, freed, url, root = threading.Event(), threading.Event(), s3.url("mirror"), tmp_path / "a"

    def hold(method: str, path: str) -> None:
        if method == "PUT" and "manifest.json" in path:
            held.set()
            freed.wait(SECONDS)

    s3.hook = hold
    with job_at(root, url) as job:
        assert job.ask("save") == 1
        assert held.wait(SECONDS)
        job.ask("look")
        assert job.copier is not None
        sent = objects(s3, r"\.safetensors")
        assert sent
        if victim == "trainer":
            job.kill()
        else:
            os.kill(job.copier, signal.SIGKILL)
            while not is_gone(job.copier):
                time.sleep(0.01)
        s3.hook = None
        s3.requests.clear()
        if victim == "copier":
            job.close()
            assert job.failures == 1
    if victim == "trainer":
        with job_at(root, url) as job:
            assert job.begun == 1
            job.close()
            assert job.failures == 0
    freed.set()
    assert objects(s3, r"\.safetensors") == [] and check_mirror(url) == [1]


def test_a_mirror_that_stalls_keeps_no_save_waiting(s3: S3, tmp_path: Path) -> None:
    """Saves are committed while the first request of a copy is not answered at all."""
    service = Service(s3, random.Random(0))
    service.turn("stalls")
    with job_at(tmp_path / "root", s3.url("mirror"), keep=1) as job:
        assert [job.ask("save") for _ in range(6)] == [1, 2, 3, 4, 5, 6]
        assert service.seen.wait(SECONDS) and not committed(s3) and job.failures == 0
        service.turn("works")
        job.close()
        assert job.failures == 0
    assert check_mirror(s3.url("mirror")) == [1, 6]


def test_a_bucket_with_a_mirror_in_a_directory(s3: S3, tmp_path: Path) -> None:
    root, mirror = s3.url("root"), str(tmp_path / "mirror")
    with tr.Checkpointer(root, mirror=mirror, no_dist=True, timeout=SECONDS) as ckpt:
        ckpt.save_async(1, state(1)).result(SECONDS)
    assert ckpt.mirror_failures == 0
    s3.hook = lambda method, path: 404 if "safetensors" in path else None
    with tr.Checkpointer(root, mirror=mirror, no_dist=True, timeout=SECONDS) as ckpt:
        into = state(0)
        with pytest.warns(RuntimeWarning, match="taken from"):
            assert ckpt.restore(into) == 1 and equal(into, state(1))
        s3.hook = None


def save_and_lose(
    rank: int, group: Any, root: str, mirror: str, environment: dict[str, str]
) -> list[Any]:
    os.environ.update(environment)
    whole = torch.arange(24.0).view(6, 4)

    def mine(step: int) -> dict[str, Any]:
        return {"w": whole[rank * 3 : rank * 3 + 3] + step, "rank": rank, "step": step}

    found: list[Any] = []
    with tr.Checkpointer(root, mirror=mirror, group=group, timeout=SECONDS) as ckpt:
        for step in (1, 2, 3):
            ckpt.save_async(step, mine(step)).result(SECONDS)
        found.append(ckpt._stored._mirror._mirroring is not None)  # type: ignore[union-attr]
    torch.distributed.barrier(group)
    if rank == 0:
        shutil.rmtree(root)
    torch.distributed.barrier(group)
    with tr.Checkpointer(root, mirror=mirror, group=group, timeout=SECONDS) as ckpt:
        into = mine(0)
        found += [ckpt.restore(into), equal(into, mine(3))]
        ckpt.save(4, mine(4))
        recovered = tr.recover([ckpt], mine(0), group=group)
        found += [recovered.step if recovered is not None else None]
        found.append(ckpt.rollback(3))
        into = mine(0)
        found += [ckpt.restore(into), equal(into, mine(3))]
    return found


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_two_ranks_come_back_from_the_mirror(
    s3: S3, pool2: RankPool, tmp_path: Path, kind: str
) -> None:
    mirror = s3.url("mirror") if kind == "bucket" else str(tmp_path / "mirror")
    env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    got = pool2.run(save_and_lose, str(tmp_path / "root"), mirror, env, timeout=180)
    assert got == [
        [True, 3, True, 4, [4], 3, True],
        [False, 3, True, 4, [4], 3, True],
    ]
