"""One worker and its keeper: steps are staged, come back, stay within the budget, and end."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import torchrelay as tr
from tests.keeper.jobs import LEASE, TIMEOUT, arenas, descriptors, end_keepers, gone, process_gone
from tests.support.access import access
from tests.support.ranks import wait_until_stopped
from torchrelay.cli import access as options
from torchrelay.cli.commands import keepers
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server.messages import Tell
from torchrelay.keeper import process
from torchrelay.keeper.process import KeeperName, connect

JOB = f"one-{os.getpid()}"


def state_of(value: float, numel: int = 50_000) -> dict[str, Any]:
    return {"x": torch.full((numel,), float(value)), "step": int(value)}


@pytest.fixture
def keeper() -> Iterator[tr.Keeper]:
    """A keeper of its own; tests share its process, which is emptied by what they stage."""
    keeper = tr.Keeper(
        JOB, no_dist=True, timeout=TIMEOUT, options=tr.options.KeeperOptions(lease_seconds=LEASE)
    )
    yield keeper
    keeper.close()


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    end_keepers(JOB)


def test_a_staged_step_comes_back(keeper: tr.Keeper) -> None:
    state = state_of(1)
    for step in (1, 2, 3):
        state = state_of(step)
        keeper.stage(step, state).result(TIMEOUT)
        state["x"].zero_()  # the caller's again as soon as `stage` has returned
    got = tr.recover(into=state, sources=[keeper])
    assert got.step == 3
    assert torch.equal(state["x"], torch.full_like(state["x"], 3))
    assert got.report.source == f"keeper {JOB}"
    status = keeper.status()
    assert [one["step"] for one in status["steps"]] == [2, 3]
    assert status["staged_bytes"] <= 2 * (50_000 * 4 + 3 * 4096)


def test_a_checkpointer_stages_with_its_keeper(keeper: tr.Keeper, tmp_path: Path) -> None:
    state = state_of(5)
    with tr.Checkpointer(tmp_path, no_dist=True, keeper=keeper) as checkpointer:
        checkpointer.save(4, state_of(4))
        checkpointer.stage(5, state).result(TIMEOUT)
        assert checkpointer.steps() == [4]
        assert tr.recover(into=state_of(0), sources=[checkpointer, keeper]).step == 5
    with (
        tr.Checkpointer(tmp_path, no_dist=True) as alone,
        pytest.raises(tr.errors.UsageError, match="needs a keeper"),
    ):
        alone.stage(6, state)


def test_a_worker_that_comes_back_finds_its_steps(keeper: tr.Keeper) -> None:
    keeper.stage(11, state_of(11)).result(TIMEOUT)
    pid = keeper.pid
    keeper.close()
    with tr.Keeper(
        JOB, no_dist=True, timeout=TIMEOUT, options=tr.options.KeeperOptions(lease_seconds=LEASE)
    ) as again:
        assert again.pid == pid
        got = tr.recover(sources=[again])
        assert got.step == 11
        assert torch.equal(got.state["x"], state_of(11)["x"])
        end, found = Deadline(TIMEOUT), [11]
        for step in itertools.count(12):  # what the worker before has staged is freed,
            again.stage(step, state_of(step)).result(TIMEOUT)
            found = [one["step"] for one in again.status()["steps"]]
            if step > 12 and 11 not in found:  # once it is known that nobody reads it any more
                break
            assert not end.passed, found
        assert found == [step - 1, step]
        assert again.status()["staged_bytes"] <= 2 * (50_000 * 4 + 3 * 4096)
    with pytest.raises(tr.errors.UsageError, match="closed"):
        keeper.stage(14, state_of(14))


def test_a_job_that_went_back_comes_back_to_what_it_staged_since(keeper: tr.Keeper) -> None:
    for number, step in enumerate((9, 4, 4, 2), start=1):
        keeper.stage(step, state_of(number)).result(TIMEOUT)
        got = tr.recover(sources=[keeper])
        assert got.step == step and got.state["step"] == number


def test_who_comes_after_the_end_begins_another() -> None:
    pids = []
    for host in ("127.0.0.1:0", "0.0.0.0:0"):
        keeper = tr.Keeper(
            f"{JOB}-e",
            no_dist=True,
            address=host,
            timeout=TIMEOUT,
            options=tr.options.KeeperOptions(lease_seconds=LEASE),
        )
        pids.append(keeper.pid)
        keeper.end()
    assert pids[0] != pids[1]


def test_the_budget_is_kept() -> None:
    nbytes = 1 << 20
    with tr.Keeper(
        JOB,
        no_dist=True,
        timeout=TIMEOUT,
        options=tr.options.KeeperOptions(lease_seconds=LEASE, memory_budget=5 * nbytes),
    ) as keeper:
        small, large = state_of(1, nbytes // 4), state_of(2, 3 * nbytes // 4)
        keeper.stage(20, small).result(TIMEOUT)
        keeper.stage(21, small).result(TIMEOUT)
        with pytest.raises(tr.errors.UsageError, match=f"memory={5 * nbytes} is too little"):
            keeper.stage(22, large)
        medium = state_of(2, 2 * nbytes // 4)
        keeper.stage(22, medium).result(TIMEOUT)  # small slots are given up for it
        keeper.stage(23, medium).result(TIMEOUT)
        assert keeper.status()["staged_bytes"] <= 5 * nbytes
        assert tr.recover(into=medium, sources=[keeper]).step == 23
        assert keeper.pid is not None
        held = sum(path.stat().st_size for path in arenas(keeper.pid))
        assert held <= 5 * nbytes


@pytest.mark.parametrize("near", [True, False])
def test_a_reader_keeps_its_step_while_others_are_staged(keeper: tr.Keeper, near: bool) -> None:
    keeper.stage(30, state_of(30)).result(TIMEOUT)
    source = keeper.source()
    opened = source.open(30, Deadline(TIMEOUT))
    if not near:
        for supplier in opened.files.suppliers.all:  # type: ignore[union-attr]
            supplier._mapped.clear()
    name = opened.record.volumes[0].name
    nbytes = opened.record.volumes[0].nbytes
    found = bytearray(nbytes)
    reader = opened.files.reader(name)
    chunk = opened.record.volumes[0].chunk_bytes
    half = nbytes // chunk // 2 * chunk
    reader.read_into(0, memoryview(found)[:half])
    for step in (31, 32, 33, 34):
        assert keeper.stage(step, state_of(step)).skipped is None
    keeper.stage(35, state_of(35)).result(TIMEOUT)
    reader.read_into(half, memoryview(found)[half:])
    opened.close()
    source.end()
    assert bytes(found).count(torch.tensor([30.0]).numpy().tobytes()) == 50_000


def test_a_damaged_step_is_passed_over(keeper: tr.Keeper, tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as checkpointer:
        checkpointer.save(39, state_of(39))
        keeper.stage(40, state_of(40)).result(TIMEOUT)
        slot = _slot_of(keeper, 40)
        with slot.open("r+b") as memory:
            memory.seek(100_000)
            memory.write(b"\xff")
        state = state_of(0)
        got = tr.recover(into=state, sources=[keeper, checkpointer])
    assert got.step == 39
    assert state["x"][0] == 39
    assert "step 40 was passed over" in str(got.report)


def _slot_of(keeper: tr.Keeper, value: float) -> Path:
    """The arena that has a state."""
    wanted = torch.full((10,), float(value)).numpy().tobytes()
    assert keeper.pid is not None
    for path in arenas(keeper.pid):
        if wanted in path.read_bytes():
            return path
    raise AssertionError("no arena has it")


def test_a_keeper_that_was_killed_is_started_again(keeper: tr.Keeper) -> None:
    keeper.stage(50, state_of(50)).result(TIMEOUT)
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    with pytest.raises(tr.errors.RecoveryError, match="does not answer"):
        tr.recover(into=state_of(0), sources=[keeper])
    keeper.stage(51, state_of(51)).result(TIMEOUT)
    assert tr.recover(into=state_of(0), sources=[keeper]).step == 51


def test_strangers_are_refused(keeper: tr.Keeper) -> None:
    keeper.stage(60, state_of(60)).result(TIMEOUT)
    with pytest.raises(tr.errors.UsageError, match="another token"):
        tr.Keeper(JOB, no_dist=True, timeout=TIMEOUT, **access(token="not-the-token-of-this-job"))
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        request = urllib.request.Request(f"{keeper.url}/steps.json", headers=headers)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=TIMEOUT)
    with pytest.raises(tr.errors.RecoveryError, match="does not take this token"):
        tr.recover(into=state_of(0), sources=[keeper.url], **access(token="wrong"))
    with pytest.raises(tr.errors.UsageError, match="can be guessed"):
        tr.Keeper(JOB, no_dist=True, address="0.0.0.0:0", **access(token="short"))
    with pytest.raises(tr.errors.UsageError, match="named by"):
        tr.Keeper("a/b", no_dist=True)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_gets_nothing(keeper: tr.Keeper) -> None:
    """The kernel says who connects: the keeper hangs up without a word."""
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.settimeout(60); s.connect('\\0' + sys.argv[1]); print(s.recv(1))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, KeeperName.of(JOB).address],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert found.stdout == "b''\n", found


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_name_that_another_user_has_is_not_trusted() -> None:
    name = KeeperName.of(f"{JOB}-theirs")
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.bind('\\0' + sys.argv[1]); s.listen(); print('there', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, name.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        with pytest.raises(tr.errors.EndpointError, match="taken by user 65534"):
            tr.Keeper(f"{JOB}-theirs", no_dist=True)
        other.stdin.close()
        other.wait(TIMEOUT)


def test_the_lease_ends_it_and_nothing_is_left() -> None:
    name = KeeperName.of(f"{JOB}-lease")
    keeper = tr.Keeper(
        name.job, no_dist=True, timeout=TIMEOUT, options=tr.options.KeeperOptions(lease_seconds=0.3)
    )
    keeper.stage(1, state_of(1)).result(TIMEOUT)
    pid = keeper.pid
    assert pid is not None
    assert arenas(pid)
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    assert int(fields[3]) != os.getsid(0)  # a session of its own
    ours = descriptors(os.getpid())
    outputs = {ours[Path(f"/proc/{os.getpid()}/fd/{number}")] for number in (0, 1, 2)}
    assert not (outputs - {"/dev/null"}) & set(
        descriptors(pid).values()
    )  # nobody who waits for our output waits for it
    # Its memory has no name that could outlive it.
    assert not any(opened.startswith("/dev/shm") for opened in descriptors(pid).values())
    keeper.close()
    gone(name)
    process_gone(pid)
    assert connect(name) is None


def test_a_keeper_is_small(keeper: tr.Keeper) -> None:
    """Neither torch nor numpy is in it, which would be most of it."""
    keeper.stage(70, state_of(70)).result(TIMEOUT)
    mapped = Path(f"/proc/{keeper.pid}/maps").read_text()
    assert "/python" in mapped and "/_multiarray_umath" not in mapped and "libtorch" not in mapped


def test_a_request_before_joining_is_refused(keeper: tr.Keeper) -> None:
    name = KeeperName.of(JOB)
    from torchrelay.endpoint.server.messages import Reserve

    answer = process.ask(name, Reserve(10, 1))
    assert "join first" in str(answer)
    assert process.ask(name, Tell()) is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:  # nonsense ends that line only
        line.settimeout(TIMEOUT)
        line.connect(f"\0{name.address}")
        line.sendall(b"\xff" * 8)
        assert line.recv(1) == b""
    assert process.status(name) is not None


def command(*words: str) -> Any:
    """What `torchrelay keeper` says."""
    app = typer.Typer()
    app.command()(options.command(keepers.keeper, trouble=1))
    return CliRunner().invoke(app, list(words))


def test_a_keeper_that_hangs_costs_no_more_than_the_timeout(
    keeper: tr.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "ASK_SECONDS", 0.2)
    keeper.stage(80, state_of(80)).result(TIMEOUT)
    pid = keeper.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)
    try:
        begun = time.monotonic()
        with pytest.raises(tr.errors.EndpointError, match="did not answer in time"):
            keeper.stage(81, state_of(81), timeout=0.5)
        assert time.monotonic() - begun < process.START_SECONDS / 2
        for asked in ((JOB, "--status"), (JOB, "--end"), ()):
            told = command(*asked)
            assert told.exit_code == bool(asked)  # the list has those that answer
            assert f"{JOB} on {KeeperName.of(JOB).host} runs" in told.stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    keeper.stage(82, state_of(82)).result(TIMEOUT)
    assert keeper.pid == pid  # an `--end` that nobody waits for any more does not end it
    assert tr.recover(into=state_of(0), sources=[keeper]).step == 82


def test_the_command_leaves_a_keeper_that_runs_as_it_is() -> None:
    job = f"{JOB}-told"
    with tr.Keeper(
        job,
        no_dist=True,
        timeout=TIMEOUT,
        options=tr.options.KeeperOptions(memory_budget=8 << 20, lease_seconds=LEASE),
    ) as keeper:
        assert command(job, "--lease", "5", "--memory", "2000000").exit_code == 0
        status = keeper.status()
        assert (status["memory"], status["lease"]) == (8 << 20, LEASE)
        keeper.end()


def test_a_name_with_escape_codes_is_not_printed(keeper: tr.Keeper) -> None:
    """Any process of the user may have a Unix socket of such a name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.bind(f"\0torchrelay-keeper/{os.getuid()}/\x1b[31mred/\x1b[2Jhost")
        line.listen()
        told = command()
    assert told.exit_code == 0 and JOB in told.stdout
    assert "\x1b" not in told.stdout + told.stderr and "red" not in told.stdout + told.stderr
