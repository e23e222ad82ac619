"""A step whose replicas differ is marked, and a restart takes one before it."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.errors import ReplicaError, UsageError
from torchrelay.stores.locate import open_store
from torchrelay.stores.opening import open_step


def state_of(group: Any) -> tuple[torch.nn.Linear, dict[str, Any]]:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    net.register_buffer("codes", torch.zeros(3))
    wrapped = DistributedDataParallel(net, process_group=group)
    return net, {"model": wrapped, "optimizer": torch.optim.SGD(wrapped.parameters(), lr=0.1)}


def set_values(net: torch.nn.Linear, value: float) -> None:
    with torch.no_grad():
        net.weight.fill_(value)


def value_of(net: torch.nn.Linear) -> float:
    return float(net.weight[0, 0])


def marked(rank: int, group: Any, folder: str) -> None:
    net, state = state_of(group)
    with tr.Checkpointer(folder, group=group, keep=1) as checkpointer:
        set_values(net, 1.0)
        checkpointer.save(1, state)
        for step in (2, 3):
            set_values(net, step + rank)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                report = checkpointer.save(step, state)
            texts = [str(one.message) for one in caught if "replicas" in str(one.message)]
            assert [one.path for one in report.differing] == ["model.weight"]
            expected = f"step {step} is saved and marked, a restart prefers an earlier one: "
            expected += "replicas differ: model.weight on ranks 0, 1"
            assert texts == ([] if rank else [expected])
        dist.barrier(group)  # rank 0 removes steps after a commit
        assert checkpointer.steps() == [1, 3]  # the newest that is not marked stays
        with pytest.warns(RuntimeWarning, match="step 3 .* marked: replicas differ: model.weight"):
            assert checkpointer.restore(state) == 1
        assert value_of(net) == 1.0
        with pytest.warns(RuntimeWarning, match="marked"):
            loaded = checkpointer.load(state)
        (attempt,) = loaded.report.attempts
        assert loaded.step == 1 and attempt.step == 3 and "replicas differ" in attempt.outcome
        assert checkpointer.load(state, step=3).step == 3  # the caller names it
        assert value_of(net) == 3.0 + rank  # each rank has its own again
        with pytest.warns(RuntimeWarning, match="marked: replicas differ"):
            recovered = tr.recover([checkpointer], into=state, group=group)
        assert recovered is not None and recovered.step == 1 and value_of(net) == 1.0
        assert "step 3" in str(recovered.report) and "marked" in str(recovered.report)
        # The run continues from there: a marked step allows lower ones, and is replaced.
        set_values(net, 2.5)
        checkpointer.save(2, state)
        set_values(net, 3.5)
        checkpointer.save_async(3, state).result()
        dist.barrier(group)
        assert checkpointer.restore(state) == 3 and value_of(net) == 3.5


def test_a_restart_takes_the_step_before(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(marked, str(tmp_path))


def all_marked(rank: int, group: Any, folder: str) -> None:
    net, state = state_of(group)
    with tr.Checkpointer(folder, group=group) as checkpointer:
        for step in (1, 2):
            set_values(net, step + rank)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpointer.save(step, state)
        with pytest.warns(RuntimeWarning, match="no step in .* has equal replicas: step 2"):
            assert checkpointer.restore(state) == 2
        with pytest.warns(RuntimeWarning, match="no step has equal replicas: step 2"):
            found = tr.recover([folder], into=state, group=group)
        assert found is not None and found.step == 2
        assert value_of(net) == 2.0 + rank


def test_if_all_are_marked_the_newest_is_taken(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(all_marked, str(tmp_path))


def refused(rank: int, group: Any, folder: str) -> None:
    net, state = state_of(group)
    with tr.Checkpointer(folder, group=group, replicas="raise") as checkpointer:
        checkpointer.save(1, state)
        if rank == 1:
            set_values(net, 7.0)
        for save in (checkpointer.save, checkpointer.save_async):
            with pytest.raises(ReplicaError, match=r"model\.weight .* on ranks 0, 1") as caught:
                save(2, state)
            assert [one.path for one in caught.value.differing] == ["model.weight"]
            assert caught.value.step == 2
        set_values(net, 8.0)
        checkpointer.save(2, state)
        codes: Any = net.codes
        codes.fill_(rank)  # a buffer may be of a rank
        report = checkpointer.save(3, state)
        assert [one.kind for one in report.differing] == ["buffer"]
        assert checkpointer.steps() == [1, 2, 3] and checkpointer.restore(state) == 3
    dist.barrier(group)
    with tr.Checkpointer(folder, group=group, replicas="keep") as checkpointer:
        set_values(net, rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(checkpointer.save(4, state).differing) == 2
            assert checkpointer.restore(state) == 4


def test_raise_and_keep(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(refused, str(tmp_path))
    assert sorted(one.name for one in tmp_path.iterdir() if not one.name.startswith(".")) == [
        f"step-{n}" for n in range(1, 5)
    ]


def kept_in_memory(rank: int, group: Any, folder: str, job: str) -> None:
    net, state = state_of(group)
    with tr.Keeper(job, group=group) as keeper:
        with tr.Checkpointer(folder, group=group, keeper=keeper) as checkpointer:
            set_values(net, 1.0)
            checkpointer.save_async(1, state).result()
            set_values(net, 2.0 + rank)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpointer.save_async(2, state).result()
            assert checkpointer.load(state, step=2).step == 2
        found = tr.recover([keeper], into=state, group=group)
        assert found is not None and found.step == 1 and value_of(net) == 1.0
        dist.barrier(group)
        if rank == 0:
            keeper.end()
        dist.barrier(group)


def test_a_keeper_does_not_stage_a_marked_step(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(kept_in_memory, str(tmp_path), f"marked-{os.getpid()}")


def named(rank: int, group: Any, folder: str) -> None:
    state = {"w": torch.full((4,), float(rank)), "rng": torch.full((4,), rank)}
    with tr.Checkpointer(folder, group=group, replicas="raise") as checkpointer:
        assert checkpointer.save(1, state).differing == ()
    options = tr.options.CheckpointerOptions(replicated="w")
    with tr.Checkpointer(folder, group=group, options=options) as checkpointer:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = checkpointer.save(2, state)
        assert [str(one) for one in report.differing] == ["w (named) on ranks 0, 1"]


def test_tensors_that_the_caller_names(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(named, str(tmp_path))
    with closing(open_step(open_store(tmp_path), 2)) as opened:
        assert str(opened.record.mark) == "replicas differ: w on ranks 0, 1"
    with closing(open_step(open_store(tmp_path), 1)) as opened:
        assert opened.record.mark is None
    shown = subprocess.run(
        [sys.executable, "-m", "torchrelay", "ls", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = shown.splitlines()
    assert lines[1].rstrip().endswith("whole")
    assert "whole, replicas differ: w on ranks 0, 1" in lines[2]


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="replicas"):
        tr.Checkpointer(tmp_path, replicas="stop")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="replicated"):
        tr.options.CheckpointerOptions(replicated=[1])  # type: ignore[list-item]
