"""Errors of the usual mistakes say what to do instead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import RankPool

SECONDS = 120


@tr.register
@dataclasses.dataclass
class Trainer:
    model: Any


class Half:
    """Gives its state, and takes none."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"t": Trainer(nn.Linear(2, 2))}, "['t']['Trainer']['model']"),
        ({"h": [Half()]}, "['h'][0]"),
    ],
)
def test_an_object_where_none_is_taken(tmp_path: Path, state: Any, path: str) -> None:
    with tr.Checkpointer(tmp_path) as held:
        with pytest.raises(tr.UnsupportedLeafError, match=r"put its state_dict\(\)") as caught:
            held.save(0, state)
        assert caught.value.path == path


def test_a_class_in_place_of_a_module(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        with pytest.raises(tr.UnsupportedLeafError, match="it is a class"):
            held.save(0, {"model": nn.Linear})


def trained(steps: int) -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return optimizer


def test_the_state_dict_of_a_new_optimizer_as_a_destination(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path) as held:
        for steps in (0, 1):
            held.save(steps, {"o": trained(steps).state_dict()})
            into = {"o": trained(1 - steps).state_dict()}
            with pytest.raises(tr.MismatchError, match="pass the optimizer itself") as caught:
                held.load(into=into, step=steps)
            assert "['o'] is the state dict of an optimizer" in str(caught.value)
            held.load(into={"o": trained(1 - steps)}, step=steps)


def told(rank: int, group: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    shard = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    copies = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
    texts = []
    with tr.Relay(group, timeout=30) as relay:
        cases = [
            ({"w": shard}, {"w": whole}),
            ({"w": whole}, {"w": shard}),
            ({"w": shard}, {"w": copies}),
            ({"w": shard}, {"w": shard}),
            ({"o": trained(1).state_dict()}, {"o": trained(0).state_dict()}),
        ]
        for offered, mine in cases:
            if rank == 0:
                with pytest.raises(tr.PeerRefusedError) as refused:
                    relay.send(offered, to=1)
                texts.append(str(refused.value))
            else:
                with pytest.raises(tr.MismatchError) as caught:
                    relay.recv(0, into=mine)
                texts.append(str(caught.value))
    return texts


def test_a_sharded_sender_and_a_whole_destination_and_the_like(pool2: RankPool) -> None:
    expected = [
        "save a step with Checkpointer on the sender's ranks and load that here",
        "send from a model that is sharded the same way",
        "is cut anew when it is loaded",
        "receive from the rank with the same place",
        "pass the optimizer itself",
    ]
    for texts in pool2.run(told, timeout=SECONDS):
        for text, words in zip(texts, expected, strict=True):
            assert words in text, text
