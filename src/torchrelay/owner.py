"""The process that an object belongs to: how it ends with it, and what its forks have of it."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from multiprocessing.util import Finalize
from typing import Protocol

from torchrelay.errors import UsageError
from torchrelay.system import in_child

logger = logging.getLogger("torchrelay")


class Owner:
    """The process that made an object which a forked child cannot use.

    A child of a fork has none of its parent's threads, and shares with it the sockets, the staged
    memory and the writer process.
    """

    def __init__(self, what: str, instead: str = "") -> None:
        """`instead`: what a child is to do."""
        self._what = what
        self._instead = instead or "make a Checkpointer of its own in the child, with no_dist=True"
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises `UsageError` in any other process."""
        if not self.here:
            raise UsageError(
                f"this {self._what} belongs to process {self._pid}, and process {os.getpid()} is a "
                f"fork of it: {self._instead}"
            )


class Owned(Protocol):
    """An object that its own process closes, and that a forked child detaches from."""

    @property
    def url(self) -> str: ...
    def close(self) -> None: ...
    def _detach_after_fork(self) -> None: ...


_open: weakref.WeakSet[Owned] = weakref.WeakSet()
_registered = 0  # the process that closes what is open at its end


def close_at_exit(owned: Owned) -> None:
    """Have an object closed at the end of this process, and detached from in its forks."""
    global _registered
    if _registered != os.getpid():
        # Unlike `atexit`, this is run in children of multiprocessing too, which leave by `_exit`.
        Finalize(None, _close_all, exitpriority=100)
        _registered = os.getpid()
    _open.add(owned)


def _close_all() -> None:
    """A program that ends without `close` still finishes the save under way.

    Where a signal says meanwhile that the process is to end, nothing else is waited for: after the
    death of another rank torchrun starts new workers only when this one is gone.
    """
    for owned in list(_open):
        try:
            owned.close()
        except Exception as fault:
            logger.exception("closing the checkpointer of %s", owned.url)
            # torchrun's workers raise this one in their handler of SIGTERM.
            elastic = sys.modules.get("torch.distributed.elastic.multiprocessing.api")
            if elastic is not None and isinstance(fault, elastic.SignalException):
                return _detach_all()


def _detach_all() -> None:
    for owned in list(_open):
        owned._detach_after_fork()
    _open.clear()


in_child(_detach_all)
