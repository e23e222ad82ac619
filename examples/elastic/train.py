"""Train a small GPT (FSDP2) that survives the death of its workers.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic/train.py --folder run

torchrun ends all workers when one dies, and starts them again. A keeper on the same host has every
step in memory meanwhile. The lines between the two comments are all that recovery takes. On several
hosts give `--nnodes 1:4`, a rendezvous and a folder that all of them see; the number of workers may
change between two starts.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from gpt import GPT, RandomNumbers, Text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrelay as tr


def train(
    rank: int, world: int, job: str, folder: str, steps: int, save_every: int, die_at: int
) -> None:
    torch.manual_seed(0)
    model = GPT()
    mesh = init_device_mesh("cpu", (world,))  # with GPUs: "cuda"
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = Text(rank, world)
    torch.manual_seed(1 + rank)

    # -- recovery --------------------------------------------------------------------------------
    state = {
        "model": model,
        "optimizer": optimizer,
        "text": text,
        "random": RandomNumbers(),
        "step": 0,
    }
    keeper = tr.Keeper(job)
    checkpointer = tr.Checkpointer(folder, keep=tr.KeepLast(2), keeper=keeper)
    # None at the first start. Steps that cannot be read end the job instead.
    got = tr.recover([keeper, checkpointer], into=state)
    if got is not None and rank == 0:
        print(got.report, flush=True)

    def keep(step: int) -> None:
        state["step"] = step
        if step % save_every == 0:
            checkpointer.save_async(step, state)  # in memory too
        else:
            checkpointer.stage(step, state)

    # -- training -------------------------------------------------------------------------------
    for step in range(state["step"] + 1, steps + 1):
        loss = model(text.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {loss.item()!r}\n", end="", flush=True)
        keep(step)
        if step == die_at and rank == world - 1 and got is None:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    keeper.end()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", required=True, help="where steps are saved")
    options.add_argument("--job", default="gpt", help="what its keepers are called")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--save-every", type=int, default=20)
    options.add_argument("--die-at", type=int, default=0, help="the last rank kills itself there")
    given = options.parse_args()
    tr.init_process_group("gloo")
    ranks = (dist.get_rank(), dist.get_world_size())
    train(*ranks, given.job, given.folder, given.steps, given.save_every, given.die_at)
    dist.destroy_process_group()
