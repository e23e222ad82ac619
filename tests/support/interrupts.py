"""Exceptions out of nowhere, as a signal handler raises them: at any line of the main thread."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torchrelay

ROOT = str(Path(torchrelay.__file__).parent)

Line = tuple[str, int]
SIGNAL = signal.SIGUSR2


class Interrupt(KeyboardInterrupt):
    """Told apart from a Ctrl-C of whoever runs the tests."""


def lines_of(act: Callable[[], Any], parts: tuple[str, ...]) -> list[Line]:
    """The lines of the library that a call runs through, in `parts` of it, each once."""
    seen: dict[Line, None] = {}
    _traced(act, parts, seen.setdefault)
    return list(seen)


def interrupted(act: Callable[[], Any], parts: tuple[str, ...], line: Line, nth: int = 1) -> bool:
    """Call with a signal, whose handler raises an `Interrupt`, before a line is run for the nth
    time; whether it came to that line.

    What the call makes of it, or returns without it, is dropped.
    """
    left = nth

    def raise_there(at: Line) -> None:
        nonlocal left
        if at == line:
            left -= 1
            if left == 0:
                signal.raise_signal(SIGNAL)

    try:
        with raising(Interrupt):
            _traced(act, parts, raise_there)
    except (Interrupt, torchrelay.errors.RelayError):
        pass
    return left <= 0


@contextmanager
def raising(kind: type[BaseException]) -> Iterator[None]:
    """Within: the handler of `SIGNAL` raises such an exception."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise kind

    before = signal.signal(SIGNAL, handler)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)


def _traced(act: Callable[[], Any], parts: tuple[str, ...], see: Callable[[Line], Any]) -> None:
    prefixes = tuple(f"{ROOT}/{part}" for part in parts)

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            see((frame.f_code.co_filename[len(ROOT) + 1 :], frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(prefixes) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """Within: Ctrl-C comes up in the main thread as `KeyboardInterrupt`, also where the tests were
    started in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def press_ctrl_c() -> None:
    """From any thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
