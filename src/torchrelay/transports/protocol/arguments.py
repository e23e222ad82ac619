"""What callers hand in, checked before anything is taken from a group."""

from __future__ import annotations

import torch

from torchrelay.errors import UsageError


def check_step(step: object) -> None:
    if step is not None and (type(step) is not int or not 0 <= step < 1 << 62):
        raise UsageError(f"step is a whole number from 0, not {step!r}")


def device_of(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as fault:
        raise UsageError(f"device is one of torch's, not {device!r}: {fault}") from None
