"""Process groups as they are used here: operations are posted, and a thread waits for them.

A gloo wait that times out closes every pair of the group for good. So no wait here has a short
timeout: a watcher waits for as long as it takes and reports, and the caller gives up on its own
clock. An abandoned operation stays posted, with its memory, until the peer answers or the pair
breaks.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch

from torchrelay.errors import ResourceError
from torchrelay.memory import threads
from torchrelay.system import in_child

FOREVER = timedelta(days=365)
_LAST_TAG = (1 << 31) - 1  # of a message that never comes


class Work(Protocol):
    def wait(self, timeout: timedelta = ...) -> bool: ...


class ProcessGroup(Protocol):
    """The methods that are used of a process group; torch's classes and wrappers have them."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work: ...


def wait_for(work: Work, tensor: torch.Tensor) -> None:
    """Block until a posted operation is over, however long that takes."""
    work.wait(FOREVER)
    if tensor.device.type != "cpu":
        # On device backends wait() only orders the stream; the bytes are there after this.
        getattr(torch, tensor.device.type).current_stream(tensor.device).synchronize()


_changed = threading.Condition()
_inside: set[int] = set()  # threads
_groups: weakref.WeakSet[Any] = weakref.WeakSet()
_unwatched: list[tuple[Work, torch.Tensor]] = []  # posted, and no thread waits for them


def _forget_in_child() -> None:
    """A forked child has none of these threads, and its parent's connections are not its own."""
    global _changed
    _changed = threading.Condition()
    _inside.clear()
    _groups.clear()


in_child(_forget_in_child)


@contextmanager
def inside_backend() -> Iterator[None]:
    """Note that this thread waits in a backend's code, or frees what belongs to it."""
    me = threading.get_ident()
    with _changed:
        _inside.add(me)
    try:
        yield
    finally:
        with _changed:
            _inside.discard(me)
            _changed.notify_all()


@atexit.register
def _settle() -> None:
    """Let no thread return from a backend's code while the interpreter is being taken down.

    It would end inside C++ code, which aborts the process. Waits that were just ended get a moment
    to return; those that remain are ended by closing the connections, which this process is about
    to do anyway.
    """
    if not _returned(0.1):
        for group in list(_groups):
            _close_connections(group)
        _returned(1.0)


def _close_connections(group: ProcessGroup) -> None:
    """Close all pairs by waiting in vain for a message. Every rank is tried: the wait for a dead
    one ends at once, and closes nothing that is still open."""
    scratch = torch.zeros(1, device="cpu")
    for peer in range(group.size()):
        if group.rank() not in (-1, peer):
            with suppress(RuntimeError):
                group.recv([scratch], peer, _LAST_TAG).wait(timedelta(milliseconds=1))


def _returned(seconds: float) -> bool:
    """Whether all threads have come back, within that time."""
    with _changed:
        return _changed.wait_for(lambda: not _inside, seconds)


def watch(
    group: ProcessGroup,
    work: Work,
    tensor: torch.Tensor,
    report: Callable[[Exception | None], None],
) -> None:
    """Wait for an operation that was posted on a group, on a thread of its own, and report its end.

    The thread keeps operation and memory alive, and does not hold up the interpreter's exit if the
    peer never answers. `ResourceError` if no thread can be started: both are kept for good.
    """
    _groups.add(group)

    def run() -> None:
        nonlocal work, tensor, report
        with inside_backend():
            try:
                wait_for(work, tensor)
            except Exception as fault:  # whatever the backend raises: the pair is broken
                report(fault)
            else:
                report(None)
            del work, tensor, report

    try:
        threads.run(run, "posted")
    except ResourceError:
        _unwatched.append((work, tensor))  # it may be written to for as long as the group lives
        raise
