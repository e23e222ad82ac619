"""A process that can start no more threads, or only a few."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrelay.memory import threads


@contextmanager
def only_threads(count: int) -> Iterator[list[str]]:
    """Within: this process starts `count` more threads, and has no idle ones. Gives the names of
    those that were refused."""
    refused: list[str] = []
    start, left = threading.Thread.start, count

    def start_one(self: threading.Thread) -> None:
        nonlocal left
        if left <= 0:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        left -= 1
        start(self)

    threading.Thread.start = start_one  # type: ignore[method-assign]
    try:
        with _none_idle():
            yield refused
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


@contextmanager
def no_memory_for_threads() -> Iterator[None]:
    """Within: the kernel has no memory for the stack of another thread of this process."""
    size, stack = _mapped_bytes(), 1 << 30
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    stack_before = threading.stack_size(stack)
    resource.setrlimit(resource.RLIMIT_AS, (size + stack // 2, most))
    try:
        with _none_idle():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))
        threading.stack_size(stack_before)


@contextmanager
def _none_idle() -> Iterator[None]:
    kept = dict(threads._idle)
    threads._idle.clear()
    try:
        yield
    finally:
        for niceness, some in kept.items():
            threads._idle_of(niceness).extend(some)


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
