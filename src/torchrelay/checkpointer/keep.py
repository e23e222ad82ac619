"""Which steps stay. Small policies, combined with `|`: a step stays if any of them wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrelay.errors import UsageError


class Keep:
    """Says which of the intact steps stay. The newest always does."""

    def wanted(self, steps: Sequence[int]) -> set[int]:
        """Of `steps`, in ascending order, those that stay."""
        raise NotImplementedError

    def most(self) -> int | None:
        """The number of steps that stay at most; None if there is no bound."""
        return None

    def __or__(self, other: Keep | int) -> Keep:
        return _Either(self, policy(other))


def policy(keep: Keep | int | None) -> Keep:
    """The policy that a caller means by `keep`: one, a number of steps, or None for all steps."""
    if keep is None:
        return KeepAll()
    if type(keep) is int:
        return KeepLast(keep)
    if not isinstance(keep, Keep):
        raise UsageError(f"keep is a policy such as KeepLast(3), or a number, not {keep!r}")
    return keep


@dataclass(frozen=True)
class _Either(Keep):
    one: Keep
    other: Keep

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return self.one.wanted(steps) | self.other.wanted(steps)

    def most(self) -> int | None:
        one, other = self.one.most(), self.other.most()
        return None if one is None or other is None else one + other

    def __repr__(self) -> str:
        return f"{self.one!r} | {self.other!r}"


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
        if type(self.count) is not int or self.count < 1:
            raise UsageError(f"KeepLast keeps at least one step, not {self.count!r}")

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return set(steps[-self.count :])

    def most(self) -> int | None:
        return self.count


@dataclass(frozen=True)
class KeepEvery(Keep):
    """Steps that are a multiple of `interval`."""

    interval: int

    def __post_init__(self) -> None:
        if type(self.interval) is not int or self.interval < 1:
            raise UsageError(f"KeepEvery takes a positive interval, not {self.interval!r}")

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return {step for step in steps if step % self.interval == 0}
