"""`Pending`: work that continues in the background."""

from __future__ import annotations

import logging
import threading

from torchrelay.deadlines import Timeout, seconds_of, wait_until_set
from torchrelay.metrics import Measurement
from torchrelay.owner import Owner
from torchrelay.results import Report

logger = logging.getLogger("torchrelay")


class Pending:
    """A step that is being saved, published or staged. The caller may change the state meanwhile.

    `skipped`: why the work was never begun, or None. `seen`: a caller has seen the failure, if
    there is one.
    """

    def __init__(
        self,
        step: int,
        work: str,
        skipped: str | None = None,
        measured: Measurement | None = None,
    ) -> None:
        self.step, self.skipped, self.seen = step, skipped, False
        self._work = work  # "saving"
        self._measured = measured
        self._owner = Owner("Pending")
        self._ended = threading.Event()
        self._report: Report | None = None
        self._fault: BaseException | None = None
        if skipped is not None:
            if measured is not None:
                measured.end(None, skipped=skipped)
            self._ended.set()

    def done(self) -> bool:
        """Whether the work has ended, with or without success."""
        return self._ended.is_set()

    def succeeded(self) -> bool:
        """Whether the work has ended and has made the step. A failure stays unseen: the next call
        still raises it."""
        return self._ended.is_set() and self._fault is None and self.skipped is None

    def result(self, timeout: Timeout | None = None) -> Report | None:
        """Wait until the step is committed, or can be read; None if it was skipped. Raises the
        failure of the work.

        Raises `TimeoutError` after `timeout` seconds; the work continues.
        """
        fault = self.exception(timeout)
        if fault is not None:
            raise fault
        return self._report

    def exception(self, timeout: Timeout | None = None) -> BaseException | None:
        """Wait for the end and return the failure, or None. Raises `TimeoutError` like `result`."""
        self._owner.check()
        seconds = None if timeout is None else seconds_of(timeout)
        if not wait_until_set(self._ended, seconds):
            raise TimeoutError(
                f"{self._work} step {self.step} takes longer than {seconds:g} s: wait longer, or "
                "see whether the storage or the server is slow"
            )
        self.seen = True
        return self._fault

    def ends_within(self, seconds: float) -> bool:
        """True if the work ends within `seconds`, with or without success."""
        return wait_until_set(self._ended, seconds)

    def end(self, report: Report | None, fault: BaseException | None) -> None:
        """Called once, when the work has ended."""
        self._report, self._fault = report, fault
        if fault is not None:
            logger.error("%s step %d failed: %s", self._work, self.step, fault)
        if self._measured is not None and (report is not None or fault is not None):
            self._measured.end(report, fault)  # else the caller has raised the failure
        self._ended.set()
