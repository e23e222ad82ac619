"""A training worker: it recovers, trains, keeps each step, and reports to its launcher."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchrelay as tr
from torchrelay.demo.job import DemoJob, Settings, fingerprint, leaves
from torchrelay.integrations.random_state import RandomState


class ShardedJob(DemoJob):
    """The training job, sharded by FSDP2: each rank has its own batches and random numbers."""

    def __init__(self, settings: Settings, rank: int, world: int, device: str = "cpu") -> None:
        super().__init__(settings, 0, rank, world, device)
        # Named, because `fully_shard` would take the GPU of any machine that has one.
        fully_shard(self.model, mesh=init_device_mesh(device, (world,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + rank)

    def live_state(self) -> dict[str, Any]:
        """The state as it is handed to torchrelay: the objects themselves."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "random": RandomState(),
            "position": self.position,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Apply the value that no object takes: the position."""
        self.position = state["position"]

    def weights(self) -> str:
        """A digest of this rank's part of the weights and of the optimizer."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = leaves({"model": model, "optimizer": optimizer})
        return fingerprint(
            {path: x.to_local() if isinstance(x, DTensor) else x for path, x in found}
        )


class Post(NamedTuple):
    """A worker's place in a start of the job. Ranks are counted over all hosts."""

    rank: int
    world: int
    host: str
    start: int  # the number of this start: each has a rendezvous of its own


class Site(NamedTuple):
    """Where the workers of a host are: what they call first, and where their keeper listens."""

    enter: Callable[[], None] | None = None
    address: str = "127.0.0.1:0"


class Plan(NamedTuple):
    """The settings of all workers of a job, the same at every start."""

    settings: Settings
    folder: str
    job: str | None  # the name that its keepers go by; None: no step is kept
    patience: float = 60.0  # seconds that a worker waits for another, or a call may take
    pace: float = 0.0  # seconds that a step takes at least
    sites: dict[str, Site] | None = None  # by host, where that is not this one
    device: str = "cpu"  # that workers train on; "cuda": they share the available GPUs

    def site(self, host: str) -> Site:
        return (self.sites or {}).get(host, Site())


class Brought(NamedTuple):
    """A recovered state: its step, seconds by phase, and a summary in words."""

    step: int
    seconds: dict[str, float]
    summary: str


class KeptByWorker(NamedTuple):
    """The copies of a step that a worker knows of."""

    step: int = -1  # that was kept, or -1
    keeper: int = 0  # the process that has it in its memory
    copied: int = 0  # the step that this process has copies of, from other hosts


class KeptSteps:
    """Each step in the memory of keepers, some on disk."""

    def __init__(self, plan: Plan, post: Post) -> None:
        self._plan = plan
        address = plan.site(post.host).address
        self.keeper = tr.Keeper(
            f"{plan.job}@{post.host}",
            address=address,
            timeout=plan.patience,
            options=tr.options.KeeperOptions(lease_seconds=60.0),
        )
        self._checkpointer = tr.Checkpointer(
            f"{plan.folder}/steps", keep=tr.KeepLast(2), keeper=self.keeper, timeout=plan.patience
        )

    def recover(self, job: ShardedJob) -> Brought:
        got = tr.recover(
            into=job.live_state(),
            sources=[self.keeper, self._checkpointer],
            group=dist.group.WORLD,
            timeout=self._plan.patience,
        )
        if got is None:
            return Brought(0, {}, "no source has a step: this is a first start")
        job.take(got.state)
        return Brought(got.step or 0, got.report.seconds, str(got.report))

    def keep(self, job: ShardedJob) -> KeptByWorker:
        step, state = job.position, job.live_state()
        due = step % self._plan.settings.save_every == 0
        if due and not self._checkpointer.save_async(step, state, on_busy="skip").skipped:
            # There is no handle to wait for. A save staged on the host is in the keeper, too.
            return KeptByWorker()
        try:
            staged = self._checkpointer.stage(step, state)
            pid = self.keeper.pid
            staged.result(self._plan.patience)
            found = self.keeper.status()["copies"].get("step")
        except tr.errors.EndpointError:  # the keeper was lost; the next stage starts it again
            return KeptByWorker()
        return KeptByWorker(step if staged.skipped is None else -1, pid or 0, int(found or 0))

    def close(self) -> None:
        self._checkpointer.close()
        self.keeper.close()


def main(conn: Connection, plan: Plan, post: Post) -> None:
    """The whole life of a worker. Its messages: a word, the time, and a value."""

    def tell(word: str, value: Any = None) -> None:
        conn.send((word, time.monotonic(), value))

    code = 0
    try:
        enter = plan.site(post.host).enter
        if enter is not None:
            enter()
        torch.set_num_threads(1)
        if plan.device == "cuda":
            _use_gpu(post.rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(plan.folder) / f'start-{post.start}'}",
            rank=post.rank,
            world_size=post.world,
            timeout=timedelta(seconds=plan.patience),
        )
        job = ShardedJob(plan.settings, post.rank, post.world, plan.device)
        tell("ready")
        _train(job, None if plan.job is None else KeptSteps(plan, post), plan, tell)
        conn.poll(plan.patience)  # one that leaves early breaks connections that others still use
    except BaseException:
        code = 1
        tell("failed", traceback.format_exc())
    finally:
        conn.close()
        os._exit(code)  # skips waiting for connections that a lost peer has left half open


def _use_gpu(rank: int) -> None:
    """Choose the GPU of a worker, and kernels that give the same bits at every run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _train(
    job: ShardedJob, steps: KeptSteps | None, plan: Plan, tell: Callable[[str, Any], None]
) -> None:
    if steps is not None:
        tell("keeper", steps.keeper.pid)
        tell("recovered", steps.recover(job))
    while job.position < plan.settings.steps:
        begun = time.monotonic()
        loss = job.step()
        tell("loss", (job.position, loss))
        kept = KeptByWorker() if steps is None else steps.keep(job)
        if steps is not None:
            tell("keeper", steps.keeper.pid)  # one that was lost has been started again
        tell("kept", (job.position, kept))
        time.sleep(max(0.0, begun + plan.pace - time.monotonic()))
    tell("done", job.weights())
    if steps is not None:
        steps.close()
