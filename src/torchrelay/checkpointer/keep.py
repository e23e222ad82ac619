"""Which steps stay. Small policies, combined with `|`: a step stays if any of them wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.errors import UsageError


class Keep:
    """Says which of the good steps stay. The newest always does."""

    def wanted(self, steps: Sequence[int]) -> set[int]:
        """Of `steps`, in ascending order, those that stay."""
        raise NotImplementedError

    def __or__(self, other: Keep) -> Keep:
        return _Either(self, other)


@dataclass(frozen=True)
class _Either(Keep):
    one: Keep
    other: Keep

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return self.one.wanted(steps) | self.other.wanted(steps)


@dataclass(frozen=True)
class KeepAll(Keep):
    """Nothing is ever removed."""

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return set(steps)


@dataclass(frozen=True)
class KeepLast(Keep):
    """The newest `count` steps."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"KeepLast keeps at least one step, not {self.count}")

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return set(steps[-self.count :])


@dataclass(frozen=True)
class KeepEvery(Keep):
    """Steps that are a multiple of `interval`."""

    interval: int

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise UsageError(f"KeepEvery takes a positive interval, not {self.interval}")

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return {step for step in steps if step % self.interval == 0}
