"""Everything is damaged, behind or gone but for a live peer: `recover` takes it and explains."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchrelay as tr
from tests.keeper.jobs import arenas, end_keepers
from tests.recovery.test_recover import Job, damage, losses_of_an_undisturbed_run, saved
from tests.support.ranks import RankPool

TIMEOUT = 100.0


def damage_memory(pid: int | None, value: torch.Tensor) -> None:
    """Flip a byte of a tensor wherever a keeper has it."""
    assert pid is not None
    wanted, found = value.detach().numpy().tobytes(), 0
    for path in arenas(pid):
        at = path.read_bytes().find(wanted)
        if at >= 0:
            with path.open("r+b") as memory:
                memory.seek(at + 7)
                byte = memory.read(1)[0]
                memory.seek(at + 7)
                memory.write(bytes([byte ^ 0x10]))
            found += 1
    assert found, "the keeper has the tensor"


def survivor_and_replacement(
    rank: int, group: Any, root: str, name: str
) -> tuple[str, str, list[float]] | None:
    """Rank 0 shares step 4. Rank 1 finds step 5 damaged on disk and in its keeper's memory."""
    job = Job()
    job.train(4)
    with tr.Relay(group, timeout=TIMEOUT) as relay:
        if rank == 0:
            with relay.share(job.state(), step=4):
                dist.barrier(group)
                dist.barrier(group)
            return None
        job.train(1)
        disk = Path(root) / "disk"
        saved(disk, job)
        damage(disk, 5)
        keeper = tr.Keeper(name, no_dist=True, timeout=TIMEOUT)
        keeper.stage(5, job.state()).result(TIMEOUT)
        damage_memory(keeper.pid, job.model[0].weight)
        dist.barrier(group)
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            nobody = f"http://127.0.0.1:{held.getsockname()[1]}"
            sources = [disk, keeper, nobody, relay.peer(0)]
            again = Job()
            got = tr.recover(into=again.state(), sources=sources, no_dist=True, timeout=TIMEOUT)
            assert got.step == 4 and got.report.source == "rank 0"
            again.take(got)
            losses = again.train(3)
            before = [value.clone() for value in again.model.state_dict().values()]
            try:
                tr.recover(
                    into=again.state(), sources=sources, min_step=5, no_dist=True, timeout=TIMEOUT
                )
            except tr.errors.RecoveryError as nothing:
                refused = nothing.message
            after = again.model.state_dict().values()
            assert all(map(torch.equal, before, after)), "what was refused changed nothing"
        dist.barrier(group)
        keeper.end()
    return str(got.report), refused, losses


def test_a_live_peer_is_taken_where_all_that_is_newer_is_damaged(
    pool2: RankPool, tmp_path: Path
) -> None:
    name = f"freshest-{os.getpid()}"
    try:
        _, found = pool2.run(survivor_and_replacement, str(tmp_path), name, timeout=200)
    finally:
        end_keepers(name)
    explained, refused, losses = found
    assert losses == losses_of_an_undisturbed_run(7)[4:]
    _, disk, keeper, nobody, peer, spent = map(str.strip, explained.splitlines())
    assert "disk: step 5" in disk and "step 5 was passed over" in disk
    assert f"keeper {name}: step 5" in keeper and "step 5 was passed over" in keeper
    assert "no step" in nobody and "does not answer" in nobody
    assert peer.startswith("rank 0: step 4") and peer.endswith("step 4 was taken")
    assert all(phase in spent for phase in ("ask", "attempts", "verify", "land"))
    assert refused.count("step 5 was passed over") == 2
    assert "rank 0: step 4; that is below min_step, 5" in refused
