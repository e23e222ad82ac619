"""Steps: the numbers that states are known by, of one range for everything that takes one."""

from __future__ import annotations

from torchrelay.errors import UsageError

MAX_STEP = (1 << 63) - 1


def check_step(step: object) -> None:
    """`UsageError` unless it is one."""
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise UsageError(f"step is an int from 0 to {MAX_STEP}, not {step!r}")
