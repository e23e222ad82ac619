"""Two torchft replicas under real Managers; the second starts with other weights and recovers.

Needs torchft with its native extension (a wheel for x86_64). `python -m
tests.support.torchft_manager` runs it by itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import nn, optim

TIMEOUT = timedelta(seconds=30)
STEPS = 4


def train(replica: int, lighthouse: str, fail_at: int | None) -> tuple[dict[str, Any], int]:
    """One replica's loop, and the number of states its transport received."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from torchrelay.integrations.torchft import RelayTransport

    received = 0
    while True:
        store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = ProcessGroupGloo(timeout=TIMEOUT)
        transport: Any = RelayTransport(group, TIMEOUT)
        receive = transport.recv_checkpoint

        def counted(*args: Any, receive: Any = receive, **kwargs: Any) -> Any:
            nonlocal received
            received += 1
            return receive(*args, **kwargs)

        transport.recv_checkpoint = counted
        torch.manual_seed(replica)
        model = nn.Linear(3, 4)
        inner = optim.Adam(model.parameters())

        def state_dict(model: nn.Module = model, inner: Any = inner) -> dict[str, Any]:
            return {"model": model.state_dict(), "optim": inner.state_dict()}

        def load(state: dict[str, Any], model: nn.Module = model, inner: Any = inner) -> None:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["optim"])

        manager = Manager(
            pg=group,
            min_replica_size=2,
            load_state_dict=load,
            state_dict=state_dict,
            replica_id=str(replica),
            store_addr="localhost",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            timeout=TIMEOUT,
            checkpoint_transport=transport,
        )
        try:
            wrapped = DistributedDataParallel(manager, model)
            optimizer = Optimizer(manager, inner)
            while manager.current_step() < STEPS:
                optimizer.zero_grad()
                wrapped(torch.rand(2, 3)).sum().backward()
                optimizer.step()
                if fail_at is not None and manager.current_step() == fail_at:
                    fail_at = None
                    raise InterruptedError("this replica dies and comes back")
            return state_dict(), received
        except InterruptedError:
            continue
        finally:
            manager.shutdown(wait=False)


def recovers() -> None:
    """Both replicas end with the same weights, though one began with others and died once."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
    try:
        with ThreadPoolExecutor(2) as threads:
            futures = [
                threads.submit(train, replica, lighthouse.address(), 2 if replica else None)
                for replica in (0, 1)
            ]
            (first, _), (second, received) = [future.result(120) for future in futures]
    finally:
        lighthouse.shutdown()
    for name, value in first["model"].items():
        assert torch.equal(value, second["model"][name]), name
    assert received >= 1, "the second replica never received a state"
    print(f"replicas agree; the second received {received} states over Relay")


if __name__ == "__main__":
    recovers()
