"""Copies to and from a GPU in parallel with the work of its default stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchrelay.state.torch_private import has_context

_mine = threading.local()


@contextmanager
def side_stream() -> Iterator[Any]:
    """Have this thread's CUDA work run on a stream of its own, the same one each time.

    Nothing is ordered with other streams: whoever begins work there waits for them first
    (`settle`). Yields the stream; None where CUDA is not in use, and all is as it was.
    """
    if not in_use():
        yield None
        return
    device = _device()
    streams: dict[int, Any] = _mine.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(streams[device]):
        yield streams[device]


def _device() -> int:
    """The GPU of this thread; for a new thread that is the first, which may not be this process's
    to use: then one that is."""
    current = torch.cuda.current_device()
    if has_context(current):
        return current
    return next(filter(has_context, range(torch.cuda.device_count())), current)


@contextmanager
def on_side_stream() -> Iterator[None]:
    """The same, and what was begun inside is over at the end."""
    with side_stream() as stream:
        yield
        if stream is not None:
            stream.synchronize()


def settle() -> None:
    """Wait for what the current streams of this thread were given: other streams and processes
    may use its results after this."""
    if in_use():
        for device in filter(has_context, range(torch.cuda.device_count())):
            torch.cuda.current_stream(device).synchronize()


def in_use() -> bool:
    """Whether this process uses CUDA. Cheap, and does not set it up."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
