"""What the ranks do, one call at a time. Each holds one state."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.checkpoint import sides
from benchmarks.checkpoint.states import Size, flat, make
from benchmarks.workloads import clear
from torchrelay.demo.job import SMALL, DemoJob, Settings, fingerprint

_state: Any = None
_seen = ""
_job: DemoJob | None = None


@dataclass(frozen=True)
class Lap:
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    exact: bool | None = None


@dataclass(frozen=True)
class AsyncLap:
    """`idle` and `beside`: seconds of a training step without a save and beside one."""

    stall: float
    total: float
    idle: float
    beside: float
    phases: dict[str, float]
    exact: bool | None = None


def prepare(group: Any, size: Size) -> tuple[int, int]:
    """Make the state; its tensors and bytes on this rank."""
    global _state, _seen, _job
    sides.close()
    _state = _job = None  # before the next one is made: two may not fit
    gc.collect()
    # One process has all cores, as torch's default is; several share them.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // group.size()))
    _state = make(size, group)
    tensors = flat(_state)
    _seen = fingerprint(tensors)
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values())


def finish(group: Any) -> None:
    sides.close()


def _timed(group: Any, act: Callable[[], dict[str, float]]) -> Lap:
    gc.collect()  # the garbage of another lap is not this one's cost
    group.barrier().wait()
    begun = time.perf_counter()
    phases = act()
    return Lap(time.perf_counter() - begun, phases)


def save(group: Any, how: str, folder: str) -> Lap:
    return _timed(group, lambda: sides.save(how, group, _state, folder))


def load(group: Any, how: str, folder: str, check: bool) -> Lap:
    if check:
        clear(flat(_state))
    lap = _timed(group, lambda: sides.load(how, group, _state, folder))
    return Lap(lap.seconds, lap.phases, fingerprint(flat(_state)) == _seen if check else None)


def ready(group: Any, folder: str, options: dict[str, Any]) -> float:
    """A checkpointer with its arena and writer process; the seconds that takes."""
    begun = time.perf_counter()
    sides.checkpointer(group, folder, **options).prepare(_state)
    return time.perf_counter() - begun


def save_async(group: Any, how: str, folder: str, step: int, check: bool, small: bool) -> AsyncLap:
    """Some training, the caller's wait, then training until the save is done.

    With `check`, the state is changed at once after the wait, and ours is loaded to see that it
    does not have the change.
    """
    global _job
    _job = _job or DemoJob(SMALL if small else Settings(), seed=1)
    gc.collect()
    idle = _training(lambda count: count < (2 if small else 15))
    begun = time.perf_counter()
    save = sides.save_async(how, group, _state, folder, step)
    stall = time.perf_counter() - begun
    if check:
        for tensor in flat(_state).values():
            tensor.view(torch.uint8).bitwise_not_() if tensor.dim() else tensor.neg_()
    beside = _training(lambda count: not save.done())
    phases = save.result()
    total = time.perf_counter() - begun
    exact = None
    if check:
        if how == sides.OURS:
            sides.load(sides.ATOMIC, group, _state, folder)
        else:
            sides.load(sides.LOAD_DCP, group, _state, folder)
        exact = fingerprint(flat(_state)) == _seen
    return AsyncLap(stall, total, median(idle), median(beside or idle), phases, exact)


def write_async(group: Any, how: str, folder: str) -> None:
    """A save and nothing beside it, for its memory."""
    sides.save_async(how, group, _state, folder, 0).result()


def _training(go_on: Callable[[int], bool]) -> list[float]:
    """Seconds of each step. One thread, like the one that drives a device."""
    assert _job is not None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps: list[float] = []
    while go_on(len(steps)):
        begun = time.perf_counter()
        _job.step()
        steps.append(time.perf_counter() - begun)
    torch.set_num_threads(threads)
    return steps


def copy_twice(group: Any) -> Lap:
    """The state's bytes into touched memory, on two threads: what a stall cannot go below."""
    sources = list(flat(_state).values())
    memory = torch.ones(sum(tensor.nbytes for tensor in sources), dtype=torch.uint8)
    pairs = []
    at = 0
    # The largest first, so that the two threads end together.
    for tensor in sorted(sources, key=lambda tensor: -tensor.nbytes):
        there = memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        pairs.append((there, tensor))
        at += tensor.nbytes
    upcoming = iter(pairs)
    lock = threading.Lock()

    def work() -> None:
        torch.set_num_threads(1)
        while True:
            with lock:
                pair = next(upcoming, None)
            if pair is None:
                return
            pair[0].copy_(pair[1])

    def both() -> dict[str, float]:
        other = threading.Thread(target=work)
        other.start()
        work()
        other.join()
        return {}

    threads = torch.get_num_threads()
    lap = _timed(group, both)
    torch.set_num_threads(threads)
    return lap
