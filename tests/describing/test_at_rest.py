"""States as they are kept: whole tensors with names, whichever rank describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchrelay.describing.at_rest import describe
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode, encode
from torchrelay.record.rows import LeafRows


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, DeviceMesh("cpu", [0]), [Shard(0)], run_check=False)


def outlined(state: Any) -> tuple[list[str], list[m.Leaf]]:
    """The names of the images, and the leaves as another rank reads them."""
    described = describe(state)
    record = decode(encode(described.record), "part")
    return described.names, list(LeafRows(record, at_rest=True))


def test_a_distributed_tensor_without_elements_is_a_leaf_and_no_image() -> None:
    names, leaves = outlined({"a": torch.ones(2), "empty": sharded(torch.zeros(0, 3))})
    assert names == ["a"]
    empty = leaves[1]
    assert isinstance(empty, m.DTensorLeaf)
    assert empty.shape == (0, 3) and empty.local.storage == -1


def test_distributed_tensors_over_one_memory_are_tied_where_they_are_alike() -> None:
    local = torch.arange(6.0).reshape(3, 2)
    one, same = sharded(local), sharded(local.detach())
    other = DTensor.from_local(local, DeviceMesh("cpu", [0]), [Replicate()], run_check=False)
    names, leaves = outlined({"one": one, "same": same, "other": other, "rows": local[1:]})
    assert names == ["one", "other", "rows"]  # each of them whole
    images = [next(m.parts(leaf)).storage for leaf in leaves]
    assert images == [0, 0, 1, 2]
