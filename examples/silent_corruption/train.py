"""Two ranks train the same weights. A bit flips on one of them, and the job stops before it saves
the step; torchrun starts it again, and it resumes from the step before.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 train.py FOLDER [--flip WHEN]
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay as tr

STEPS, COMPARE, SAVE = 30, 5, 10


def flip_a_bit(parameter: torch.Tensor) -> None:
    """A faulty processor or memory changes a weight so."""
    parameter.detach().view(-1).view(torch.int32)[7] ^= 1 << 20


def train(folder: str, flip_at: int, compare_every: int) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}
    with tr.Checkpointer(folder, replicas="raise") as checkpointer:
        start = checkpointer.restore(state) or 0
        print(f"rank {rank} starts after step {start}", flush=True)
        for step in range(start + 1, STEPS + 1):
            torch.manual_seed(1000 * step + rank)  # each rank has data of its own
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if step == flip_at and rank == 1 and first:
                flip_a_bit(net[0].weight)
            if step % compare_every == 0:
                tr.compare_ranks(state, detail=True).raise_if_different()
            if step % SAVE == 0:
                checkpointer.save(step, state)
    total = sum(one.double().sum().item() for one in model.parameters())
    print(f"rank {rank} ends after step {step}, checksum {total:.15f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--flip", type=int, default=13, help="the step; 0: none")
    parser.add_argument("--compare", type=int, default=COMPARE, help="steps in between")
    options = parser.parse_args()
    tr.init_process_group("gloo")
    train(options.folder, options.flip, options.compare)
    dist.destroy_process_group()
