"""verl's `CheckpointEngineManager` moves weights between Ray actors: two trainers, two rollout
workers. The rollout workers are verl's own; their server is replaced by a list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs

MODULE = "torchrelay.integrations.verl"
OPTIONS = {"host": "127.0.0.1", "device": "cpu", "timeout": 60}


class Trainer(Worker):
    """The part of verl's actor worker that sends weights."""

    def __init__(self) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        import_external_libs(MODULE)
        self.engine = CheckpointEngineRegistry.new(
            "torchrelay", is_master=dist.get_rank() == 0, bucket_size=1 << 20, **OPTIONS
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        await self.engine.send_weights(gathered(global_steps), global_steps=global_steps)
        return {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self.engine, method)(*args, **options)


def gathered(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that it takes both trainers to gather."""
    for layer in range(4):
        part = torch.full((8, 16), float(step * 10 + layer))
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        yield f"layers.{layer}.weight", torch.cat(parts)


class Server:
    """In place of an inference engine."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.found: list[Any] = []

    async def update_weights(self, weights: Any, global_steps: int, wire_format: str) -> None:
        version = [(name, list(t.shape), t.unique().tolist()) async for name, t in weights]
        self.found.append([global_steps, wire_format, version])


class Rollout(CheckpointEngineWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def found(self) -> list[Any]:
        return list(self.server_adapter.found)


class Replica:
    """Two rollout workers, whose server has no requests."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    async def nothing(self, **_: Any) -> None:
        await asyncio.sleep(0)

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def group_of(cls: Any, **options: Any) -> Any:
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), **options)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, use_gpu=False)


def main() -> None:
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    engine = SimpleNamespace(
        backend="torchrelay",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"torchrelay": OPTIONS},
        custom_backend_module=MODULE,
    )
    trainers = group_of(Trainer)
    rollout_config = SimpleNamespace(checkpoint_engine=engine, name="none", mode="async")
    rollouts = group_of(
        Rollout, rollout_config=rollout_config, model_config=None, server_adapter=Server()
    )
    manager = CheckpointEngineManager(engine, trainers, [Replica(rollouts.workers)])
    for step in (1, 2):
        manager.update_weights(global_steps=step)
    print("FOUND", json.dumps(rollouts.found()))
    ray.shutdown()


if __name__ == "__main__":
    main()
