"""A process group of threads in one process, for a backend that cannot run here.

It behaves like nccl where that matters: device memory alone, no tags (messages between two ranks
come in the order they were posted), a send is over when it was received, and nothing that was
posted can be taken back.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _Backend:
    def name(self) -> str:
        return "loop"


class _Posted:
    def __init__(self, act: Any) -> None:
        self._act = act

    def wait(self, timeout: timedelta = timedelta(days=1)) -> bool:
        self._act(timeout.total_seconds())
        return True


class _Message:
    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.taken = data, threading.Event()


class Hub:
    """What the ranks share."""

    def __init__(self, world_size: int, device: str) -> None:
        self.world_size, self.device = world_size, device
        self.store = dist.HashStore()
        self.pipes: dict[tuple[int, int], queue.Queue[_Message]] = defaultdict(queue.Queue)
        self.flips = 0  # large messages yet to be damaged on their way
        self.sent = 0  # messages


class LoopGroup:
    """One rank's end."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self._device_types = [torch.device(hub.device)]
        self._order: dict[tuple[int, int], threading.Lock] = defaultdict(threading.Lock)

    def _get_backend(self, device: torch.device) -> _Backend:
        return _Backend()

    def get_group_store(self) -> Any:
        return self._hub.store

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._hub.world_size

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> _Posted:
        assert tensors[0].device.type == self._hub.device, "host memory on a device backend"
        message = _Message(tensors[0].clone())
        if self._hub.flips and len(message.data) > 1 << 20:
            self._hub.flips -= 1
            message.data[-1] ^= 1
        self._hub.sent += 1
        self._hub.pipes[self._rank, dst].put(message)
        return _Posted(lambda timeout: message.taken.wait(min(timeout, threading.TIMEOUT_MAX)))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> _Posted:
        assert tensors[0].device.type == self._hub.device, "host memory on a device backend"
        pipe = self._hub.pipes[src, self._rank]

        def take(timeout: float) -> None:
            message = pipe.get(timeout=min(timeout, threading.TIMEOUT_MAX))
            tensors[0].copy_(message.data)
            message.taken.set()

        return _Posted(take)


def run_loop(
    fn: Any, world_size: int, device: str, *args: Any, timeout: float = 60, flips: int = 0
) -> list[Any]:
    """Run `fn(rank, group, *args)` in a thread for each rank."""
    hub = Hub(world_size, device)
    hub.flips = flips
    groups = [LoopGroup(hub, rank) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        futures = [threads.submit(fn, g.rank(), g, *args) for g in groups]
        return [future.result(timeout) for future in futures]
