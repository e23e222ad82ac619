"""`examples/weight_sync`: samplers have the trainers' weights, whoever is killed and comes back."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.forks import Done, run_program

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "weight_sync" / "run.py"
SECONDS = 150


class Sampled(NamedTuple):
    """A text of a sampler, in its first or second life."""

    life: int
    version: int
    digest: str
    text: str


def sampled_in(output: str, rank: int) -> list[Sampled]:
    """The texts of a sampler, in the order of their lines."""
    found, life = [], 1
    for line in output.splitlines():
        if re.match(rf"sampler {rank} is back with version \d+$", line):
            life += 1
        pattern = rf"sampler {rank} version (\d+) \((\w+), \d+ bytes\): (.+)$"
        if one := re.match(pattern, line):
            text = ast.literal_eval(one[3])
            found.append(Sampled(life, int(one[1]), one[2], text))
    return found


def by_step(output: str, pattern: str) -> dict[int, set[str]]:
    """Values that the trainers showed for a step, as often as they came there."""
    found: dict[int, set[str]] = {}
    for step, value in re.findall(pattern, output, re.MULTILINE):
        found.setdefault(int(step), set()).add(value)
    return found


def check(done: Done, length: int) -> None:
    assert done.code == 0, done.output
    lines = done.output.splitlines()
    assert lines[-1] == "done"
    texts = [sampled_in(done.output, rank) for rank in (0, 1)]

    # Weights are those of the trainers, and both ranks have one result.
    published = by_step(done.output, r"^trainers version (\d+) \((\w+)\)$")
    assert all(len(digests) == 1 for digests in published.values()), "resumed exactly"
    for one in (*texts[0], *texts[1]):
        assert published[one.version] == {one.digest}
        assert one.text.startswith("Shall I ") and len(one.text) == length + len("Shall I ")
    said = [{one.version: one.text for one in some} for some in texts]
    for version in said[0].keys() & said[1].keys():
        assert said[0][version] == said[1][version]

    # Versions rise in each life, and over a kill of the trainers.
    for some in texts:
        for before, after in itertools.pairwise(some):
            assert before.version < after.version or before.life < after.life
    first, second = (lines.index(f"{who} was killed") for who in ("sampler 1", "trainer 2"))
    assert first < second
    for rank in (0, 1):
        back = [i for i, line in enumerate(lines) if line.startswith(f"sampler {rank} is back")]
        assert len(back) == 1 and first < back[0] < second
    (resumed,) = (i for i, line in enumerate(lines) if line.startswith("trainers are back"))
    assert second < resumed
    newest = max(by_step("\n".join(lines[:second]), r"^trainers step (\d+) loss (\S+)$"))
    last = max(published)
    assert last > newest and all(some[-1].version == last for some in texts)

    # The model learns, and steps that were done twice have one loss.
    losses = by_step(done.output, r"^trainers step (\d+) loss (\S+)$")
    assert sorted(losses) == list(range(1, last + 1))
    assert all(len(values) == 1 for values in losses.values())
    assert float(*losses[last]) < 0.8 * float(*losses[1])


def processes_with(words: bytes) -> list[str]:
    """The processes that have this in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if words in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_text())
    return found


@contextmanager
def started(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command with an interpreter of its own. Afterwards none of its processes is left."""
    name = f"weight-sync-{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "TEST_NAME": name},
    ) as command:
        try:
            yield command
        finally:
            command.kill()
    deadline = time.monotonic() + 20  # servers notice that their trainer is gone
    while found := processes_with(name.encode()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@pytest.mark.timeout(SECONDS + 20)
def test_samplers_follow_trainers_through_kills(tmp_path: Path) -> None:
    options = ["--steps", "12", "--layers", "1", "--length", "6", "--network"]
    check(run_program(str(PROGRAM), *options, folder=tmp_path, seconds=SECONDS), 6)


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 60)
def test_the_command_as_it_is(tmp_path: Path) -> None:
    """With more steps, and with memory that is mapped."""
    with started(tmp_path) as command:
        output, _ = command.communicate(timeout=2 * SECONDS)
    check(Done(command.returncode, output), 40)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_a_command_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with started(tmp_path) as command:
        assert command.stdout is not None
        assert any(line.startswith("sampler 0 version") for line in command.stdout)
