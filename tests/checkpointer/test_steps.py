"""Steps are whole numbers of one range, for everything that takes a step; numpy's are taken too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.dcp import Reader, Writer
from torchrelay.dropin.conversion import convert
from torchrelay.steps import MAX_STEP

STATE = {"model": {"w": torch.arange(3.0)}}


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_steps(tmp_path: Path, kind: Any) -> None:
    with tr.Checkpointer(tmp_path / "steps", keep=tr.KeepLast(9)) as checkpointer:
        assert type(checkpointer.save(kind(3), STATE).step) is int
        assert type(checkpointer.save_async(kind(4), STATE).result().step) is int
        checkpointer.save(kind(5), STATE)
        loaded = checkpointer.load(step=kind(3))
        assert loaded.step == 3 and type(loaded.step) is int
        assert checkpointer.verify(kind(3)) == 3 and checkpointer.holds(kind(3))
        assert checkpointer.record(kind(3)).step == 3
        checkpointer.export_hf(tmp_path / "hf", step=kind(3))
        assert checkpointer.rollback(kind(4)) == [5]
        checkpointer.delete(kind(4))
        assert checkpointer.steps() == [3]
    convert(tmp_path / "steps", tmp_path / "other", step=kind(3))
    dcp.save(STATE, storage_writer=Writer(tmp_path / "dcp", step=kind(6)), no_dist=True)
    dcp.load(STATE, storage_reader=Reader(tmp_path / "dcp", step=kind(6)), no_dist=True)
    with tr.Checkpointer(tmp_path / "dcp") as checkpointer:
        assert checkpointer.steps() == [6]
    with tr.serve(STATE, step=kind(3), timeout=60) as endpoint:
        endpoint.publish(STATE, step=kind(4)).result(60)
        assert tr.pull(endpoint.url, step=kind(4), timeout=60).step == 4
        assert (
            tr.pull(
                endpoint.url, timeout=60, options=tr.options.PullOptions(newer_than=kind(3))
            ).step
            == 4
        )
        got = tr.recover(sources=[endpoint.url], min_step=kind(4))
        assert got.step == 4 and type(got.step) is int


def relayed(rank: int, group: Any) -> Any:
    with tr.Relay(group, timeout=30) as relay:
        if rank == 0:
            return relay.send(STATE, to=[1], step=np.int64(7)).step
        return relay.recv(0, step=np.int64(7)).step


def test_numbers_of_numpy_are_steps_of_a_relay(pool2: RankPool) -> None:
    assert pool2.run(relayed) == [7, 7]


@pytest.mark.parametrize("step", [np.int64(-1), np.bool_(True), np.float64(1), True, 1.0, "1"])
def test_other_values_are_not(tmp_path: Path, step: Any) -> None:
    with (
        tr.Checkpointer(tmp_path) as checkpointer,
        pytest.raises(tr.errors.UsageError, match="step is"),
    ):
        checkpointer.save(step, STATE)


# Steps in names of directories.


def test_a_writer_of_dcp_takes_only_names_that_are_steps(tmp_path: Path) -> None:
    """`step-7` is a step of its directory. Any other name is a directory with steps in it, for
    `Writer` and `Reader` as for everything else."""
    for name, found in (("step-7", 7), ("step-007", 0), ("step-", 0), ("step-1e3", 0)):
        place = tmp_path / name
        dcp.save({"w": torch.ones(2)}, storage_writer=Writer(place), no_dist=True)
        into = {"w": torch.zeros(2)}
        dcp.load(into, storage_reader=Reader(place), no_dist=True)
        assert into["w"].tolist() == [1, 1]
        with tr.Checkpointer(tmp_path if found else place) as checkpointer:
            assert checkpointer.steps() == [found]
        if not found:
            assert tr.recover(sources=[place]).step == 0


@pytest.mark.parametrize("step", [MAX_STEP + 1, 10**18 * 9 + 10**18, 10**30, -1])
def test_a_writer_of_dcp_refuses_steps_out_of_range(tmp_path: Path, step: int) -> None:
    for make in (Writer, Reader):
        with pytest.raises(tr.errors.UsageError, match=f"step is an int from 0 to {MAX_STEP}"):
            make(tmp_path, step=step)
    named = tmp_path / f"step-{10**18 * 9 + 10**18 - 1}"  # as long as the longest step
    for make in (Writer, Reader):
        with pytest.raises(tr.errors.UsageError, match="step is an int"):
            make(named)
    dcp.save({"w": torch.ones(2)}, storage_writer=Writer(tmp_path, step=MAX_STEP), no_dist=True)
    with tr.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [MAX_STEP]
