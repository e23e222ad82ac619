"""`init_process_group`: a process group for each start of the workers of torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

import torchrelay as tr
from tests.support.forks import in_process, run_program

AGENT = Path(__file__).parents[1] / "support" / "agent.py"

# Rank 1 is killed after the first start; torchrun starts both again.
SCRIPT = """
import os, signal
import torch, torch.distributed as dist
import torchrelay as tr

tr.init_process_group("gloo", timeout=60)
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
total = torch.ones(1)
dist.all_reduce(total)
rank, world = dist.get_rank(), dist.get_world_size()
print(f"start {start} rank {rank} of {world} sum {total.item():g}\\n", end="", flush=True)
if start == 0:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
def test_workers_that_torchrun_starts_again_meet_again(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    done = run_program(str(AGENT), str(tmp_path / "job.py"), folder=tmp_path, seconds=150)
    assert done.code == 0, done.output
    found = set(re.findall(r"start (\d) rank (\d) of 2 sum 2\b", done.output))
    assert found == {("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")}, done.output


def alone() -> tuple[int, int]:
    """Not under torchrun: as torch's own function does it."""
    import os

    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    del store
    os.environ.update(address, RANK="0", WORLD_SIZE="1")
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    tr.init_process_group("gloo")
    try:
        return dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def test_without_torchrun_it_is_torchs_own() -> None:
    assert in_process(alone) == (0, 1)
