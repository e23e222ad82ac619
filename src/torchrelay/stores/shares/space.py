"""Whether a step fits on its medium. Pure."""

from __future__ import annotations

from typing import NamedTuple

from torchrelay.errors import CheckpointError

HEADROOM = 1 << 20  # bytes kept free in addition to the data: commit record, directory


class Space(NamedTuple):
    """The free bytes of a store, and how many steps its policy retains at most."""

    free: int | None  # None: unlimited
    url: str
    policy: str
    retained: int | None  # None: it may be any number

    def check(self, nbytes: int) -> None:
        """`CheckpointError` if a step with that many bytes of data does not fit."""
        need = nbytes + HEADROOM
        if self.free is None or self.free >= need:
            return
        if self.retained is None:
            advice = f"keep={self.policy} allows steps that are never removed: free some space"
        else:
            total = (self.retained + 1) * nbytes
            advice = (
                f"keep={self.policy} retains {self.retained}, and a save writes one more before it "
                f"removes one, {total:,} bytes in all: free some space, or retain fewer steps"
            )
        raise CheckpointError(
            f"no space: the step takes {need:,} bytes and {self.free:,} are free, "
            f"{need - self.free:,} are missing; {advice}",
            file=self.url,
        )
