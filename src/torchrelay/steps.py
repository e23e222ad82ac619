"""Steps: the numbers that states are known by, of one range for everything that takes one, and
the times at which they were saved."""

from __future__ import annotations

from datetime import datetime
from numbers import Integral

from torchrelay.errors import UsageError

MAX_STEP = (1 << 63) - 1


def check_step(step: object) -> int:
    """The step as an int, also where it is one of numpy's; `UsageError` for anything else."""
    whole = isinstance(step, Integral) and not isinstance(step, bool)
    if not whole or not 0 <= step <= MAX_STEP:  # type: ignore[operator]
        raise UsageError(f"step is an int from 0 to {MAX_STEP}, not {step!r}")
    return int(step)  # type: ignore[call-overload, no-any-return]


def epoch_seconds(time: str) -> float | None:
    """The time of a record as seconds since 1970; None for text that is not a time."""
    try:
        found = datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo is not None else None
