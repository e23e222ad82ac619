"""Ranks recover together: each from the sources that it has, as many of them as there are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import torchrelay as tr
from tests.recovery.test_recover import Job, damage, losses_of_an_undisturbed_run, saved
from tests.support.ranks import RankPool
from torchrelay.sources.endpoint import EndpointSource


def apart(rank: int, group: Any, root: str) -> tuple[int, set[str], list[float]]:
    """Each rank has a place of its own. Rank 1's newest step is damaged, and rank 0 has one that
    nobody else has; both have step 2, which rank 1 completes from another place."""
    job = Job()
    mine = Path(root) / str(rank)
    for step in (1, 2, 3, 4):
        job.train(1)
        if step < 4 or rank == 0:
            saved(mine, job)
        if step == 2 and rank == 0:
            saved(Path(root) / "shared", job)
    if rank == 1:
        damage(mine, 3)
        damage(mine, 2)
    dist.barrier(group)
    again = Job()
    sources = [mine, Path(root) / "shared"]
    got = tr.recover(into=again.state(), sources=sources, group=group, timeout=60)
    again.take(got)
    return got.step, {Path(name).name for name in got.report.sources}, again.train(3)


def test_ranks_agree_on_the_newest_step_that_each_can_get(pool2: RankPool, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    losses = losses_of_an_undisturbed_run(5)[2:]
    assert pool2.run(apart, str(tmp_path), timeout=100) == [
        (2, {"0"}, losses),
        (2, {"1", "shared"}, losses),
    ]


def mixed(rank: int, group: Any, root: str) -> tuple[int, str, list[float]] | None:
    """Three ranks of four recover. Rank 0 trains on and shares its state; rank 1 has a disk, rank 2
    the peer alone, and rank 3 a damaged disk and the peer."""
    three = dist.new_group([1, 2, 3])
    job = Job()
    job.train(4)
    with tr.Relay(group, timeout=60) as relay:
        if rank == 0:
            with relay.share(job.state(), step=4):
                job.train(1)  # the step that is shared stays
                dist.barrier(group)
                dist.barrier(group)
            return None
        mine = Path(root) / str(rank)
        if rank in (1, 3):
            saved(mine, job)
        if rank == 3:
            damage(mine, 4)
        dist.barrier(group)
        sources: list[Any] = {1: [mine], 2: [relay.peer(0)], 3: [mine, relay.peer(0)]}[rank]
        again = Job()
        got = tr.recover(into=again.state(), sources=sources, group=three, timeout=60)
        dist.barrier(group)
    again.take(got)
    return got.step, Path(got.report.source).name, again.train(2)


def test_each_rank_has_another_mix_of_sources(pool4: RankPool, tmp_path: Path) -> None:
    found = pool4.run(mixed, str(tmp_path), timeout=150)
    losses = losses_of_an_undisturbed_run(6)[4:]
    assert found[0] is None
    assert [one[0] for one in found[1:]] == [4, 4, 4]
    assert [one[1] for one in found[1:]] == ["1", "rank 0", "rank 0"]
    assert [one[2] for one in found[1:]] == [losses] * 3


def joined(rank: int, group: Any) -> tuple[int, str, list[float]]:
    """Rank 1 is a replacement: it shares nothing. The others share what they have, and rank 0 is a
    step ahead of rank 2 and rank 3."""
    job = Job()
    with tr.Relay(group, timeout=60) as relay:
        peers = [relay.peer(other) for other in range(4)]
        if rank == 1:
            got = tr.recover(into=job.state(), sources=peers, group=group, timeout=60)
        else:
            job.train(4 if rank == 0 else 3)
            with relay.share(job.state(), step=job.step):
                got = tr.recover(into=job.state(), sources=peers, group=group, timeout=60)
                dist.barrier(group)
    if rank == 1:
        dist.barrier(group)
    explained = str(got.report)
    assert "rank 1: no step; there is nothing in it" in explained
    job.take(got)
    return got.step, got.report.source, job.train(2)


def test_a_replacement_joins_ranks_that_share_their_states(pool4: RankPool) -> None:
    losses = losses_of_an_undisturbed_run(6)[4:]
    assert pool4.run(joined, timeout=150) == [(4, "rank 0", losses)] * 4


class ShardedJob(Job):
    """The job by FSDP2. Each rank has the same batch, so that the mean of the gradients is exact
    for any number of ranks that is a power of two, and so are the losses."""

    def __init__(self, ranks: int | DeviceMesh) -> None:
        super().__init__()
        mesh = DeviceMesh("cpu", list(range(ranks))) if isinstance(ranks, int) else ranks
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)


def recut(rank: int, group: Any, root: str) -> list[list[float]]:
    """Saved by four ranks, recovered by two, and by one; the others stand by."""
    four = ShardedJob(4)
    four.train(3)
    with tr.Checkpointer(root, group=group) as there:
        there.save(3, four.state())
    found = [four.train(3)]
    for ranks in (2, 1):
        some = dist.new_group(list(range(ranks)))
        if rank >= ranks:
            DeviceMesh("cpu", list(range(ranks)))  # which all ranks make
        else:
            job = ShardedJob(ranks)
            got = tr.recover(into=job.state(), sources=[root], group=some, timeout=60)
            job.take(got)
            found.append(job.train(3))
        dist.barrier(group)
    return found


def heal(rank: int, group: Any) -> list[float]:
    """Served by four ranks, each its part; two of them start anew, and take it from each other."""
    four = ShardedJob(4)
    four.train(3)
    two = dist.new_group([0, 1])
    mesh_of_two = DeviceMesh("cpu", [0, 1])  # which all ranks make
    with tr.serve(four.state(), step=3, group=group, timeout=60) as endpoint:
        losses = four.train(3)
        if rank < 2:
            job = ShardedJob(mesh_of_two)
            source = EndpointSource(endpoint.url, same_host=False)
            got = tr.recover(
                into=job.state(),
                sources=[source],
                group=two,
                timeout=60,
                options=tr.options.RecoverOptions(reshare=True),
            )
            job.take(got)
            assert got.step == 3 and job.train(3) == losses
        dist.barrier(group)
    return losses


def test_ranks_that_recover_from_each_other_train_on_with_the_same_losses(pool4: RankPool) -> None:
    assert pool4.run(heal, timeout=150) == [losses_of_an_undisturbed_run(6)[3:]] * 4


def test_fewer_ranks_than_before_train_on_with_the_same_losses(
    pool4: RankPool, tmp_path: Path
) -> None:
    found = pool4.run(recut, str(tmp_path), timeout=150)
    four, two, one = found[0]
    assert four == two == one
    assert found[1] == [four, two]
    assert found[2] == found[3] == [four]


def recover_by_default(rank: int, group: Any, root: str) -> tuple[int, int, int]:
    """What each rank has of its own comes back to it, without being asked for: from a directory,
    and from the endpoint of both."""
    state = {"w": torch.ones(4), "position": 100 + rank, "random": torch.full((2,), float(rank))}
    with tr.Checkpointer(root, timeout=60) as there:
        there.save(1, state)
        got = tr.recover(sources=[there], timeout=60)
    with tr.serve(state, step=2, timeout=60) as endpoint:
        dist.barrier(group)
        pulled = tr.pull(endpoint.url, timeout=60)
        dist.barrier(group)
    assert int(got.state["random"][0]) == int(pulled.state["random"][0]) == rank
    return got.state["position"], pulled.state["position"], got.step


def test_all_ranks_recover_together_unless_told_otherwise(pool2: RankPool, tmp_path: Path) -> None:
    found = pool2.run(recover_by_default, str(tmp_path), timeout=100)
    assert found == [(100, 100, 1), (101, 101, 1)]
