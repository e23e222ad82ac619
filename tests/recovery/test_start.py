"""A process that comes back does not wait for parts of torch that its state has no use for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import torchrelay as tr
from torchrelay.landing.packed import pack
from torchrelay.record.manifest import Mesh
from torchrelay.state.meshes import described_mesh

PROGRAM = """
import sys
import torch
import torchrelay as tr
from torchrelay.landing.packed import unpack

SLOW = ("torch.distributed.tensor", "torch.distributed.checkpoint", "aiohttp")
assert not set(SLOW) & set(sys.modules), "torch has imported them itself"
tr.Keeper, tr.pull, tr.Relay
state = {"model": torch.nn.Linear(2, 2), "step": 0}
got = tr.recover(into=state, sources=[sys.argv[1]])
tr.Checkpointer(sys.argv[1], no_dist=True).save(8, state)
print(got.state["step"], sorted(set(SLOW) & set(sys.modules)))
torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
with open(sys.argv[2], "rb") as file:
    part = unpack(file.read())["w"]
print(type(part).__name__, part.placements, part._local_tensor.tolist())
"""


def test_dtensors_are_imported_where_there_are_some(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path / "run", no_dist=True) as checkpointer:
        checkpointer.save(7, {"model": torch.nn.Linear(2, 2), "step": 7})
    mesh = described_mesh(Mesh("cpu", (1,), (0,), None), 0)
    meta = TensorMeta(torch.Size([2]), (1,), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    part = DTensor(torch.tensor([1.0, 2.0]), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    (tmp_path / "packed").write_bytes(pack({"w": part}))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), str(tmp_path / "packed")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["7 []", "DTensor (Shard(dim=0),) [1.0, 2.0]"], done.stderr
