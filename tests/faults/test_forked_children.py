"""A child of a fork has no Checkpointer: its first use says so, and its end does nothing.

Children are made by `os.fork` in a process of their own, for which the tests' runner is too large.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.cuts import stores_with
from tests.support.forks import in_process, servers
from tests.support.saved import equal, state, which
from torchrelay.stores.local.files import Files

SECONDS = 5.0  # in which whatever is to be at once is over, also on a machine that is busy


def fork(act: Callable[[], Any], *, at_exit: bool = False) -> int:
    """Call in a forked child; 0 is what it ends with if nothing is raised. It may do at its end
    what `sys.exit` makes an interpreter do."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    if at_exit:
        atexit._run_exitfuncs()
    os._exit(code)


def end_of(pid: int, seconds: float = SECONDS) -> int:
    """The exit status of a child, negative if by a signal; it is killed if it does not end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError(f"the child did not end in {seconds} s")


class HeldCommit(Files):
    """No step is put in place before a file is there: a save stays under way until then."""

    def __init__(self, go: Path) -> None:
        self._go = go

    def rename(self, old: str, new: str) -> None:
        end = time.monotonic() + 30
        while not self._go.exists() and time.monotonic() < end:
            time.sleep(0.005)
        super().rename(old, new)


# First use --------------------------------------------------------------------------------------


def use_in_child(root: str) -> None:
    checkpointer = tr.Checkpointer(root, timeout=30)
    pending = checkpointer.save_async(1, state(1))
    pending.result(20)
    uses: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpointer.save(2, state(2)),
        "save_async": lambda: checkpointer.save_async(2, state(2)),
        "prepare": lambda: checkpointer.prepare(state(2)),
        "wait": checkpointer.wait,
        "load": checkpointer.load,
        "steps": checkpointer.steps,
        "latest": checkpointer.latest,
        "holds": lambda: checkpointer.holds(1),
        "record": lambda: checkpointer.record(1),
        "verify": checkpointer.verify,
        "delete": lambda: checkpointer.delete(1),
        "export_hf": lambda: checkpointer.export_hf(f"{root}/hf"),
        "result": lambda: pending.result(1),
        "exception": lambda: pending.exception(1),
    }

    def child() -> None:
        for name, use in uses.items():
            try:
                use()
            except tr.errors.UsageError as fault:
                assert "fork" in str(fault) and "in the child" in str(fault), (name, fault)
            else:
                raise AssertionError(f"{name} works in a forked child")
        checkpointer.close()  # of the parent's: nothing is done
        with tr.Checkpointer(root, no_dist=True) as own:
            assert which(own.load().state, [1]) == 1

    assert end_of(fork(child), 30) == 0
    for step in (3, 4):
        checkpointer.save_async(step, state(step)).result(20)
    assert [which(checkpointer.load(step=step).state, [step]) for step in (1, 3, 4)] == [1, 3, 4]
    checkpointer.close()


def test_the_first_use_in_a_forked_child_says_that_it_has_no_checkpointer(tmp_path: Path) -> None:
    """And the parent's goes on."""
    in_process(use_in_child, str(tmp_path))


def save_in_both(root: str) -> list[int]:
    """Parent and child save by the same object; which of the parent's steps are not its own."""
    checkpointer = tr.Checkpointer(f"{root}/parent", timeout=30)
    checkpointer.save_async(0, state(0)).result(20)

    def child() -> None:
        for step in range(100, 112):
            try:
                checkpointer.save_async(step, state(step)).result(20)
            except tr.errors.RelayError:
                pass

    pid = fork(child)
    for step in range(1, 13):
        checkpointer.save_async(step, state(step)).result(20)
    end_of(pid, 40)
    wrong = [s for s in range(13) if not equal(checkpointer.load(step=s).state, state(s))]
    assert checkpointer.steps() == list(range(13))
    checkpointer.close()
    return wrong


def test_a_forked_child_shares_no_arena_and_no_writer_with_its_parent(tmp_path: Path) -> None:
    assert in_process(save_in_both, str(tmp_path)) == []


# The end of a child -------------------------------------------------------------------------------


def exit_beside_a_save(root: str) -> list[int]:
    go = Path(root) / "go"
    with stores_with(HeldCommit(go)):
        checkpointer = tr.Checkpointer(f"{root}/steps", timeout=30)
    pending = checkpointer.save_async(1, state(1))
    begun = time.monotonic()
    codes = [end_of(fork(lambda: None, at_exit=True))]

    def leave_block() -> None:
        with checkpointer:
            pass

    codes.append(end_of(fork(leave_block)))
    assert time.monotonic() - begun < 2 * SECONDS
    go.touch()
    pending.result(20)
    assert which(checkpointer.load().state, [1]) == 1
    checkpointer.close()
    return codes


def test_sys_exit_of_a_forked_child_waits_for_nothing(tmp_path: Path) -> None:
    """Nor does leaving a `with` block; the parent's save is committed."""
    assert in_process(exit_beside_a_save, str(tmp_path)) == [0, 0]


def terminate_child(root: str) -> tuple[int, list[int]]:
    checkpointer = tr.Checkpointer(root, timeout=30)
    assert not checkpointer.reached_preemption(0)
    checkpointer.save(1, state(1))
    ready, begun = os.pipe()

    def child() -> None:
        os.write(begun, b"!")
        time.sleep(60)

    pid = fork(child)
    assert os.read(ready, 1) == b"!"
    os.kill(pid, signal.SIGTERM)
    code = end_of(pid)
    with checkpointer:
        return code, checkpointer.steps()


def test_a_signal_to_a_forked_child_saves_nothing(tmp_path: Path) -> None:
    """It does there what it did before."""
    assert in_process(terminate_child, str(tmp_path)) == (-signal.SIGTERM, [1])


def close_beside_children(root: str) -> float:
    checkpointer = tr.Checkpointer(root, timeout=30)
    checkpointer.save_async(1, state(1)).result(20)
    writer = checkpointer._saver.writer.process.pid
    children = [fork(lambda: time.sleep(60)) for _ in range(2)]
    begun = time.monotonic()
    checkpointer.close()
    seconds = time.monotonic() - begun
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert writer is not None and not Path(f"/proc/{writer}").exists()
    return seconds


def test_close_beside_forked_children_does_not_wait_for_the_writer(tmp_path: Path) -> None:
    assert in_process(close_beside_children, str(tmp_path)) < 4


def end_with_a_save(root: str) -> None:
    checkpointer = tr.Checkpointer(root, timeout=30, no_dist=True)
    checkpointer.save_async(1, state(1))


@pytest.mark.parametrize("kind", ["fork", "forkserver"])
def test_a_save_under_way_is_finished_when_its_multiprocessing_child_ends(
    tmp_path: Path, kind: str
) -> None:
    """Such a child leaves by `os._exit`, past the handlers of `atexit`."""
    root = str(tmp_path / "steps")
    if kind == "fork":
        assert in_process(run_forked, root) == 0
    else:
        process = servers.Process(target=end_with_a_save, args=(root,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    with tr.Checkpointer(root, no_dist=True) as checkpointer:
        assert which(checkpointer.load().state, [1]) == 1


def run_forked(root: str) -> int | None:
    forks = multiprocessing.get_context("fork")
    process = forks.Process(target=end_with_a_save, args=(root,))
    process.start()
    process.join(40)
    return process.exitcode


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def square(number: int) -> int:
    return number * number


def train_beside_workers(root: str) -> tuple[list[int], list[int], float, list[int]]:
    """A loop with a DataLoader of two workers and a pool, which saves beside them."""
    checkpointer = tr.Checkpointer(root, timeout=30, keep=tr.KeepLast(20))
    sums = []
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=8, num_workers=2, persistent_workers=True
    )
    for at, batch in enumerate(loader):
        checkpointer.save_async(at, state(at))
        assert not checkpointer.reached_preemption(at)
        sums.append(int(batch.sum()))
    with multiprocessing.get_context("fork").Pool(2) as pool:  # leaving it terminates them
        assert pool.map(square, range(8)) == [n * n for n in range(8)]
    del loader
    begun = time.monotonic()
    checkpointer.close()
    seconds = time.monotonic() - begun
    with tr.Checkpointer(root, options=tr.options.CheckpointerOptions(read_only=True)) as reader:
        values = [which(reader.load(step=step).state, range(8)) for step in reader.steps()]
        return sums, reader.steps(), seconds, values


def test_workers_of_a_data_loader_and_of_a_pool_leave_saves_alone(tmp_path: Path) -> None:
    sums, steps, seconds, values = in_process(train_beside_workers, str(tmp_path))
    assert sums == [4 * sum(range(8 * n, 8 * n + 8)) for n in range(8)]
    assert steps == values == list(range(8))
    assert seconds < 4
