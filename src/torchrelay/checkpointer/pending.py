"""What `save_async` returns: a save that is being written."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from torchrelay.deadlines import Timeout, seconds_of, wait_until_set
from torchrelay.errors import CheckpointError, StorageTimeoutError
from torchrelay.owner import Owner

logger = logging.getLogger("torchrelay")


@dataclass(frozen=True)
class Saved:
    """A committed step. `bytes` are those of this rank's files; `seconds` are by phase."""

    step: int
    url: str
    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


class Pending:
    """A save that is being written. The state that it was given may change.

    `skipped`: it was never begun, because another one was in progress (`on_busy="skip"`). The
    failure of a `quiet` one is raised only by `result`.
    """

    def __init__(self, step: int, *, skipped: bool = False, quiet: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        self._owner = Owner("Pending")
        self._ended = threading.Event()
        self._saved: Saved | None = None
        self._fault: BaseException | None = None
        self._seen = self._quiet = quiet
        if skipped:
            self._ended.set()

    def done(self) -> bool:
        """Whether the save has ended, with or without success."""
        return self._ended.is_set()

    def result(self, timeout: Timeout | None = None) -> Saved | None:
        """Wait until the step is committed; None if it was skipped. Raises the failure of the save.

        `TimeoutError` after `timeout` seconds; the save continues.
        """
        fault = self.exception(timeout)
        if fault is not None:
            raise fault
        return self._saved

    def exception(self, timeout: Timeout | None = None) -> BaseException | None:
        """Wait for the end and return the failure, or None. `TimeoutError` as for `result`."""
        self._owner.check()
        seconds = None if timeout is None else seconds_of(timeout)
        if not wait_until_set(self._ended, seconds):
            raise TimeoutError(
                f"step {self.step} is not committed after {seconds} s: wait longer, or see whether "
                "the storage is slow"
            )
        self._seen = True
        return self._fault

    def takes(self, fault: BaseException) -> bool:
        """Whether a failure at the start of the save is kept here instead of being raised: only a
        failure of the storage is, and only if the save is quiet."""
        if not self._quiet or type(fault) not in (CheckpointError, StorageTimeoutError):
            return False
        return isinstance(fault, StorageTimeoutError) or getattr(fault, "file", None) is not None

    def raise_unseen(self) -> None:
        """Raise the failure, if there is one and no caller has seen it; once."""
        if self._fault is not None and not self._seen:
            self._seen = True
            raise self._fault

    def wait(self, seconds: float) -> None:
        """Wait for the end; raises a failure that no caller has seen."""
        if not wait_until_set(self._ended, seconds):
            raise CheckpointError(
                f"step {self.step} is still being written: give a longer timeout",
                step=self.step,
                phase="write",
            )
        self.raise_unseen()

    def end(self, saved: Saved | None, fault: BaseException | None) -> None:
        """Called once, when the step is committed or has failed."""
        self._saved, self._fault = saved, fault
        if fault is not None:
            logger.error("saving step %d failed: %s", self.step, fault)
        self._ended.set()
