"""Process groups as they are used here: operations are posted, and a thread waits for them.

A gloo wait that times out closes every pair of the group for good. So nobody here waits with a
short timeout: a watcher waits for as long as it takes and reports, and the caller gives up on its
own clock. What was given up on stays posted, with its memory, until the peer answers or the pair
breaks.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchrelay.errors import UsageError
from torchrelay.memory import threads

FOREVER = timedelta(days=365)
_LAST_TAG = (1 << 31) - 1  # of a message that never comes


class Work(Protocol):
    def wait(self, timeout: timedelta = ...) -> bool: ...


class ProcessGroup(Protocol):
    """What is used of a process group; torch's own classes and wrappers around them have it."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work: ...


def check_group(group: Any) -> None:
    """`UsageError` unless it is a process group that this rank is in."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this rank is not in the group that it was given")
    if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
        hint = ": its get_group() is one" if hasattr(group, "get_group") else ""
        raise UsageError(f"group is a process group, not {type(group).__name__}{hint}")


def members_of(group: Any) -> frozenset[int] | None:
    """The ranks of a group as the default group counts them; None for one that torch does not know
    of, as libraries make them."""
    with suppress(KeyError, ValueError, RuntimeError):
        return frozenset(dist.get_process_group_ranks(group))
    return None


def wait_for(work: Work, tensor: torch.Tensor) -> None:
    """Block until a posted operation is over, however long that takes."""
    work.wait(FOREVER)
    if tensor.device.type != "cpu":
        # On device backends wait() only orders the stream; the bytes are there after this.
        getattr(torch, tensor.device.type).current_stream(tensor.device).synchronize()


_changed = threading.Condition()
_inside: set[int] = set()  # threads
_groups: weakref.WeakSet[Any] = weakref.WeakSet()


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


def use(group: ProcessGroup) -> None:
    """Note a group that operations are posted on."""
    _groups.add(group)


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
    """Wait in vain for a message. Each rank is tried: at one that is dead there is no wait, and
    nothing is closed but what is closed already."""
    scratch = torch.zeros(1, device="cpu")
    for peer in range(group.size()):
        if group.rank() not in (-1, peer):
            with suppress(RuntimeError):
                group.recv([scratch], peer, _LAST_TAG).wait(timedelta(milliseconds=1))


def _returned(seconds: float) -> bool:
    """Whether all threads have come back, within that time."""
    with _changed:
        return _changed.wait_for(lambda: not _inside, seconds)


class Watcher:
    """Waits for posted operations in order, on a thread of its own, and reports each.

    The thread keeps operation and memory alive, ends after `close`, and does not hold up the
    interpreter's exit if the peer never answers.
    """

    def __init__(self, name: str) -> None:
        self._posted: queue.SimpleQueue[tuple[Work, torch.Tensor, Callable[..., None]] | None] = (
            queue.SimpleQueue()
        )
        threads.run(self._run, name)

    def watch(
        self, work: Work, tensor: torch.Tensor, report: Callable[[Exception | None], None]
    ) -> None:
        self._posted.put((work, tensor, report))

    def close(self) -> None:
        self._posted.put(None)

    def _run(self) -> None:
        while (item := self._posted.get()) is not None:
            work, tensor, report = item
            with inside_backend():
                try:
                    wait_for(work, tensor)
                except Exception as fault:  # whatever the backend raises: the pair is broken
                    report(fault)
                else:
                    report(None)
                del item, work, tensor, report  # not kept alive while waiting for the next
