"""A rank that misses a call, makes one alone or never joins costs the others that call, no more."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support import flat
from tests.support.ranks import RankPool
from tests.support.saved import state, which
from torchrelay.stores.local.store import LocalStore

TIMEOUT = 0.7
WARNED = 13.0  # seconds after which a rank that waits has said for whom


def tried(call: Callable[[], Any]) -> str:
    try:
        call()
    except tr.errors.RelayError as fault:
        return f"{type(fault).__name__}: {fault}"
    return "ok"


def miss(rank: int, group: Any, root: str, absent: int, what: str) -> list[str]:
    """One rank does not make the second call. The others give it up, and all go on."""
    told = []
    with tr.Checkpointer(root, timeout=30) as ckpt:

        def call(step: int, timeout: float) -> str:
            if what == "load":
                return tried(lambda: ckpt.load(timeout=timeout))
            return tried(lambda: ckpt.save(step, state(step), timeout=timeout))

        ckpt.save(1, state(1))
        if rank != absent:
            told.append(call(2, TIMEOUT))
        dist.barrier(group)
        for step in (3, 4):
            told.append(call(step, 20))
        dist.barrier(group)
        told.append(str(ckpt.steps()))
    return told


@pytest.mark.parametrize("what", ["save", "load"])
@pytest.mark.parametrize("absent", [0, 1])
def test_a_call_that_one_rank_missed_does_not_spoil_the_later_ones(
    pool2: RankPool, tmp_path: Path, absent: int, what: str
) -> None:
    told = pool2.run(miss, str(tmp_path), absent, what, timeout=90)
    steps = "[1, 3, 4]" if what == "save" else "[1]"
    there, missing = told[1 - absent], told[absent]
    assert there[0].startswith("CheckpointError"), told
    assert there[1:] == ["ok", "ok", steps], told
    assert missing == ["ok", "ok", steps], told


def late(rank: int, group: Any, root: str) -> list[str]:
    """Rank 1 makes the second call when the others have given it up."""
    told = []
    with tr.Checkpointer(root, timeout=30) as ckpt:
        ckpt.save(1, state(1))
        if rank == 0:
            told.append(tried(lambda: ckpt.save(2, state(2), timeout=TIMEOUT)))
        dist.barrier(group)
        begun = time.monotonic()
        if rank == 1:
            told.append(tried(lambda: ckpt.save(2, state(2), timeout=20)))
        assert time.monotonic() - begun < 10
        dist.barrier(group)
        told.append(tried(lambda: ckpt.save(3, state(3), timeout=20)))
        told.append(str(ckpt.steps()))
    return told


def test_a_rank_that_comes_late_is_told_at_once_and_is_there_for_the_next(
    pool2: RankPool, tmp_path: Path
) -> None:
    for told in pool2.run(late, str(tmp_path), timeout=90):
        assert told[0].startswith("CheckpointError") and "rank 1" in told[0], told
        assert told[1:] == ["ok", "[1, 3]"], told


def refuse(rank: int, group: Any, root: str, bad: int) -> list[str]:
    """The constructor fails on one rank alone; then all make another one."""
    told = []
    clean = LocalStore.clean
    if rank == bad:
        if rank == 0:
            LocalStore.clean = fail  # type: ignore[method-assign]
        options: dict[str, Any] = {} if rank == 0 else {"stage_on": "perhaps"}
    else:
        options = {}
    made: list[tr.Checkpointer] = []
    try:
        told.append(tried(lambda: made.append(flat.checkpointer(root, timeout=60, **options))))
    finally:
        LocalStore.clean = clean  # type: ignore[method-assign]
    begun = time.monotonic()
    for ckpt in made:
        told.append(tried(lambda ckpt=ckpt: ckpt.save(1, state(1))))  # type: ignore[misc]
        told.append(tried(lambda ckpt=ckpt: ckpt.load()))  # type: ignore[misc]
        ckpt.close()
    assert time.monotonic() - begun < 30
    with tr.Checkpointer(root, timeout=60) as ckpt:
        ckpt.save(2, state(2))
        told.append(str(which(ckpt.load().state, range(9))))
    return told


def fail(store: LocalStore) -> list[str]:
    raise PermissionError(13, "Permission denied", store.url)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_constructor_that_fails_on_one_rank_leaves_nobody_waiting(
    pool2: RankPool, tmp_path: Path, bad: int
) -> None:
    told = pool2.run(refuse, str(tmp_path), bad, timeout=90)
    why = "Permission denied" if bad == 0 else "stage_on"
    assert why in told[bad][0] and told[bad][1:] == ["2"], told
    assert told[1 - bad][0] == "ok" and told[1 - bad][-1] == "2", told
    for one in told[1 - bad][1:3]:
        assert why in one and f"rank {bad}" in one, told


def miss_a_read(rank: int, group: Any, absent: int, what: str) -> list[str]:
    """One rank is stopped by an argument of its own before it comes to the others."""
    doors = {
        "pull": lambda **more: flat.pull(url, group=group, **more),
        "recover": lambda **more: flat.recover(sources=[url], group=group, **more),
    }
    told: list[Any] = [None]
    with tr.serve({"rank": rank}, step=1, no_dist=True) as endpoint:
        told[0] = endpoint.url
        dist.broadcast_object_list(told, src=0, group=group)
        url = told.pop()
        for wrong in (True, False, True, False, False):
            bad = {"step" if what == "pull" else "min_step": -1}
            mine = bad if wrong and rank == absent else {}
            seconds = TIMEOUT if wrong else 20
            told.append(tried(lambda more=mine, s=seconds: doors[what](timeout=s, **more)))
            dist.barrier(group)
    return [text.split(":")[0] for text in told]


@pytest.mark.parametrize("what", ["pull", "recover"])
@pytest.mark.parametrize("absent", [0, 1])
def test_ranks_that_read_together_do_so_again_after_one_was_stopped(
    pool2: RankPool, absent: int, what: str
) -> None:
    told = pool2.run(miss_a_read, absent, what, timeout=90)
    for rank, texts in enumerate(told):
        assert texts[1] == texts[3] == texts[4] == "ok", told
        assert texts[0] == texts[2] == ("UsageError" if rank == absent else texts[0]) != "ok", told


# Only one rank calls ------------------------------------------------------------------------------


class Log(logging.Handler):
    """Warnings of the library in this process, while it is entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Log:
        logging.getLogger("torchrelay").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torchrelay").removeHandler(self)


def only_one_saves(rank: int, group: Any, root: str, alone: int) -> list[str]:
    """One rank alone saves step 100, under an `if`; all ranks save steps 200 and 300."""
    told = []
    with tr.Checkpointer(root, timeout=60) as ckpt:
        ckpt.save(1, state(1))
        begun = time.monotonic()
        if rank == alone:
            told.append(tried(lambda: ckpt.save(100, state(100))))
            assert time.monotonic() - begun < 30
        for step in (200, 300):
            told.append(tried(lambda step=step: ckpt.save(step, state(step))))  # type: ignore[misc]
        dist.barrier(group)
        told.append(str(ckpt.steps()))
    return told


@pytest.mark.parametrize("alone", [0, 1])
def test_after_a_save_that_only_one_rank_made_the_later_ones_match_again(
    pool2: RankPool, tmp_path: Path, alone: int
) -> None:
    told = pool2.run(only_one_saves, str(tmp_path), alone, timeout=120)
    failed, *rest = told[alone]
    assert "step 100" in failed and "step 200" in failed and f"rank {1 - alone}" in failed, told
    assert rest == told[1 - alone] == ["ok", "ok", "[1, 200, 300]"], told


def wait_alone(rank: int, group: Any, root: str, alone: int) -> list[str]:
    """What a rank that saves alone logs until the other one comes."""
    with Log() as log, tr.Checkpointer(root, timeout=60) as ckpt:
        if rank == alone:
            ckpt.save(7, state(7))
        else:
            time.sleep(WARNED)  # the mistake: this rank is elsewhere
            ckpt.save(7, state(7))
        dist.barrier(group)
        assert ckpt.steps() == [7]
    return log.lines


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_waits_logs_which_ranks_are_missing_and_where(
    pool2: RankPool, tmp_path: Path, alone: int
) -> None:
    told = pool2.run(wait_alone, str(tmp_path), alone, timeout=120)
    assert told[1 - alone] == []
    (line,) = told[alone]
    for word in (f"rank {1 - alone}", "save", "step 7", str(tmp_path), "every rank"):
        assert word in line, line
