"""What callers hand in, checked before anything is taken from a group."""

from __future__ import annotations

import torch

from torchrelay.errors import UsageError


def device_of(device: torch.device | str | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as fault:
        raise UsageError(f"device is one of torch's, not {device!r}: {fault}") from None
