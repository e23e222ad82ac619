"""A `Checkpointer` with a mirror: what is copied, what a job that lost its directory comes back to,
and what a mirror that fails costs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import torchrelay as tr
from tests.support.ranks import state_of
from tests.support.saved import equal, state
from torchrelay.mirror.background import Mirroring
from torchrelay.mirror.client import MirrorProcess

SECONDS = 60.0


def mirroring(ckpt: tr.Checkpointer) -> Mirroring:
    mirrored = ckpt._stored._mirror
    assert mirrored is not None and mirrored._mirroring is not None
    return mirrored._mirroring


def settled(ckpt: tr.Checkpointer) -> None:
    """Wait until nothing is copied."""
    running = mirroring(ckpt)._running
    assert running is None or running.wait(SECONDS)


class Stopped:
    """A process that copies, and does nothing now."""

    def __init__(self, process: MirrorProcess) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.asked = threading.Event()
        exchange = process.exchange

        def noted(*arguments: Any) -> bytes:
            self.asked.set()
            return exchange(*arguments)

        process.exchange = noted  # type: ignore[method-assign]
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it, once it has been sent a request: before that, another one would be started."""
        assert self.asked.wait(SECONDS)
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def stopped(ckpt: tr.Checkpointer) -> Iterator[Stopped]:
    """Within: the process that copies does nothing. A save before has started it."""
    settled(ckpt)
    process = mirroring(ckpt)._process
    found = Stopped(process)
    try:
        yield found
    finally:
        del process.exchange
        if state_of(found.pid) not in "ZX":
            os.kill(found.pid, signal.SIGCONT)


def files_of(root: Path) -> dict[str, bytes]:
    """All files of committed steps."""
    return {
        f"{folder.name}/{file.name}": file.read_bytes()
        for folder in root.glob("step-*")
        if (folder / "manifest.json").exists() and ".tmp-" not in folder.name
        for file in folder.iterdir()
    }


def steps(place: Path) -> list[int]:
    """The steps of a place; each verifies."""
    options = tr.options.CheckpointerOptions(read_only=True)
    with tr.Checkpointer(place, no_dist=True, options=options) as there:
        return [there.verify(step) for step in there.steps()]


class Places:
    def __init__(self, folder: Path) -> None:
        self.root, self.mirror = folder / "root", folder / "mirror"

    def open(
        self, root_keep: Any = None, timeout: float = SECONDS, **mirror: Any
    ) -> tr.Checkpointer:
        chosen = tr.Mirror(self.mirror, **mirror)
        return tr.Checkpointer(
            self.root, keep=root_keep, mirror=chosen, timeout=timeout, no_dist=True
        )


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_committed_steps_are_in_the_mirror(places: Places) -> None:
    with places.open() as ckpt:
        for step in (1, 2, 3):
            ckpt.save_async(step, state(step)).result(SECONDS)
            settled(ckpt)
        assert ckpt.mirror_failures == 0
    assert steps(places.mirror) == [1, 2, 3]
    assert files_of(places.mirror) == files_of(places.root)


def test_a_place_alone_is_a_mirror(places: Places) -> None:
    with tr.Checkpointer(places.root, mirror=str(places.mirror), no_dist=True) as ckpt:
        ckpt.save(1, state(1))
    assert steps(places.mirror) == [1]


def test_every_third_and_two_of_them_stay(places: Places) -> None:
    with places.open(every=3, keep=2) as ckpt:
        for step in range(1, 12):
            ckpt.save(step, state(step))
            settled(ckpt)
    assert steps(places.mirror) == [7, 10]


def test_retention_by_a_metric(places: Places) -> None:
    with places.open(keep=tr.KeepBest("loss") | 1) as ckpt:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
            ckpt.save(step, state(step), metrics={"loss": loss})
            settled(ckpt)
    assert steps(places.mirror) == [2, 4]


def test_a_step_stays_until_it_is_copied_and_those_between_are_left_out(places: Places) -> None:
    with places.open(root_keep=1) as ckpt:
        ckpt.save(1, state(1))
        with stopped(ckpt):
            for step in (2, 3, 4):
                ckpt.save(step, state(step))
            assert ckpt.steps() == [2, 3, 4]  # 2 was being copied, and 3 was next
        settled(ckpt)
        assert ckpt.mirror_failures == 0
        ckpt.save(5, state(5))
        assert ckpt.steps() == [5]
    assert steps(places.mirror) == [1, 2, 4, 5]


def test_a_process_that_dies_costs_a_failure_and_the_next_step_is_copied(places: Places) -> None:
    with places.open(every=10) as ckpt:
        ckpt.save(1, state(1))
        with stopped(ckpt) as copier:
            for step in range(2, 12):
                ckpt.save(step, state(step))
            copier.kill()
        settled(ckpt)
        assert ckpt.mirror_failures == 1
        ckpt.save(12, state(12))  # which is not due, but the one before is owed
    assert steps(places.mirror) == [1, 12]


def test_at_the_end_a_copy_that_is_owed_is_tried_again(places: Places) -> None:
    places.mirror.write_text("a file, where a directory is needed")
    with places.open() as ckpt:
        ckpt.save(1, state(1))
        settled(ckpt)
        assert ckpt.mirror_failures == 1
        places.mirror.unlink()
    assert ckpt.mirror_failures == 1
    assert steps(places.mirror) == [1]


def test_a_close_that_takes_too_long_ends_the_copy(places: Places) -> None:
    ckpt = places.open(timeout=4)
    ckpt.save(1, state(1))
    with stopped(ckpt) as copier:
        ckpt.save(2, state(2))
        ckpt.close()
        assert state_of(copier.pid) in "ZX"
    assert ckpt.mirror_failures == 1
    with places.open() as ckpt:
        assert ckpt.restore(state(0)) == 2
    assert steps(places.mirror) == [1, 2]


def test_a_damaged_file_is_not_copied_and_is_reported(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    with places.open(root_keep=1) as ckpt:
        ckpt.save(1, state(1))
        with stopped(ckpt):
            ckpt.save(2, state(2))
            damage(places.root / "step-2" / "model.safetensors")
        settled(ckpt)
        assert ckpt.mirror_failures == 1
        assert "step-2/model.safetensors" in caplog.text
        ckpt.save(3, state(3))
    assert steps(places.mirror) == [1, 3]


def test_a_job_that_lost_its_directory_continues_bit_equal(places: Places) -> None:
    with places.open() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
            settled(ckpt)
    shutil.rmtree(places.root)
    with places.open() as ckpt:
        into = state(0)
        assert ckpt.restore(into) == 3 and equal(into, state(3))
        assert equal(ckpt.load(step=2).state, state(2))
        ckpt.save(4, state(4))
    assert steps(places.root) == [4] and steps(places.mirror) == [1, 2, 3, 4]


def test_the_newest_of_both(places: Places) -> None:
    with places.open() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
            settled(ckpt)
    shutil.rmtree(places.root / "step-3")
    shutil.rmtree(places.mirror / "step-2")
    with places.open() as ckpt:
        assert ckpt.load().step == 3 and equal(ckpt.load(step=2).state, state(2))
        found = tr.recover([ckpt], state(0), no_dist=True)
    assert found is not None and found.step == 3
    assert found.report.source == str(places.mirror)
    assert str(places.root) in str(found.report)


def test_damage_in_the_root_is_mended_from_the_mirror(places: Places) -> None:
    with places.open() as ckpt:
        ckpt.save(1, state(1))
    damage(places.root / "step-1" / "model.safetensors")
    with places.open() as ckpt:
        into = state(0)
        with pytest.warns(RuntimeWarning, match=r"model\.safetensors.*taken from .*mirror"):
            assert ckpt.restore(into) == 1
        assert equal(into, state(1))


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_file_that_the_root_lost_comes_from_the_mirror(places: Places, name: str) -> None:
    with places.open() as ckpt:
        ckpt.save(1, state(1))
    (places.root / "step-1" / name).write_bytes(b"{")
    with places.open() as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert equal(ckpt.load().state, state(1))


def test_a_step_that_was_saved_otherwise_is_the_root_s(places: Places) -> None:
    """No bytes are mixed: where the root's are damaged, an older step is taken."""
    with places.open(every=5) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
        settled(ckpt)
        with stopped(ckpt) as copier:
            ckpt.save(1, state(9), overwrite=True)
            copier.kill()
        settled(ckpt)
        places.mirror.rename(places.mirror.with_name("away"))
        places.mirror.write_text("")
    places.mirror.unlink()
    places.mirror.with_name("away").rename(places.mirror)
    assert steps(places.mirror) == [1]
    options = tr.options.CheckpointerOptions(read_only=True)
    with tr.Checkpointer(places.root, mirror=places.mirror, no_dist=True, options=options) as ckpt:
        assert equal(ckpt.load(step=1).state, state(9))
        damage(places.root / "step-1" / "model.safetensors")
        with pytest.raises(tr.errors.DamagedError):
            ckpt.load(step=1)


def test_a_step_that_is_saved_again_is_copied_again(places: Places) -> None:
    with places.open(every=10) as ckpt:
        ckpt.save(1, state(1))
        settled(ckpt)
        ckpt.save(1, state(2), overwrite=True)
    assert files_of(places.mirror) == files_of(places.root)


def test_steps_are_removed_from_both(places: Places) -> None:
    with places.open() as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step))
            settled(ckpt)
        ckpt.delete(5)
        with pytest.raises(tr.errors.StepNotFoundError):
            ckpt.delete(5)
        shutil.rmtree(places.root / "step-4")
        assert ckpt.rollback(2) == [3, 4]
        assert ckpt.restore(state(0)) == 2
        ckpt.save(3, state(7))
    assert steps(places.root) == steps(places.mirror) == [1, 2, 3]
    assert files_of(places.mirror) == files_of(places.root)


def test_a_rollback_breaks_off_the_copy_of_a_step_that_goes(places: Places) -> None:
    with places.open() as ckpt:
        ckpt.save(1, state(1))
        with stopped(ckpt):
            ckpt.save(2, state(2))
            assert ckpt.rollback(1) == [2]
        assert ckpt.mirror_failures == 0
        ckpt.save(2, state(5))
    assert files_of(places.mirror) == files_of(places.root)
    assert steps(places.mirror) == [1, 2]


def test_a_mirror_with_newer_steps_is_another_run_s(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    with tr.Checkpointer(places.mirror, no_dist=True) as other:
        other.save(100, state(0))
    with places.open() as ckpt:
        ckpt.save(1, state(1))
        settled(ckpt)
        assert ckpt.mirror_failures == 1 and "below the newest of the mirror, 100" in caplog.text
    assert steps(places.mirror) == [100] and steps(places.root) == [1]


def test_a_mirror_that_cannot_be_asked(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """The steps of the root are used with a warning; without any, it is not a first start."""
    places.mirror.write_text("a file, where a directory is needed")
    with places.open() as ckpt:
        with pytest.raises(tr.errors.CheckpointError, match="mirror"):
            ckpt.restore(state(0))
        ckpt.save(1, state(1))
        into = state(0)
        assert ckpt.restore(into) == 1 and equal(into, state(1))
        assert "are used alone" in caplog.text
        places.mirror.unlink()


def test_no_step_anywhere_is_a_first_start(places: Places) -> None:
    with places.open() as ckpt:
        assert ckpt.restore(state(0)) is None
        assert mirroring(ckpt)._process.pid is None
        found = tr.recover([ckpt], state(0), no_dist=True)
    assert found is None


def test_a_reader_copies_nothing(places: Places) -> None:
    with tr.Checkpointer(places.root, no_dist=True) as ckpt:
        ckpt.save(1, state(1))
    options = tr.options.CheckpointerOptions(read_only=True)
    with tr.Checkpointer(places.root, mirror=places.mirror, no_dist=True, options=options) as ckpt:
        assert ckpt.restore(state(0)) == 1 and ckpt.mirror_failures == 0
    assert not places.mirror.exists()


def in_child(act: Callable[[], bool]) -> bool:
    """What a fork of this process returns."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if act() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_leaves_the_copies_alone(places: Places) -> None:
    with places.open() as ckpt:
        ckpt.save(1, state(1))
        with stopped(ckpt) as copier:
            ckpt.save(2, state(2))
            assert in_child(lambda: ckpt.close() is None)
            assert state_of(copier.pid) == "T"
    assert steps(places.mirror) == [1, 2] and ckpt.mirror_failures == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda at: tr.Mirror("ftp://host/run"),
        lambda at: tr.Mirror(at / "mirror", every=0),
        lambda at: tr.Mirror(at / "mirror", every=True),
        lambda at: tr.Mirror(at / "mirror", keep="all"),  # type: ignore[arg-type]
        lambda at: tr.Checkpointer(at, mirror=at, no_dist=True),
        lambda at: tr.Checkpointer(at, mirror=f"{at}/../{at.name}", no_dist=True),
        lambda at: tr.Checkpointer(at, mirror=3, no_dist=True),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    with pytest.raises(tr.errors.UsageError):
        make(tmp_path)
