"""Ranks whose plain tensors say which boxes of a larger one they have, in every API that keeps or
moves the state of several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchrelay as tr
from tests.support.checkpointable import (
    corners,
    has_its_boxes,
    marked,
    other_corners,
    rows,
    whole,
)
from tests.support.ranks import RankPool
from torchrelay.errors import CheckpointError

TIMEOUT = 30.0
SECONDS = 120  # the first call imports what torch needs for meshes


def checkpointer(root: Any, group: Any) -> tr.Checkpointer:
    return tr.Checkpointer(root, group=group, no_dist=group is None, timeout=TIMEOUT)


def state(rank: int, plus: float = 0.0) -> dict[str, Any]:
    """What two ranks have together: each leaf is `whole`."""
    return {
        "rows": rows(3 * rank, 3 * rank + 3, whole() + plus),
        "corners": other_corners() if rank else corners(),
        "on one": marked(torch.zeros(0, 4), (6, 4), [], [], []) if rank else rows(0, 6),
        "step": torch.tensor(5 + int(plus)),
    }


def empty(rank: int) -> dict[str, Any]:
    """A destination of other boxes."""
    return {
        "rows": rows(2 * rank, 2 * rank + 4, torch.zeros(6, 4)),
        "corners": (corners if rank else other_corners)(filled=False),
        "on one": rows(0, 3, torch.zeros(6, 4)),
        "step": torch.tensor(0),
    }


def check(got: Any, plus: float = 0.0) -> None:
    assert has_its_boxes(got["rows"], whole() + plus)
    assert has_its_boxes(got["corners"]) and has_its_boxes(got["on one"])
    assert got["step"] == 5 + int(plus)


def _save_and_load(rank: int, group: Any, root: str) -> None:
    with checkpointer(root, group) as steps:
        steps.save(1, state(rank))
        steps.save_async(2, state(rank, 1.0)).result(TIMEOUT)
        into = empty(rank)
        got = steps.load(step=1, into=into)
        assert got.state is into
        check(into)
        check(steps.load(step=2, into=empty(rank)).state, 1.0)
        mesh = init_device_mesh("cpu", (2,))
        spread = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)], src_data_rank=None)
        steps.load(step=1, into={"rows": spread, "corners": torch.zeros(6, 4)}, strict=False)
        assert isinstance(spread, DTensor)
        assert torch.equal(spread.to_local(), whole()[:, 2 * rank : 2 * rank + 2])
        # The other way round: what a mesh has saved.
        steps.save(3, {"w": spread})
        back = rows(rank, rank + 5, torch.zeros(6, 4))
        steps.load(step=3, into={"w": back})
        assert has_its_boxes(back)


def test_ranks_save_their_boxes_and_load_others(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(_save_and_load, str(tmp_path), timeout=SECONDS)
    with checkpointer(tmp_path, None) as steps:
        got = steps.load(step=1).state
        for name in ("rows", "corners", "on one"):
            assert type(got[name]) is torch.Tensor and torch.equal(got[name], whole())
        with tr.Checkpointer(tmp_path, no_dist=True) as there:
            assert there.load(step=1, include="rows").state["rows"].shape == (6, 4)


def _replicas(rank: int, group: Any, root: str) -> None:
    half = rank % 2
    mine = {
        "w": rows(3 * half, 3 * half + 3),
        "same": rows(0, 6),
        "own": torch.tensor(rank),
        "mixed": rows(0, 6) if rank == 2 else rows(3 * half, 3 * half + 3),
    }
    if rank == 2:
        mine["mixed"].global_offsets = ((0, 0), (3, 0))
        mine["mixed"].local_offsets = ((0, 0), (3, 0))
        mine["mixed"].local_sizes = ((3, 4), (3, 4))
    with checkpointer(root, group) as steps:
        steps.save(1, mine)


def test_a_box_that_several_ranks_have_is_written_once(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(_replicas, str(tmp_path), timeout=SECONDS)
    with checkpointer(tmp_path, None) as steps:
        got = steps.load().state
        for name in ("w", "same", "mixed"):
            assert torch.equal(got[name], whole())
    files = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert files < 4 * 24 * 4 + 8 * 1024  # headers; each tensor once


def _wrong(rank: int, group: Any, root: str, kind: str) -> None:
    mine = rows(3 * rank, 3 * rank + 3)
    if kind == "values":
        mine = rows(0, 6, whole() + rank)
    if kind == "hole" and rank:
        mine = rows(4, 6)
    if kind == "overlap" and rank:
        mine = rows(2, 6)
    if kind == "plain" and rank:
        mine = whole()
    if kind == "shape" and rank:
        mine = marked(torch.zeros(3, 4), (7, 4), [(3, 0)])
    with checkpointer(root, group) as steps, pytest.raises(CheckpointError) as caught:
        steps.save(1, {"w": mine})
    assert "w" in str(caught.value)
    words = {
        "values": "other values in the same box",
        "hole": "whole",
        "overlap": "whole",
        "plain": "names none",
        "shape": "of shape (7, 4)",
    }
    assert words[kind] in str(caught.value), caught.value


@pytest.mark.parametrize("kind", ["values", "hole", "overlap", "plain", "shape"])
def test_boxes_that_are_no_tensor_together_are_refused_by_path(
    pool2: RankPool, tmp_path: Path, kind: str
) -> None:
    pool2.run(_wrong, str(tmp_path), kind, timeout=SECONDS)


def _live(rank: int, group: Any) -> None:
    with tr.Relay(group, timeout=TIMEOUT) as relay:
        if rank < 2:
            relay.send(state(rank), to=[2, 3])
            relay.send(state(rank), to=2 + rank)
            return
        check(relay.recv([0, 1], into=empty(rank - 2)).state)
        into = state(rank - 2, 7.0)
        relay.recv(rank - 2, into=into)
        check(into)


def test_they_move_between_live_ranks(pool4: RankPool) -> None:
    pool4.run(_live, timeout=SECONDS, fresh_group=True)


def _gathered(rank: int, group: Any) -> None:
    with tr.Relay(group, timeout=TIMEOUT) as relay:
        if rank < 2:
            relay.send(state(rank), to=2)
            return
        new = relay.recv([0, 1]).state
        assert all(torch.equal(new[name], whole()) for name in ("rows", "corners", "on one"))


def test_a_rank_gathers_whole_tensors(pool3: RankPool) -> None:
    pool3.run(_gathered, timeout=SECONDS, fresh_group=True)


def _published(rank: int, group: Any, job: str) -> None:
    with tr.serve(state(rank), step=1, group=group, timeout=TIMEOUT) as endpoint:
        check(tr.pull(endpoint.url, into=empty(rank), group=group, timeout=TIMEOUT).state)
        into = empty(rank)
        with tr.subscribe(endpoint.url, into=into, group=group, timeout=TIMEOUT) as subscription:
            subscription.update()
            check(into)
            endpoint.publish(state(rank, 1.0), step=2).result(TIMEOUT)
            subscription.update(2)
            check(into, 1.0)
        group.barrier().wait()
    with tr.Keeper(job, group=group, timeout=TIMEOUT) as keeper:
        keeper.stage(4, state(rank, 2.0)).result(TIMEOUT)
        got = tr.recover(sources=[keeper], into=empty(rank), group=group, timeout=TIMEOUT)
        assert got.step == 4
        check(got.state, 2.0)
        group.barrier().wait()
        keeper.end()


def test_they_are_served_subscribed_to_kept_and_recovered(pool2: RankPool) -> None:
    pool2.run(_published, f"boxes-{os.getpid()}", timeout=SECONDS)
