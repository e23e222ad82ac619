"""Wherever the process or the machine stops, the next load gives the old step or the new, whole.

Every call that changes the directory is a boundary. Each scenario runs once to count them, and then
once for every boundary, stopped there. What is left is looked at twice: as a killed process leaves
it, and as a power cut may leave it, in every extreme and some states by chance.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import pytest

import torchrelay as tr
from tests.support import saver
from tests.support.cuts import CONTENTS, Cut, CutFiles, Disk, NoExchange, Tree, plant, stores_with
from tests.support.saved import state, training, which
from torchrelay.shares import resting
from torchrelay.stores.local.store import LocalStore
from torchrelay.stores.tokens import new_token
from torchrelay.stores.writer import file_writer as writing

SEED = 20261115
ROLLS = 2  # states by chance, for each boundary

Contents = dict[int, int]  # by step, the seed of its state


class Scenario(NamedTuple):
    """`before` and `after`: what is there. In between, a step of either may be there or not."""

    before: Contents
    act: Callable[[Path], object]
    after: Contents
    files: type[CutFiles] = CutFiles
    prepare: Callable[[Path], object] = lambda root: None


def save(step: int, seed: int, **options: Any) -> Callable[[Path], object]:
    keep = options.pop("keep", None)
    return lambda root: tr.Checkpointer(root, keep=keep).save(step, state(seed), **options)


def leave_things(root: Path) -> None:
    """A draft, a replaced step whose successor came, and one whose successor did not."""
    store = LocalStore(root)
    draft = store.draft(9, new_token())
    draft.begin()
    sink = draft.open("model.safetensors", 10)
    sink.write(0, b"12345")
    sink.abort()
    draft._release()
    shutil.copytree(store._root.of(1), f"{store._root.of(1)}.old-{new_token()}")
    store._root.of(7).rename(f"{store._root.of(7)}.old-{new_token()}")


SCENARIOS = {
    "the first step": Scenario({}, save(1, 1), {1: 1}),
    "one step more": Scenario({1: 1}, save(2, 2), {1: 1, 2: 2}),
    "overwrite by exchange": Scenario({1: 1}, save(1, 2, overwrite=True), {1: 2}),
    "overwrite by renames": Scenario({1: 1}, save(1, 2, overwrite=True), {1: 2}, NoExchange),
    "delete": Scenario({1: 1, 2: 2}, lambda root: tr.Checkpointer(root).delete(1), {2: 2}),
    "prune": Scenario({1: 1, 2: 2}, save(3, 3, keep=tr.KeepLast(1)), {3: 3}),
    "nothing changed": Scenario({1: 1}, save(2, 1), {1: 1, 2: 1}),
    "nothing changed, overwrite": Scenario({1: 1}, save(1, 1, overwrite=True), {1: 1}),
    "nothing changed, prune": Scenario({1: 1, 2: 1}, save(3, 1, keep=tr.KeepLast(1)), {3: 1}),
    "clean": Scenario({1: 1, 7: 7}, tr.Checkpointer, {1: 1, 7: 7}, prepare=leave_things),
}


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are synced in their order, so that the same number is the same call each time."""
    monkeypatch.setattr(writing, "FINISHERS", 1)
    monkeypatch.setattr(resting, "LEAST_BYTES", 1)  # files of any size are taken over


@pytest.fixture
def quick() -> Iterator[Path]:
    """A directory in memory, if there is one: the tests make thousands of files."""
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="cut-", dir=base) as path:
        yield Path(path)


def prepared(scenario: Scenario, base: Path) -> Path:
    base.mkdir()
    root = base / "steps"
    if scenario.before:
        with tr.Checkpointer(root) as checkpointer:
            for step, seed in scenario.before.items():
                checkpointer.save(step, state(seed))
        scenario.prepare(root)
    return root


def run(scenario: Scenario, root: Path, files: CutFiles) -> bool:
    """Whether it came to its end."""
    with stores_with(files):
        try:
            scenario.act(root)
        except Cut:
            return False
    return True


def check(root: Path, scenario: Scenario, ended: bool) -> None:
    """A new process comes to this directory."""
    before, after = scenario.before, scenario.after
    with warnings.catch_warnings(), tr.Checkpointer(root) as checkpointer:
        warnings.simplefilter("error")  # nothing is damaged
        names = {path.name for path in root.iterdir()} if root.exists() else set()
        steps = checkpointer.steps()
        assert names == {f"step-{step}" for step in steps}, "left-overs"
        if ended:
            assert steps == sorted(after)
        newest = {max(contents, default=None) for contents in (before, after)}
        assert max(steps, default=None) in (newest if not ended else {max(after)})
        for step in steps:
            checkpointer.verify(step)
            seeds = {contents[step] for contents in (before, after) if step in contents}
            allowed = {after[step]} if ended else seeds
            assert which(checkpointer.load(step=step).state, allowed) in allowed
        if steps:
            assert checkpointer.load().step == max(steps)
        else:
            with pytest.raises(tr.errors.StepNotFoundError):
                checkpointer.load()
        checkpointer.save(50, state(50))
        assert which(checkpointer.load().state, [50]) == 50


def boundaries(scenario: Scenario, base: Path) -> Iterator[tuple[int, bool]]:
    """(call, whether to stop in the middle of it); the last one is past the end."""
    files = scenario.files()
    assert run(scenario, prepared(scenario, base / "count"), files)
    for at, call in enumerate(files.journal):
        yield at, False
        if call.kind == "write":
            yield at, True
    yield len(files.journal), False


@pytest.mark.parametrize("name", SCENARIOS)
def test_old_or_new_wherever_it_stops(name: str, quick: Path) -> None:
    stopped_everywhere(SCENARIOS[name], quick, share=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_old_or_new_wherever_it_stops_in_every_state(name: str, quick: Path) -> None:
    stopped_everywhere(SCENARIOS[name], quick, share=1)


def stopped_everywhere(scenario: Scenario, quick: Path, share: int) -> None:
    """Stop at every boundary. Of the states that a power cut may leave there, one in `share` is
    looked at, in turn: neighbouring boundaries leave much the same ones."""
    print(f"seed {SEED}")
    seen = 0
    for at, half in boundaries(scenario, quick):
        base, left = quick / "run", quick / "left"
        root = prepared(scenario, base)
        disk = Disk(base)
        files = scenario.files(at, half=half)
        ended = run(scenario, root, files)
        disk.play(files.journal)
        rng = random.Random(SEED + 1000 * at + half)
        outcomes = [(names, contents) for names in (0.0, 1.0) for contents in CONTENTS]
        trees: list[Tree] = []
        outcomes += [(0.5, "any")] * ROLLS
        for names, contents in outcomes[at % share :: share]:
            tree = disk.left(names=names, contents=contents, rng=rng)
            if tree in trees:
                continue
            trees.append(tree)
            plant(tree, left)
            try:
                check(left / "steps", scenario, ended)
            except BaseException:
                print(f"call {at}, half {half}, ended {ended}, names {names}, contents {contents}")
                print(*(call[:2] for call in files.journal), sep="\n")
                raise
            shutil.rmtree(left)
            seen += 1
        check(root, scenario, ended)  # the process alone was killed
        shutil.rmtree(base)
    print(f"{seen} states")
    assert seen > 10


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "clean" not in name])
def test_a_call_that_fails_is_a_typed_error(name: str, quick: Path) -> None:
    """One call fails and the process lives on: old or new, told so, and nothing is left behind."""
    scenario = SCENARIOS[name]
    for at, half in boundaries(scenario, quick):
        if half:
            continue
        root = prepared(scenario, quick / "run")
        files = scenario.files(at, error=errno.EIO)
        failed: tr.errors.RelayError | None = None
        with stores_with(files):
            try:
                scenario.act(root)
            except tr.errors.RelayError as fault:
                failed = fault
        if failed is not None:
            assert isinstance(failed, tr.errors.CheckpointError) and failed.file, failed
            assert os.strerror(errno.EIO) in str(failed)
        with warnings.catch_warnings(), tr.Checkpointer(root) as checkpointer:
            warnings.simplefilter("error")
            found = {s: which(checkpointer.load(step=s).state, (1, 2, 3)) for s in (1, 2, 3)
                     if s in checkpointer.steps()}  # fmt: skip
            last = max(found, default=None)
            if failed is None:
                assert last == max(scenario.after) and found[last] == scenario.after[last]
            else:
                assert "torn" not in found.values()
                assert last in (max(scenario.before, default=None), max(scenario.after))
            checkpointer.save(50, state(50))
        names = {path.name for path in root.iterdir()}
        assert names == {f"step-{step}" for step in (*found, 50)}, names
        shutil.rmtree(quick / "run")


class Skips(CutFiles):
    """Says that it syncs."""

    skipped: str

    def _call(self, kind: str, path: str, data: Any = None) -> None:
        super()._call(kind, path, data)
        self.journal[:] = [call for call in self.journal if call.kind != self.skipped]


def test_what_did_not_change_is_linked(quick: Path) -> None:
    """So the scenarios above stop before, at and after such a call."""
    for name, scenario in SCENARIOS.items():
        files = scenario.files()
        assert run(scenario, prepared(scenario, quick / name.replace(" ", "-")), files)
        links = [call for call in files.journal if call.kind == "link"]
        assert bool(links) == name.startswith("nothing changed"), name


@pytest.mark.parametrize("kind", ["sync", "sync_dir"])
def test_a_sync_that_is_left_out_is_found(kind: str, quick: Path) -> None:
    """The model of the medium is worth something: a store that does not sync fails."""
    scenario = SCENARIOS["one step more"]
    root = prepared(scenario, quick / "run")
    disk = Disk(quick / "run")
    files = type("", (Skips,), {"skipped": kind})()
    assert run(scenario, root, files)
    files._call("end", "")
    disk.play(files.journal)
    rng = random.Random(SEED)
    found = 0
    for names, contents in ((0.0, "kept"), (1.0, "lost"), (1.0, "zeros")):
        plant(disk.left(names=names, contents=contents, rng=rng), quick / "left")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warnings, "warn", lambda *args, **kwargs: None)
            try:
                check(quick / "left" / "steps", scenario, True)
            except (AssertionError, tr.errors.RelayError):
                found += 1
        shutil.rmtree(quick / "left")
    assert found


# Real processes, real kills ----------------------------------------------------------------------


class Round(NamedTuple):
    """What a killed trainer had said."""

    begun: set[int]
    acknowledged: int
    writers: set[int]


def listen(link: Connection, until: float) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(EOFError, OSError, UnpicklingError):
        while link.poll(max(0.0, until - time.monotonic())):
            yield link.recv()


def some(link: Connection, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Reports until it has begun some steps more, and for a moment beyond."""
    left = rng.randrange(1, 7)
    for kind, value in listen(link, time.monotonic() + 20):
        yield kind, value
        left -= kind == "begin"
        if left < 0:
            break
    yield from listen(link, time.monotonic() + rng.uniform(0, 0.02))


def one_round(root: Path, first: int, rng: random.Random) -> Round:
    """Let a trainer save for a while, then kill it, its writer, or first one and then both."""
    process, link = saver.start(str(root), first, rng.randrange(1 << 30))
    begun: set[int] = set()
    acknowledged, writers = 0, [0]

    def take(reports: Iterator[tuple[str, Any]]) -> None:
        nonlocal acknowledged
        for kind, value in reports:
            if kind == "begin":
                begun.add(value)
            elif kind == "ack":
                acknowledged = max(acknowledged, value)
            elif kind == "writer" and value is not None and value != writers[-1]:
                writers.append(value)

    def kill(pid: int | None) -> None:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    try:
        assert link.poll(60), "the trainer did not start"
        how = rng.choice(["trainer", "both", "writer"])
        take(some(link, rng))
        if how == "writer":
            kill(writers[-1])
            take(some(link, rng))
        if how == "both":
            kill(writers[-1])
        kill(process.pid)
        process.join(20)
        take(listen(link, time.monotonic() + 20))  # what it had said; ends with the end of file
    finally:
        process.kill()
        process.join(20)
        link.close()
    assert process.exitcode == -signal.SIGKILL, f"it ended by itself: {process.exitcode}"
    return Round(begun, acknowledged, set(writers[1:]))


def killed_often(root: Path, rounds: int, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    newest = 0
    in_between = 0
    for number in range(rounds):
        told = one_round(root, newest + 1, rng)
        where = f"round {number}, seed {seed}: {told}"
        end = time.monotonic() + 20
        while not all(map(saver.is_gone, told.writers)):
            assert time.monotonic() < end, f"a writer process stays: {where}"
            time.sleep(0.005)
        committed = max(told.acknowledged, newest)
        with warnings.catch_warnings(), tr.Checkpointer(root, timeout=60) as checkpointer:
            warnings.simplefilter("error")  # nothing is damaged
            names = {path.name for path in root.iterdir()} if root.exists() else set()
            assert names == {f"step-{step}" for step in checkpointer.steps()}, where
            for step in checkpointer.steps():
                checkpointer.verify(step)
            if not checkpointer.steps():
                assert committed == 0, f"an acknowledged step is lost: {where}"
                continue
            loaded = checkpointer.load()
        assert loaded.step >= committed, f"an acknowledged step is lost: {where}"
        assert loaded.step == newest or loaded.step in told.begun, where
        assert which(loaded.state, [loaded.step], training) == loaded.step, where
        in_between += loaded.step < max(told.begun, default=0)
        newest = loaded.step
    print(f"{newest} steps, {in_between} of {rounds} kills while a step was under way")
    assert newest > rounds and in_between > rounds // 5


@pytest.mark.timeout(300)
def test_killed_at_any_time(tmp_path: Path) -> None:
    killed_often(tmp_path / "steps", 8, SEED)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_two_hundred_times(tmp_path: Path) -> None:
    killed_often(tmp_path / "steps", 200, SEED + 1)
