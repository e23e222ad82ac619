"""Tensors that name their boxes, and torch's own checkpoints and transports."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrelay as tr
from tests.support.checkpointable import corners, has_its_boxes, marked, other_corners, rows, whole
from tests.support.ranks import RankPool
from torchrelay.dcp import Reader, Writer
from torchrelay.dropin import PGTransport
from torchrelay.dropin.checkpointer import TorchCheckpointer
from torchrelay.dropin.conversion import convert
from torchrelay.dropin.stock_dcp import read_stock, write_stock
from torchrelay.errors import CheckpointError, RelayError, UnsupportedLeafError

KNOWN = hasattr(dcp, "CheckpointableTensor")
needs_planners = pytest.mark.skipif(
    not KNOWN, reason="no such case: torch's planners know CheckpointableTensor from 2.14 on"
)
SECONDS = 120


def state(rank: int) -> dict[str, Any]:
    return {
        "rows": rows(3 * rank, 3 * rank + 3),
        "corners": other_corners() if rank else corners(),
    }


def empty(rank: int) -> dict[str, Any]:
    return {
        "rows": rows(2 * rank, 2 * rank + 4, torch.zeros(6, 4)),
        "corners": (corners if rank else other_corners)(filled=False),
    }


def check(found: dict[str, Any]) -> None:
    assert all(map(has_its_boxes, found.values()))


def _both_ways(rank: int, group: Any, root: str) -> None:
    # Stock writes.
    dcp.save(state(rank), checkpoint_id=f"{root}/stock", process_group=group)
    # Torch's planners write and read through the storage of this library.
    dcp.save(state(rank), storage_writer=Writer(f"{root}/ours/step-1"), process_group=group)
    into = empty(rank)
    dcp.load(into, storage_reader=Reader(f"{root}/ours/step-1"), process_group=group)
    check(into)
    with tr.Checkpointer(f"{root}/ours", group=group, timeout=60) as steps:
        check(steps.load(step=1, into=empty(rank)).state)
        steps.save(2, state(rank))
    into = empty(rank)
    dcp.load(into, storage_reader=Reader(f"{root}/ours/step-2"), process_group=group)
    check(into)
    # The drop-in of torch's checkpointer, over torch's own storage, in the background too.
    for name, background in (("now", False), ("later", True)):
        place = f"{root}/{name}"
        writer, reader = dcp.FileSystemWriter(place), dcp.FileSystemReader(place)
        with_torch = TorchCheckpointer(writer, reader, process_group=group)
        if background:
            with_torch.async_save(state(rank)).result(60)
        else:
            with_torch.save(state(rank))
        into = empty(rank)
        with_torch.load(into)
        check(into)


@needs_planners
def test_torchs_planners_write_what_we_read_and_the_other_way_round(
    pool2: RankPool, tmp_path: Path
) -> None:
    pool2.run(_both_ways, str(tmp_path), timeout=SECONDS)
    for name in ("stock", "now", "later"):
        found = read_stock(tmp_path / name)
        assert torch.equal(found["rows"], whole()) and torch.equal(found["corners"], whole())
    convert(tmp_path / "stock", tmp_path / "converted")
    with tr.Checkpointer(tmp_path / "converted", no_dist=True) as steps:
        check(steps.load(into=empty(0)).state)
    convert(tmp_path / "ours", tmp_path / "back", to="dcp", step=2)
    into = empty(1)
    dcp.load(into, checkpoint_id=tmp_path / "back", no_dist=True)
    check(into)


@pytest.mark.skipif(
    KNOWN, reason="no such case: torch's planners know CheckpointableTensor from 2.14 on"
)
def test_older_planners_are_not_given_a_part_for_the_whole(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as steps:
        steps.save(1, {"a": {"w": whole()}})
    mine = {"a": {"w": rows(0, 3)}}
    writer, reader = Writer(tmp_path / "step-2"), Reader(tmp_path / "step-1")
    for act in (
        lambda: dcp.save(mine, storage_writer=writer, no_dist=True),
        lambda: TorchCheckpointer(
            dcp.FileSystemWriter(tmp_path / "t"), dcp.FileSystemReader(tmp_path / "t"), no_dist=True
        ).save(mine),
        lambda: TorchCheckpointer(writer, reader, no_dist=True).load(mine),
    ):
        with pytest.raises((CheckpointError, dcp.CheckpointException)) as caught:
            act()
        assert "a.w" in str(caught.value) and "torch 2.14" in str(caught.value)
    committed = [path.parent.name for path in tmp_path.glob("step-*/manifest.json")]
    assert committed == ["step-1"]


def test_one_process_writes_a_stock_checkpoint_of_what_it_has_all_of(tmp_path: Path) -> None:
    halves = marked(
        torch.cat([whole()[3:], whole()[:3]]),
        (6, 4),
        [(3, 0), (0, 0)],
        [(0, 0), (3, 0)],
        [(3, 4), (3, 4)],
    )
    write_stock(tmp_path / "one", {"a": [{"w": halves}], "b": (rows(0, 6), 3)})
    found = read_stock(tmp_path / "one")
    assert torch.equal(found["a"][0]["w"], whole()) and torch.equal(found["b"][0], whole())
    with pytest.raises(UnsupportedLeafError, match="only a shard") as caught:
        write_stock(tmp_path / "two", {"a": {"w": rows(0, 3)}})
    assert caught.value.path == "a.w"
    bad = rows(0, 3)
    bad.local_sizes = ((4, 4),)
    with pytest.raises(UnsupportedLeafError, match="CheckpointableTensor") as caught:
        write_stock(tmp_path / "three", {"a": {"w": bad}})
    assert caught.value.path == "['a']['w']"
    assert not (tmp_path / "two").exists() and not (tmp_path / "three").exists()


def _transported(rank: int, group: Any, protocol: Any) -> None:
    into = {"w": rows(0, 3, torch.zeros(6, 4))}
    transport = PGTransport(
        group, timedelta(seconds=60), torch.device("cpu"), lambda: into, protocol=protocol
    )
    if not rank:
        transport.send_checkpoint([1], {"w": rows(0, 3)})
        if protocol == "torch":
            transport.send_checkpoint([1], {"w": rows(3, 6)})
            return
        with pytest.raises(RelayError):
            transport.send_checkpoint([1], {"w": rows(3, 6)})
        return
    got: Any = transport.recv_checkpoint(0)
    assert got["w"] is into["w"] and has_its_boxes(into["w"])
    if protocol == "torch":  # whose messages have no field for boxes: ranks are replicas
        transport.recv_checkpoint(0)
        assert torch.equal(into["w"], whole()[3:])
        return
    with pytest.raises(RelayError, match="local shards"):
        transport.recv_checkpoint(0)
    assert has_its_boxes(into["w"])


@pytest.mark.parametrize("protocol", ["relay", "torch"])
def test_pg_transport_fills_a_box_in_place(pool2: RankPool, protocol: str) -> None:
    pool2.run(_transported, protocol, timeout=SECONDS, fresh_group=True)
