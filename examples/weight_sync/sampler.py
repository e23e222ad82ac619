"""A rank of the samplers: tensor-parallel. It follows the trainers, and writes text."""

from __future__ import annotations

import warnings
from multiprocessing.connection import Connection

import torch
from model import CONTEXT, GPT, digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from trainer import DTYPE
from workers import SECONDS

import torchrelay as tr

# Of processors that have no instructions for bfloat16.
warnings.filterwarnings("ignore", "mkldnn_matmul failed")

PROMPT = "Shall I "
PLAN = {
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "widen")},
    **{f"blocks.*.{name}": RowwiseParallel() for name in ("join", "narrow")},
}


def sample(
    rank: int, world: int, link: Connection, layers: int, url: str, network: bool, length: int
) -> None:
    """Write a text with each version that it gets, until the last one."""
    model = GPT(layers).to(DTYPE)
    parallelize_module(model, init_device_mesh("cpu", (world,)), PLAN)
    weights = {"model": model, "digest": "", "last": False}
    subscription = tr.subscribe(url, into=weights, same_host=not network, timeout=SECONDS)
    version = -1
    while not weights["last"]:
        try:
            got = subscription.update(at_least=version + 1)  # the newest; it waits for one
        except tr.errors.PeerLostError:
            continue  # a trainer died while it was read: the weights are still of one version
        version = got.step or 0
        if digest(model, DTYPE) != weights["digest"]:
            raise RuntimeError(f"the weights of version {version} are not those of the trainers")
        text = write(model, length, seed=version)
        link.send((version, weights["digest"], sum(got.report.sources.values()), text))
    subscription.close()


@torch.no_grad()
def write(model: GPT, length: int, seed: int) -> str:
    """Both ranks draw the same characters: they have the same scores and the same seed."""
    draw = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(PROMPT.rjust(CONTEXT).encode())])
    for _ in range(length):
        likely = (model(text[:, -CONTEXT:])[0, -1].float() / 0.7).softmax(0)
        drawn = torch.multinomial(likely, 1, generator=draw)
        text = torch.cat([text, drawn[None]], dim=1)
    return bytes(text[0].tolist()).decode().lstrip()
