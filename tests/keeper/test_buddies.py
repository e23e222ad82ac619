"""Keepers have copies of other hosts' parts: a lost host comes back from its buddy."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.keeper.jobs import (
    TIMEOUT,
    arenas,
    end_keepers,
    keeper_of,
    special,
    wait_for_copies,
)
from tests.support.access import access
from tests.support.certificates import certificate
from tests.support.fsdp_job import fsdp_job, train, whole
from tests.support.ranks import RankPool, Ranks, reached, run_ranks, tell
from tests.support.scaled import Scaled
from tests.support.states import assert_same
from torchrelay.keeper.choice import KeeperRing

JOB = f"buddies-{os.getpid()}"
NUMEL = 1 << 20


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    end_keepers(JOB)


def stage_and_copy(rank: int, group: Any, job: str) -> None:
    state = {"job": fsdp_job(1), "special": special(), "scaled": Scaled(torch.ones(3), 0.5)}
    keeper = keeper_of(rank, job, ["a", "a", "b", "b"])
    for _ in range(2):
        train(state["job"], 1)
        keeper.stage(state["job"]["step"], state).result(TIMEOUT)
        wait_for_copies(keeper, state["job"]["step"])
    tell((whole(state["job"]), keeper.pid))
    tell(train(state["job"], 2))
    reached("copied", hold=True)


def come_back(rank: int, group: Any, job: str, hosts: list[str]) -> Any:
    expected = special()
    state = {"job": fsdp_job(3), "special": expected}
    made = tr.recover(sources=[keeper_of(rank, job, hosts)], group=dist.group.WORLD)
    assert_same(expected, made.state["special"], at_rest=True)
    scaled = made.state["scaled"]
    assert type(scaled) is Scaled and scaled.scale == 0.5
    assert torch.equal(scaled.inner, torch.ones(3))
    keeper = keeper_of(rank, job, hosts)
    fresh: dict[str, Any] = {"job": state["job"]}
    got = tr.recover(
        into=fresh,
        sources=[keeper],
        group=dist.group.WORLD,
        timeout=TIMEOUT,
        options=tr.options.RecoverOptions(strict=False),
    )
    state["job"]["step"] = got.state["job"]["step"]
    found = whole(state["job"])
    losses = train(state["job"], 2)
    keeper.stage(state["job"]["step"], state).result(TIMEOUT)
    copies = wait_for_copies(keeper, state["job"]["step"])  # other buddies are found
    return got.step, found, losses, copies["from"]


def test_a_lost_host_comes_back_from_its_buddy_as_three_ranks() -> None:
    """Two hosts of two ranks; one is lost with its keeper, and the rest goes on with a new one."""
    with Ranks(stage_and_copy, 4, JOB) as workers:
        for rank in range(4):
            workers.wait_reached(rank, "copied", TIMEOUT)
        (state, _), losses = workers.told(0)
        lost = workers.told(3)[0][1]
        for rank in range(4):
            workers.kill(rank)
    os.kill(lost, signal.SIGKILL)
    results = run_ranks(come_back, 3, JOB, ["a", "c", "a"], timeout=2 * TIMEOUT)
    for step, found, went_on, _ in results:
        assert step == 2
        assert all(torch.equal(found[name], state[name]) for name in state)
        assert torch.allclose(torch.tensor(went_on), torch.tensor(losses))
    assert [len(sources) for *_, sources in results] == [1, 1, 1]


def change_a_little(rank: int, group: Any, job: str) -> Any:
    """Bytes that were fetched for the first copy, and for one of a step that differs a little."""
    keeper = keeper_of(rank, job, ["a", "b"], copy_bytes_per_second=1e9)
    state = {"x": torch.full((NUMEL,), 1000.0 + rank), "step": 1}
    keeper.stage(1, state).result(TIMEOUT)
    first = wait_for_copies(keeper, 1)["fetched_bytes"]
    state["x"][:100] = 7
    state["step"] = 2
    keeper.stage(2, state).result(TIMEOUT)
    second = wait_for_copies(keeper, 2)["fetched_bytes"] - first
    dist.barrier()
    return first, second, keeper.pid


def recover_both(rank: int, group: Any, job: str) -> tuple[bool, str]:
    keeper = keeper_of(rank, job, ["a", "b"], copy_bytes_per_second=1e9)
    state = {"x": torch.zeros(NUMEL), "step": 0}
    try:
        got = tr.recover(into=state, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    except tr.errors.RecoveryError as fault:
        return False, str(fault)
    expected = torch.full((NUMEL,), 1000.0 + rank)
    expected[:100] = 7
    return torch.equal(state["x"], expected) and got.step == 2, str(got.report)


def flip_in(pid: int, value: float) -> None:
    """A flipped byte in every memory of a keeper that has a value."""
    wanted = torch.full((64,), value).numpy().tobytes()
    found = 0
    for path in arenas(pid):
        data = path.read_bytes()
        if (at := data.find(wanted)) >= 0:
            with path.open("r+b") as memory:
                memory.seek(at + 4000)
                memory.write(bytes([data[at + 4000] ^ 1]))
            found += 1
    assert found


def test_changed_chunks_alone_are_fetched_and_damage_is_passed_over(pool2: RankPool) -> None:
    (first, second, a), (_, _, b) = pool2.run(change_a_little, JOB, timeout=2 * TIMEOUT)
    assert first >= NUMEL * 4
    assert 0 < second < NUMEL // 2
    flip_in(b, 1000.0)  # b's copy of the part of rank 0: a itself has it right
    found = pool2.run(recover_both, JOB, timeout=2 * TIMEOUT)
    assert all(right for right, _ in found), found
    flip_in(a, 1000.0)
    found = pool2.run(recover_both, JOB, timeout=2 * TIMEOUT)
    assert not any(right for right, _ in found)
    assert "are not those written" in found[0][1]


def stage_while_copying(rank: int, group: Any, job: str, steps: int, parts: int | None) -> Any:
    """The most that this rank's keeper had, in parts of a host, while more steps were staged than
    can be copied; whether every few of them something came along; what came back in the end."""
    part = NUMEL * 4 + 2 * 4096  # its header, and up to a page
    memory = None if parts is None else parts * part
    keeper = keeper_of(
        rank, job, ["a", "b"], copy_bytes_per_second=NUMEL * 16, steps=steps, memory_budget=memory
    )
    state = {"x": torch.zeros(NUMEL), "step": 0}
    last, most = 0, 0.0
    came = []
    for _ in range(3):
        dist.barrier()  # no keeper is at a copy
        before = last, keeper.status()["copies"]["step"]
        for _ in range(3):
            state["step"] += 1
            state["x"] += 1 + rank
            pending = keeper.stage(state["step"], state)
            pending.result(TIMEOUT)
            if pending.skipped is None:
                last = state["step"]
            most = max(most, keeper.status()["staged_bytes"] / part)
        copied = wait_for_copies(keeper, 1)["step"]
        came.append((last, copied) != before)
    into = {"x": torch.zeros(NUMEL), "step": 0}
    got = tr.recover(into=into, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    dist.barrier()
    right = got.step == last and bool((into["x"] == last * (1 + rank)).all())
    return most, came, right, last == state["step"]


@pytest.mark.parametrize(
    ("steps", "parts"), [(2, None), (2, 4), (3, 5), (4, 4), (4, None)], ids=str
)
def test_memory_is_bounded_where_copies_lag_behind(
    pool2: RankPool, steps: int, parts: int | None
) -> None:
    """So many steps of the workers, and two copies. With fewer than four, steps are skipped while
    one is copied; with any number, steps are staged and copied on and on."""
    for most, came, right, all_of_them in pool2.run(
        stage_while_copying, JOB, steps, parts, timeout=2 * TIMEOUT
    ):
        assert right and came == [True] * 3
        assert most <= min(steps + 2, parts or 6)
        assert all_of_them == ((steps, parts) == (4, None))


def stage_with_too_little(rank: int, group: Any, job: str, parts: float) -> str:
    keeper = keeper_of(rank, job, ["a", "b"], memory_budget=int(parts * NUMEL * 4))
    with pytest.raises(tr.errors.UsageError, match="is too little") as fault:
        keeper.stage(1, {"x": torch.full((NUMEL,), float(rank))})
    return str(fault.value)


def test_a_budget_that_is_too_small_is_an_error_at_once(pool2: RankPool) -> None:
    for told in pool2.run(stage_with_too_little, JOB, 3.9, timeout=2 * TIMEOUT):
        assert "two steps of its host" in told and "two copies of other hosts' parts" in told


def lose_a_host_amid_a_copy(rank: int, group: Any, job: str) -> tuple[int, int | None]:
    """Step 1 is copied; step 2 is on its way when a host is lost."""
    keeper = keeper_of(rank, job, ["a", "b"], copy_bytes_per_second=NUMEL)
    state = {"x": torch.full((NUMEL,), 1.0 + rank), "step": 1}
    keeper.stage(1, state).result(TIMEOUT)
    wait_for_copies(keeper, 1)
    dist.barrier()
    state["x"] += 1
    keeper.stage(2, state).result(TIMEOUT)
    assert keeper.stage(3, state).skipped is not None
    found = keeper.status()["copies"]["copying"]
    dist.barrier()
    keeper.close()
    return keeper.pid or 0, found


def come_back_to(rank: int, group: Any, job: str, wanted: int) -> bool:
    keeper = keeper_of(rank, job, ["a", "c"])
    into = {"x": torch.zeros(NUMEL), "step": 0}
    got = tr.recover(into=into, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    right = got.step == wanted and bool((into["x"] == wanted + rank).all())
    for step in range(4, 8):  # others have taken the place of those, and steps are staged again
        keeper.stage(step, into).result(TIMEOUT)
        wait_for_copies(keeper, step)
    keeper.close()
    return right


def test_a_host_that_is_lost_amid_a_copy_costs_the_step_alone(pool2: RankPool) -> None:
    """Host a still has its own part of the last step that is copied, beside the copy of b's."""
    (_, first), (lost, second) = pool2.run(lose_a_host_amid_a_copy, JOB, timeout=2 * TIMEOUT)
    assert first == second == 2
    os.kill(lost, signal.SIGKILL)
    assert pool2.run(come_back_to, JOB, 1, timeout=2 * TIMEOUT) == [True, True]


def stage_by_tls(rank: int, group: Any, job: str, key: str, cert: str) -> Any:
    """A step that is staged and copied by TLS, and who is turned away."""
    own = access(certfile=cert, keyfile=key, cafile=cert)
    keeper = keeper_of(rank, job, ["a", "b"], **own)
    state = {"x": torch.full((NUMEL,), 5.0 + rank), "step": 1}
    keeper.stage(1, state).result(TIMEOUT)
    wait_for_copies(keeper, 1)
    with pytest.raises(tr.errors.UsageError, match="with TLS: end it first"):
        tr.Keeper(f"{job}@{'ab'[rank]}", no_dist=True, timeout=TIMEOUT)
    strange = access(certfile=cert, keyfile=key)
    stranger = tr.Keeper(f"{job}@{'ab'[rank]}", no_dist=True, timeout=TIMEOUT, **strange)
    with pytest.raises(tr.errors.RecoveryError, match="certificate"):
        # It trusts what the system trusts.
        tr.recover(sources=[stranger], no_dist=True, timeout=TIMEOUT)
    stranger.close()
    dist.barrier()
    keeper.close()
    return keeper.url, keeper.pid


def come_back_by_tls(rank: int, group: Any, job: str, key: str, cert: str) -> bool:
    keeper = keeper_of(rank, job, ["a", "c"], **access(certfile=cert, keyfile=key, cafile=cert))
    into = {"x": torch.zeros(NUMEL), "step": 0}
    got = tr.recover(into=into, sources=[keeper], group=dist.group.WORLD, timeout=TIMEOUT)
    keeper.close()
    return got.step == 1 and bool((got.state["x"] == 5.0 + rank).all())


def test_keepers_copy_and_are_read_by_tls(pool2: RankPool, tmp_path: Path) -> None:
    files = certificate(tmp_path)
    (first, _), (second, lost) = pool2.run(stage_by_tls, JOB, *files, timeout=2 * TIMEOUT)
    assert first.startswith("https://") and second.startswith("https://")
    os.kill(lost, signal.SIGKILL)
    assert pool2.run(come_back_by_tls, JOB, *files, timeout=2 * TIMEOUT) == [True, True]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_host_is_copied_by_another(count: int) -> None:
    urls = [f"http://h{n}" for n in range(count)]
    for copies in (0, 1, 2, 9):
        copied = [source for url in urls for source in KeeperRing(urls, url).sources(copies)]
        assert sorted(copied) == sorted(urls * min(copies, count - 1))
        assert all(url not in KeeperRing(urls, url).sources(copies) for url in urls)
    assert KeeperRing(urls, "http://gone").sources(1) == []
