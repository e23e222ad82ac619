"""Tied tensors into separate ones, by the drop-in for `PGTransport`: each keeps its own memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch

from tests.support.ranks import RankPool
from torchrelay.dropin import PGTransport


class Two(NamedTuple):
    first: Any
    second: Any


def ties(rank: int, group: Any) -> list[bool]:
    mine = {"a": torch.zeros(4), "deep": [Two(torch.zeros(4), torch.zeros(4)), 0], "x": 0}
    transport = PGTransport(group, timedelta(seconds=30), torch.device("cpu"), lambda: mine)
    if rank == 0:
        tied = torch.arange(4.0)
        state = {"a": tied, "deep": [Two(tied, tied), 0], "x": 7, "new": tied}
        transport.send_checkpoint([1], state)
        return []
    got: Any = transport.recv_checkpoint(0)
    pairs = [(got["a"], mine["a"]), *zip(got["deep"][0], mine["deep"][0], strict=True)]
    found = [one is other and one.tolist() == [0, 1, 2, 3] for one, other in pairs]
    return [*found, got["x"] == 7, got["new"].tolist() == [0, 1, 2, 3]]


def test_each_tensor_of_the_destination_is_in_the_result(pool2: RankPool) -> None:
    found = pool2.run(ties)[1]
    assert len(found) == 5 and all(found)
