"""A last save when the job is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from torchrelay.checkpointer.pending import logger
from torchrelay.errors import UsageError


class SaveOnSignal:
    """Calls `act` once when one of the signals comes, then lets it do what it did before."""

    def __init__(self, signals: tuple[signal.Signals, ...], act: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("save_on_signal is set up in the main thread, where signals arrive")
        self._act = act
        self._fired = False
        self._before: dict[signal.Signals, Any] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if not self._fired:
            self._fired = True
            try:
                self._act()
            except Exception:
                logger.exception("the last save, on signal %d, failed", number)
        self.remove()
        before = self._before[signal.Signals(number)]
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.raise_signal(number)

    def remove(self) -> None:
        """Put back the handlers that were there."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
