"""A rank of the trainers: FSDP2 and AdamW. It publishes its weights, and saves its state."""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, batch, digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from workers import SECONDS

import torchrelay as tr
from torchrelay.weights import Encoding

DTYPE = torch.bfloat16  # of the published weights
PUBLISH_EVERY, SAVE_EVERY = 4, 10  # steps


def train(
    rank: int,
    world: int,
    link: Connection,
    layers: int,
    folder: str,
    address: str,
    last: int | None,
) -> None:
    """Resume, and train up to the step `last`, or until the process is killed."""
    torch.manual_seed(0)
    model = GPT(layers)
    mesh = init_device_mesh("cpu", (world,))  # with GPUs: "cuda"
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    checkpointer = tr.Checkpointer(folder, keep=2, timeout=SECONDS)
    checkpointer.restore(state)  # nothing at the first start

    def version() -> dict[str, Any]:
        """What samplers get: the weights, and what they want to know about them."""
        end = state["step"] == last
        return {"model": model, "digest": digest(model, DTYPE), "last": end}

    def tell(loss: float | None, published: str) -> None:
        if rank == 0:
            link.send((state["step"], loss, published))

    newest = version()
    encoding = Encoding(dtype=DTYPE)
    endpoint = tr.serve(
        newest, step=state["step"], address=address, encoding=encoding, timeout=SECONDS
    )
    tell(None, newest["digest"])
    for step in itertools.count(state["step"] + 1):
        given, wanted = batch(step, rank, world)
        loss = functional.nll_loss(model(given).flatten(0, 1), wanted.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world)
        state["step"] = step
        if step % SAVE_EVERY == 0:
            checkpointer.save_async(step, state)
        if step % PUBLISH_EVERY and step != last:
            tell(mean.item(), "")
            continue
        newest = version()
        tell(mean.item(), newest["digest"])
        # It is skipped while samplers still read the versions before; not so the last one.
        while endpoint.publish(newest, step=step).skipped and step == last:
            time.sleep(0.1)
        if step == last:
            break
    link.poll(SECONDS)  # until the samplers have it
    endpoint.close()
    checkpointer.close()
