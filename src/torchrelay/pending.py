"""`Pending`: work that continues in the background."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # another class in Python 3.10

from torchrelay.deadlines import LOOK_UP, Timeout, seconds_of
from torchrelay.metrics import Measurement
from torchrelay.owner import Owner
from torchrelay.results import Report

logger = logging.getLogger("torchrelay")


class Pending(Future[Report]):
    """A step that is being saved, published or staged. The caller may change the state meanwhile.

    A `concurrent.futures.Future`, so `wait`, `as_completed`, `add_done_callback` and
    `asyncio.wrap_future` take it. It cannot be cancelled. Callbacks run in the thread that ended
    the work: keep them short. `skipped`: why the work was never begun, or None; the result says so,
    too. `seen`: a caller has seen the failure, if there is one.
    """

    def __init__(
        self,
        step: int,
        work: str,
        skipped: str | None = None,
        measured: Measurement | None = None,
    ) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()
        self.step, self.skipped, self.seen = step, skipped, False
        self._work = work  # "saving"
        self._measured = measured
        self._owner = Owner("Pending")
        if skipped is not None:
            if measured is not None:
                measured.end(None, skipped=skipped)
            self.set_result(Report(step, 0, skipped=skipped))

    def succeeded(self) -> bool:
        """Whether the work has ended and has made the step. A failure stays unseen: the next call
        still raises it."""
        return self.done() and super().exception() is None and super().result().skipped is None

    def result(self, timeout: Timeout | None = None) -> Report:
        """Wait until the step is committed, or can be read. Raises the failure of the work.

        `skipped` of the report is the reason if nothing was done. Raises `TimeoutError` after
        `timeout` seconds; the work continues.
        """
        fault = self.exception(timeout)
        if fault is not None:
            raise fault
        return super().result()

    def exception(self, timeout: Timeout | None = None) -> BaseException | None:
        """Wait for the end and return the failure, or None. Raises `TimeoutError` like `result`."""
        self._owner.check()
        seconds: float | None = None
        if timeout is not None:
            seconds = seconds_of(timeout) if timeout else 0.0  # 0: as of any future, do not wait
        if not self.ends_within(seconds):
            raise TimeoutError(
                f"{self._work} step {self.step} takes longer than {seconds:g} s: wait longer, or "
                "see whether the storage or the server is slow"
            )
        self.seen = True
        return super().exception()

    def ends_within(self, seconds: float | None) -> bool:
        """True if the work ends within `seconds`, with or without success; None: wait for it. A
        user's interrupt ends the wait."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = LOOK_UP if end is None else end - time.monotonic()
            try:
                super().exception(max(0.0, min(left, LOOK_UP)))
            except NotYet:
                if end is not None and left <= LOOK_UP:
                    return False
            else:
                return True

    def end(self, report: Report | None, fault: BaseException | None) -> None:
        """Called once, when the work has ended; without either, the caller has raised the failure
        and has no `Pending`."""
        if fault is not None:
            logger.error("%s step %d failed: %s", self._work, self.step, fault)
        if self._measured is not None and (report is not None or fault is not None):
            self._measured.end(report, fault)
        if fault is not None:
            self.set_exception(fault)
        else:
            self.set_result(report or Report(self.step, 0, skipped="the call raised its failure"))
