"""Train a small GPT under torchft: a replica that dies comes back from a live one.

torchft_lighthouse --min_replicas 1 &
TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft/train.py --replica 0
TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft/train.py --replica 1

Kill either of them and start it again. torchft forms a new quorum, and `RelayTransport` copies
the state of the surviving replica. Needs torchft with its native part, which has wheels for x86_64.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "elastic"))
from gpt import BATCH, CONTEXT, GPT, Text

TIMEOUT = timedelta(seconds=30)


def train(replica: int, replicas: int, steps: int, lighthouse: str | None) -> dict[int, str]:
    """The losses by step, as text of all their digits."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from torchrelay.integrations.torchft import RelayTransport

    torch.manual_seed(replica)  # a new replica has other weights, until it has recovered
    model = GPT(dropout=0.0)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = Text(replica, replicas)

    # -- recovery --------------------------------------------------------------------------------
    def state_dict() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, dict]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state_dict,
        replica_id=f"gpt-{replica}-",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=TIMEOUT,
        checkpoint_transport=RelayTransport(group, TIMEOUT),
    )
    # -- training as usual -----------------------------------------------------------------------
    losses: dict[int, str] = {}
    try:
        wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
        while manager.current_step() < steps:
            optimizer.zero_grad()
            text.position = manager.current_step() * CONTEXT * BATCH  # a step may be done again
            loss = wrapped(text.batch())
            loss.backward()
            optimizer.step()
            step = manager.current_step()
            losses[step] = repr(loss.item())
            print(f"replica {replica} step {step} loss {losses[step]}", flush=True)
    finally:
        manager.shutdown(wait=False)
    return losses


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--replica", type=int, default=0)
    options.add_argument("--replicas", type=int, default=2)
    options.add_argument("--steps", type=int, default=200)
    given = options.parse_args()
    try:
        import torchft  # noqa: F401
    except ImportError as fault:
        sys.exit(f"this example needs torchft with its native part: {fault}")
    train(given.replica, given.replicas, given.steps, None)
