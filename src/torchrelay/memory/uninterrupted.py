"""Work that an interrupt must not break in two, such as writing new weights over old ones.

Python runs signal handlers between any two lines of the main thread, and `KeyboardInterrupt` comes
out of one. Other threads never run them. So the main thread puts a handler of its own in the place
of each, for as long as the work takes. The work itself stays on the thread of the caller: it runs
the caller's code, which may depend on locks that are held, on a default device, or on any other
state that a thread has.
"""

from __future__ import annotations

import signal
import threading

# Of the module `signal`, before it makes enums of what it finds: that takes 20 times as long.
from _signal import getsignal  # type: ignore[import-not-found]
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def uninterrupted(act: Callable[[], T]) -> T:
    """Return or raise what `act` does. Signal handlers of Python run when it is over: none of them
    sees half of it, and an exception out of one is raised then."""
    return _with_handlers(act, _Waiting())


def hurried(act: Callable[[], T], hurry: Callable[[], None]) -> T:
    """Return or raise what `act` does. Signal handlers of Python run at once. If one raises an
    exception, `hurry` is called, and the exception is raised when `act` is over."""
    return _with_handlers(act, _Hurrying(hurry))


class _Handlers:
    """Handlers in the place of all that Python has."""

    def __init__(self) -> None:
        self._before: dict[int, Callable[..., Any]] = {}
        self._active = True

    def replace(self) -> None:
        for number in range(1, signal.NSIG):
            before = getsignal(number)
            if callable(before):
                self._before[number] = before
                signal.signal(number, self._handle)

    def put_back(self) -> None:
        """Let signals have their handlers again. One that raises meanwhile does not change that."""
        self._active = False
        try:
            for number, before in self._before.items():
                if getsignal(number) == self._handle:  # else it was changed meanwhile
                    signal.signal(number, before)
        except BaseException:
            self.put_back()
            raise

    def finish(self) -> None:
        """Do what was put off. Raises what a handler raises, or has raised."""
        raise NotImplementedError

    def _handle(self, number: int, frame: Any) -> None:
        if self._active:
            self._take(number, frame)
        else:
            self._before[number](number, frame)

    def _take(self, number: int, frame: Any) -> None:
        raise NotImplementedError


class _Waiting(_Handlers):
    """They note signals, whose own handlers `finish` calls."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: dict[int, Any] = {}

    def finish(self) -> None:
        while self._noted:
            number, frame = self._noted.popitem()
            try:
                self._before[number](number, frame)
            except BaseException:
                self.finish()
                raise

    def _take(self, number: int, frame: Any) -> None:
        self._noted[number] = frame


class _Hurrying(_Handlers):
    """They call the handlers before them, and keep the first exception for `finish`."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        super().__init__()
        self._hurry = hurry
        self._raised: list[BaseException] = []

    def finish(self) -> None:
        if self._raised:
            raise self._raised.pop(0)

    def _take(self, number: int, frame: Any) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as fault:
            self._raised.append(fault)
            self._hurry()


def _with_handlers(act: Callable[[], T], handlers: _Handlers) -> T:
    if threading.current_thread() is not threading.main_thread():
        return act()
    try:
        handlers.replace()
        return act()
    finally:
        try:
            handlers.put_back()
        finally:
            handlers.finish()
