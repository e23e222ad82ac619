"""A last save when the job is told to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchrelay.checkpointer.saves.pending import logger
from torchrelay.errors import UsageError
from torchrelay.owner import Owner


class SaveOnSignal:
    """Answers the first of the signals that comes: calls `act`, then lets it do what it did before.

    With `at_once` the handler answers it itself, or the end of `held` does: a handler runs in the
    middle of whatever the main thread is doing, and a save in the middle of a save would mix them.
    Otherwise somebody calls `answer`, at a point where all ranks do.

    Signals that come until the answer is complete are part of it: none of them breaks it off.
    """

    def __init__(
        self, signals: tuple[signal.Signals, ...], act: Callable[[], None], *, at_once: bool
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("save_on_signal is set up in the main thread, where signals arrive")
        self._act = act
        self._at_once = at_once
        self._owner = Owner("handler")
        self._holds = 0
        self._came: tuple[int, FrameType | None] | None = None
        self._answering = False
        self._over = False
        self._before: dict[int, Any] = {}
        for number in signals:
            try:
                self._before[number] = signal.signal(number, self._handle)
            except (OSError, ValueError, TypeError) as fault:
                self.remove()
                raise UsageError(f"{number!r} is no signal that can be handled: {fault}") from None

    @property
    def came(self) -> bool:
        """Whether there is a signal to answer."""
        return self._came is not None

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
            self._answer_at_once()

    def answer(self) -> None:
        """Do what is to be done, on every rank; on those with a signal, let it go on."""
        self._answering = True
        try:
            self._act()
        except Exception:
            logger.exception("the last save failed")
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Let signals do what they did before, from here on; one that came does it here."""
        self._over = True
        came, self._came = self._came, None
        if threading.current_thread() is not threading.main_thread():
            if came is not None:
                signal.raise_signal(came[0])  # is handled in the main thread
            return
        self.remove()
        if came is not None:
            self._pass_on(*came)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._over or not self._owner.here:  # a child of a fork has nothing to save
            self._pass_on(number, frame)
            return
        self._came = self._came or (number, frame)
        self._answer_at_once()

    def _answer_at_once(self) -> None:
        if self._at_once and self.came and not self._holds and not self._answering:
            self.answer()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
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
