"""A last save when the job is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchrelay.checkpointer.owner import Owner
from torchrelay.checkpointer.pending import logger
from torchrelay.errors import UsageError


class SaveOnSignal:
    """Calls `act` once when one of the signals comes, then lets it do what it did before.

    A signal that comes while `held` is answered at its end: a handler runs in the middle of
    whatever the main thread is doing, and a save in the middle of a save would mix them.
    """

    def __init__(self, signals: tuple[signal.Signals, ...], act: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("save_on_signal is set up in the main thread, where signals arrive")
        self._act = act
        self._owner = Owner("handler")
        self._holds = 0
        self._came: tuple[int, FrameType | None] | None = None
        self._before: dict[int, Any] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put signals off until the block is over, if it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if self._came is not None and not self._holds:
                self._answer(*self._came)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._owner.here:  # a child of a fork: the state is its parent's to save
            self._pass_on(number, frame)
        elif self._holds:
            self._came = (number, frame)
        else:
            self._answer(number, frame)

    def _answer(self, number: int, frame: FrameType | None) -> None:
        try:
            self._act()
        except Exception:
            logger.exception("the last save, on signal %d, failed", number)
        self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let a signal do what it did before."""
        self.remove()
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.raise_signal(number)

    def remove(self) -> None:
        """Put back the handlers that were there."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
