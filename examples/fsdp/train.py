"""Train with FSDP2, AdamW, a scheduler, an average of the weights, and a position in the data.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp/train.py --folder run

The eight lines marked `# +` are all that torchrelay needs to save in the background, to resume on
any number of ranks, to save when the cluster asks the job to stop (SIGTERM), and to bring the last
step back from memory when torchrun starts the workers again.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchrelay as tr  # +

WIDTH, CLASSES, BATCH = 64, 16, 8


class Data:
    """Batches of all ranks together; its state is the position in them."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.position = rank, world, 0

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.position)
        self.position += 1
        points = torch.randn(BATCH, WIDTH, generator=draw)[self.rank :: self.world]
        return points, points[:, :CLASSES].argmax(dim=1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train(folder: str, job: str, steps: int, every: int) -> None:
    tr.init_process_group("gloo")  # +
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))  # with GPUs: "cuda"
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, steps)
    ema = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    data = Data(rank, world)
    state = {"model": model, "optim": optim, "schedule": schedule, "ema": ema, "data": data}  # +
    keeper = tr.Keeper(job)  # +
    ckpt = tr.Checkpointer(folder, keep=3, keeper=keeper)  # +
    tr.recover([keeper, ckpt], into=state)  # +
    done = False
    while not done:
        points, classes = data.batch()
        loss = nn.functional.cross_entropy(model(points), classes)
        loss.backward()
        optim.step()
        optim.zero_grad()
        schedule.step()
        for name, weight in model.named_parameters():
            ema[name].mul_(0.99).add_(weight.detach(), alpha=0.01)
        step = data.position
        done = step >= steps or ckpt.reached_preemption(step)  # +
        if done or step % every == 0:
            print(f"rank {rank}/{world} step {step} loss {loss.item():.6f}\n", end="", flush=True)
            ckpt.save_async(step, state)  # +


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--folder", required=True, help="where steps are saved")
    options.add_argument("--job", default=f"fsdp-{os.getuid()}", help="the name of its keeper")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--every", type=int, default=10, help="steps between two saves")
    given = options.parse_args()
    train(given.folder, given.job, given.steps, given.every)
    dist.destroy_process_group()
