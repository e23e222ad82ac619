"""What a save and a load cost each rank of a large job: `python -m benchmarks.scale`.

Ranks of a mesh of two dimensions are simulated one after the other in this process: each describes
its state, plans, and says its words, as `Checkpointer.save` lets it; the coordinator makes the
commit record of what all have said. Half as many ranks then decode that record and plan a load.
Nothing is written or sent. The bytes said are those that a real job would send; seconds are those
of the processor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.harness import machine, save
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.loading.rank_load import rows_for
from torchrelay.planning.box_catalog import BoxCatalog
from torchrelay.planning.reads import rows_of, stored_reads
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode_at_rest, encode
from torchrelay.record.meshes import mesh_of as described
from torchrelay.record.schema import Record
from torchrelay.shares.commit_record import commit_record, decode_shares, sealed
from torchrelay.shares.comparison import Assignment, DetailsRequest
from torchrelay.shares.planner import SavePlan, SharePlanner
from torchrelay.state import tensors as t
from torchrelay.state.meshes import described_mesh

ANSWER = msgspec.msgpack.Decoder(DetailsRequest | Assignment)
RESULT = Path(__file__).parent / "results" / "scale.json"
PLAIN = 10  # of the tensors of each rank, one of them its own
ROWS = 4  # of a rank's part of a tensor, at the largest mesh
COLUMNS = 4


def square(world: int) -> tuple[int, int]:
    """Two dimensions, as square as they get."""
    rows = 1
    while (rows * 2) ** 2 <= world:
        rows *= 2
    return rows, world // rows


class Job:
    """A job's state as any of its ranks has it: of ten tensors seven are cut along both dimensions
    of the mesh, and three along the first alone, with replicas along the second."""

    def __init__(self, world: int, tensors: int, rows: int, columns: int) -> None:
        self.world, self.tensors = world, tensors
        self.shape = (rows, columns)
        self.mesh = described("cpu", square(world), tuple(range(world)), ("shard", "tensor"))
        self._spare: dict[int, torch.Tensor] = {}  # of all ranks, by the number of the tensor

    def state(self, rank: int) -> dict[str, Any]:
        count = self.tensors - PLAIN
        leaves = [self._leaf(("shard", "shard" if n % 10 < 7 else "replicate")) for n in range(10)]
        mesh = described_mesh(self.mesh, rank)
        state: dict[str, Any] = {}
        for n in range(count):
            leaf = leaves[n % 10]
            state[f"layers.{n}.weight"] = t.dtensor(self._local(n, leaf.local.shape), leaf, mesh)
        for n in range(PLAIN - 1):
            state[f"plain.{n}"] = torch.full((4,), float(n))
        state["rng"] = torch.full((16,), float(rank))
        return {"model": state, "position": rank}

    def _leaf(self, kinds: tuple[str, str]) -> m.DTensorLeaf:
        places = tuple(
            m.Placement("shard", dim=dim) if kind == "shard" else m.Placement("replicate")
            for dim, kind in enumerate(kinds)
        )
        local = list(self.shape)
        for dim, kind in enumerate(kinds):
            if kind == "shard":
                local[dim] //= self.mesh.shape[dim]
        part = m.TensorLeaf("float32", tuple(local), None, 0)
        strides = (self.shape[1], 1)
        return m.DTensorLeaf(part, self.mesh, places, self.shape, strides, None, 0)

    def _local(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory of its own for each tensor: those that share it are tied, and stored once."""
        if number not in self._spare:
            self._spare[number] = torch.zeros(shape)
        return self._spare[number]


def timed(act: Any, seconds: list[float]) -> Any:
    begun = time.process_time()
    found = act()
    seconds.append(time.process_time() - begun)
    return found


def save_once(job: Job) -> tuple[dict[str, float], bytes]:
    """One save of all ranks; what it cost, and the commit record."""
    plans = [
        SavePlan(SharePlanner(rank, job.world, None), job.state(rank)) for rank in range(job.world)
    ]
    mine: list[float] = []
    decided: list[float] = []
    said = [timed(plan.digests, mine) for plan in plans]
    told = [len(word) for word in said]
    answers = timed(lambda: plans[0].compare(said), decided)
    heard = [len(answer) for answer in answers]
    if isinstance(ANSWER.decode(answers[0]), DetailsRequest):
        said = [
            timed(lambda plan=plan, answer=answer: plan.details(ANSWER.decode(answer)), mine)
            for plan, answer in zip(plans, answers, strict=True)
        ]
        told = [a + len(word) for a, word in zip(told, said, strict=True)]
        answers = timed(lambda: plans[0].assign(said), decided)
        heard = [a + len(answer) for a, answer in zip(heard, answers, strict=True)]
    shares: list[bytes] = []
    for plan, answer in zip(plans, answers, strict=True):
        shares.append(timed(lambda plan=plan, answer=answer: written(plan, answer), mine))
    per_rank = sum(mine) / job.world
    record, manifest = timed(lambda: commit(shares, plans[0]), decided)
    assert sum(file.nbytes for file in record.volumes) > 0
    return {
        "seconds of a rank": per_rank,
        "seconds of the coordinator": sum(decided),
        "bytes to plan, said": sum(told) / job.world,
        "bytes to plan, heard": sum(heard) / job.world,
        "bytes to commit, said": sum(map(len, shares)) / job.world,
        "commit record, bytes": float(len(manifest)),
    }, manifest


def written(plan: SavePlan, answer: bytes) -> bytes:
    share = plan.share(ANSWER.decode(answer))
    digests = [bytes(DIGEST_BYTES * -(-file.nbytes // file.chunk_bytes)) for file in share.files]
    return encode(share.written(digests))


def commit(shares: list[bytes], plan: SavePlan) -> tuple[Record, bytes]:
    assert plan.outlined is not None
    record = commit_record(1, decode_shares(1, shares), plan.outlined)
    return record, sealed(record)


def load_once(job: Job, manifest: bytes, ranks: list[int]) -> dict[str, float]:
    """What a load costs some ranks of a job; each reads the bytes that it has places for."""
    decoding: list[float] = []
    planning: list[float] = []
    for rank in ranks:
        state = job.state(rank)
        record: Record = timed(lambda: decode_at_rest(manifest), decoding)
        plan = partial(planned_bytes, record, state, rank, job.world)
        found = timed(plan, planning)
        wanted = sum(nbytes for nbytes in _sizes(state))
        assert found == wanted, f"rank {rank} plans {found} bytes of {wanted}"
    return {"decode seconds": median(decoding), "plan seconds": median(planning)}


def planned_bytes(record: Record, state: dict[str, Any], rank: int, world: int) -> int:
    """The bytes that a rank's load plans to read into its own tensors."""
    catalog = BoxCatalog(rows_for(record, rank, world))
    landing = land(catalog, state, LandingOptions(rank=rank, unstaged=True))
    reads, images = stored_reads(record, landing.share), np.flatnonzero(landing.own().marks)
    return int(reads.nbytes[rows_of(reads, images)].sum())


def _sizes(state: dict[str, Any]) -> Iterator[int]:
    for tensor in state["model"].values():
        local = t.dtensor_parts(tensor)[0] if t.is_dtensor(tensor) else tensor
        yield local.nbytes


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", default="64,256,1024", help="ranks that save, with commas")
    parser.add_argument("--tensors", type=int, default=1000, help="of each rank")
    parser.add_argument("--looks", type=int, default=3, help="ranks of the load that are timed")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args(words)
    worlds = [int(word) for word in given.ranks.split(",")]
    rows, columns = (a * b for a, b in zip(square(max(worlds)), (ROWS, COLUMNS), strict=True))
    found: dict[str, dict[str, float]] = {}
    for world in worlds:
        cost, manifest = save_once(Job(world, given.tensors, rows, columns))
        half = Job(max(1, world // 2), given.tensors, rows, columns)
        looks = [n * half.world // given.looks for n in range(given.looks)]
        cost.update(load_once(half, manifest, looks))
        found[str(world)] = cost
        print(f"\n{world} ranks save {given.tensors} tensors each, {half.world} load them")
        for what, value in cost.items():
            print(f"  {what:28} {value:14,.4f}" if value < 100 else f"  {what:28} {value:14,.0f}")
        sys.stdout.flush()
    save({"machine": machine(), "tensors": given.tensors, "ranks": found}, given.out)


if __name__ == "__main__":
    main(sys.argv[1:])
