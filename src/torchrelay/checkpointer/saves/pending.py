"""What `save_async` returns."""

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
    """A committed step. `bytes` are those of this rank's files; `seconds` are by phase; `failures`
    are those of the attempts before the one that was committed."""

    step: int
    url: str
    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    failures: tuple[str, ...] = ()


class Pending:
    """A save that is being written. The state it was given may change.

    `skipped`: it was never begun, because another one was under way (`on_busy="skip"`). A failure
    of one that is `quiet` is told to those who ask for it, and to nobody else.
    """

    def __init__(self, step: int, *, skipped: bool = False, quiet: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        self._owner = Owner("Pending")
        self._ended = threading.Event()
        self._saved: Saved | None = None
        self._fault: BaseException | None = None
        self._told = self._quiet = quiet
        if skipped:
            self._ended.set()

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout: Timeout | None = None) -> Saved | None:
        """Wait until the step is committed; None if it was skipped. Raises what went wrong.

        `TimeoutError` after `timeout` seconds; the save goes on.
        """
        self._owner.check()
        seconds = None if timeout is None else seconds_of(timeout)
        if not wait_until_set(self._ended, seconds):
            raise TimeoutError(f"step {self.step} is not committed after {seconds} s")
        self._told = True
        if self._fault is not None:
            raise self._fault
        return self._saved

    def exception(self, timeout: Timeout | None = None) -> BaseException | None:
        """Wait for the end and return what went wrong, if anything did."""
        self._owner.check()
        try:
            self.result(timeout)
        except TimeoutError:
            if not self._ended.is_set():
                raise
        except BaseException:
            pass
        return self._fault

    def takes(self, fault: BaseException) -> bool:
        """Whether a fault that a save began with is told here, in place of being raised: one of the
        storage, where the save is quiet. Others are the caller's to mend."""
        if not self._quiet or type(fault) not in (CheckpointError, StorageTimeoutError):
            return False
        return isinstance(fault, StorageTimeoutError) or getattr(fault, "file", None) is not None

    def untold(self) -> BaseException | None:
        """The failure, if there was one and nobody has asked; asked once."""
        if self._fault is None or self._told:
            return None
        self._told = True
        return self._fault

    def settle(self, seconds: float) -> None:
        """Wait for the end; raises a failure that nobody has asked for."""
        if not wait_until_set(self._ended, seconds):
            raise CheckpointError(
                f"step {self.step} is still being written", step=self.step, phase="write"
            )
        if (fault := self.untold()) is not None:
            raise fault

    def end(self, saved: Saved | None, fault: BaseException | None) -> None:
        """Called once by whoever writes the step."""
        self._saved, self._fault = saved, fault
        if fault is not None:
            logger.error("saving step %d failed: %s", self.step, fault)
        self._ended.set()
