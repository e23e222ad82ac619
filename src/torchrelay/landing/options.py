"""How a state is put into a destination: the arguments of `recv` and `load`, as one record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchrelay.errors import UsageError
from torchrelay.landing.checks.shards import Shards


def checked_device(device: torch.device | str | None) -> torch.device | None:
    """The device that a caller names; `UsageError` where torch has none like it."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as fault:
        raise UsageError(f"device is one of torch's, not {device!r}: {fault}") from None


@dataclass(frozen=True)
class LandingOptions:
    """`strict`: paths on one side alone are refused. `atomic`: the caller's tensors are old or new.
    `device`: where new tensors go, by default to the kind of device that they come from.

    `shards` says which distributed tensors may be made as they were sent. `make_missing`: leaves
    that the destination lacks are made, and the state is a new tree of the offered containers
    around the caller's tensors and the new ones. `rank` is this process in its group.

    Bytes are `staged` until the landing commits, if it is atomic. A load that checks digests
    first may write into place without that, and keeps the promise of `atomic` itself.
    """

    strict: bool = True
    atomic: bool = True
    device: torch.device | None = None
    shards: Shards = "own"
    make_missing: bool = False
    rank: int = 0
    unstaged: bool = False

    @property
    def staged(self) -> bool:
        return self.atomic and not self.unstaged
