"""A rank of the trainers: FSDP2 and AdamW. It publishes its weights, and saves its state."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, batch, digest
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from workers import SECONDS, Link

import torchrelay as tr
from torchrelay.endpoint.encoding import Encoding

DTYPE = torch.bfloat16  # of the published weights
PUBLISH_EVERY, SAVE_EVERY = 4, 10  # steps


def train(rank: int, world: int, link: Link, folder: str, address: str, last: int | None) -> None:
    """Train up to the step `last`, or until the process is killed. Resumes what was saved."""
    torch.manual_seed(0)
    model = GPT()
    for part in (*model.blocks, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}

    def weights(step: int) -> dict[str, Any]:
        """What samplers get: the weights, and what they need to know about them."""
        found = {"model": model, "digest": digest(model, DTYPE), "last": step == last}
        if rank == 0:
            link.tell("published", step, found["digest"])
        return found

    checkpointer = tr.Checkpointer(folder, keep=2, timeout=SECONDS)
    if checkpointer.steps():
        checkpointer.load(state)
    begun = state["step"]
    endpoint = tr.serve(
        weights(begun),
        step=begun,
        address=address,
        timeout=SECONDS,
        encoding=Encoding(dtype=DTYPE, history=4),
    )
    for step in itertools.count(begun + 1):
        given, wanted = batch(step, rank, world)
        loss = functional.nll_loss(model(given).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            link.tell("step", step, mean.item())
        state["step"] = step
        if step % SAVE_EVERY == 0:
            checkpointer.save_async(step, state)
        if step == last:
            break
        if step % PUBLISH_EVERY == 0:
            endpoint.publish(weights(step), step=step)  # skipped while readers use all its memory
    newest = weights(step)
    while endpoint.publish(newest, step=step).skipped:
        time.sleep(0.1)
    link.wait_for_end()  # samplers read the last version
    endpoint.close()
    checkpointer.close()
