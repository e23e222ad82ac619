"""Shards that torch turns into partial sums, from 2.14 on: no rank has a value until they are
reduced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.errors import MismatchError, RelayError, UnsupportedLeafError

SECONDS = 120
VALUES = torch.arange(20.0).reshape(5, 4)  # rows that two ranks cannot share evenly


def redistributed(values: torch.Tensor) -> DTensor | None:
    """Shards as partial sums; None where torch cannot make them of shards."""
    mesh = init_device_mesh("cpu", (2,))
    shards = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
    try:
        return shards.redistribute(mesh, [Partial()])
    except RuntimeError:
        return None


def _moved(rank: int, group: Any, root: str) -> bool:
    sent = redistributed(VALUES)
    if sent is None:
        return False
    assert sent.full_tensor().equal(VALUES) and sent.to_local().shape == VALUES.shape
    with tr.Checkpointer(root, group=group, timeout=30) as steps:
        with pytest.raises((UnsupportedLeafError, RelayError), match="partial") as caught:
            steps.save(1, {"deep": [{"w": sent}]})
        assert "['deep'][0]['w']" in str(caught.value)
        # Reduced, it is saved; a partial destination takes nothing.
        steps.save(2, {"w": sent.redistribute(placements=[Replicate()])})
        with pytest.raises(MismatchError, match="partial") as refused:
            steps.load(into={"w": redistributed(torch.zeros(5, 4))})
        assert refused.value.path == "['w']"
    with tr.Relay(group, timeout=30) as relay:
        # A replica's own part travels as it is, bit for bit.
        if rank == 0:
            relay.send({"w": sent}, to=1)
            return True
        got = relay.recv(0, shards="as_sent").state["w"]
        assert got.placements == sent.placements and got.shape == sent.shape
        expected = VALUES.clone()
        expected[3:] = 0
        assert torch.equal(got.to_local(), expected)
    return True


def test_shards_made_partial_travel_exactly_or_are_refused_by_path(
    pool2: RankPool, tmp_path: Path
) -> None:
    if not all(pool2.run(_moved, str(tmp_path), timeout=SECONDS)):
        pytest.skip("no such case: this torch does not redistribute Shard to Partial")


def _united(rank: int, group: Any) -> bool:
    sent = redistributed(VALUES)
    if sent is None:
        return False
    with tr.Relay(group, timeout=30) as relay:
        if rank < 1:
            with pytest.raises(RelayError):
                relay.send({"w": sent}, to=1)
        else:
            with pytest.raises(MismatchError, match="partial") as caught:
                relay.recv([0], into={"w": torch.zeros(5, 4)})
            assert caught.value.path == "['w']"
    return True


def test_parts_that_are_not_reduced_are_not_put_together(pool2: RankPool) -> None:
    if not all(pool2.run(_united, timeout=SECONDS, fresh_group=True)):
        pytest.skip("no such case: this torch does not redistribute Shard to Partial")
