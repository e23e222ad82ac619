"""How far a transfer has come, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torchrelay.errors import UsageError


class Progress(NamedTuple):
    """Bytes of the state that have gone out or come in, of all."""

    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


def reporter(progress: ProgressCallback | None) -> Callable[[int, int], None]:
    if progress is None:
        return untold
    if not callable(progress):
        raise UsageError(f"progress is a function of a Progress, not {progress!r}")
    return lambda done, total: progress(Progress(done, total))


def untold(done: int, total: int) -> None:
    """Progress that nobody asked for."""
