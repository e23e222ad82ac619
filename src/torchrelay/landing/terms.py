"""On which terms a state is landed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchrelay.errors import UsageError
from torchrelay.landing.checks.shards import Shards


def checked_device(device: torch.device | str | None) -> torch.device | None:
    """The device that a caller names; `UsageError` where torch has none like it."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as fault:
        raise UsageError(f"device is one of torch's, not {device!r}: {fault}") from None


class Terms(NamedTuple):
    """`atomic`: the caller's tensors are old or new. `staged`: their bytes are held back until
    `commit`; without it whoever brings them writes them, and answers for what `atomic` says."""

    strict: bool = True
    atomic: bool = True
    staged: bool = True
    device: torch.device | None = None
    rank: int = 0
    make_missing: bool = False
    shards: Shards = "own"
