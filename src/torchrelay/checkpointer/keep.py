"""Which steps stay. Small policies, combined with `|`: a step stays if any of them wants it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchrelay.errors import UsageError
from torchrelay.pending import logger

MAX_METRICS = 1000

Metrics = Mapping[int, Mapping[str, float]]  # by step, those that were passed to its save


class Keep:
    """Says which of the intact steps stay. The newest always does."""

    def wanted(self, steps: Sequence[int]) -> set[int]:
        """Of `steps`, in ascending order, those that stay."""
        raise NotImplementedError

    def wanted_with(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        """The same, for a policy that looks at the metrics of steps."""
        return self.wanted(steps)

    def most(self) -> int | None:
        """The largest number of steps that the policy retains; None if unbounded."""
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


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """The finite metrics of a save. Raises `UsageError` for a value that is not a number. A value
    that is not finite is dropped with a warning, so that a NaN loss does not cost the step."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise UsageError(
            f"metrics are at most {MAX_METRICS} numbers by name, such as {{'loss': 0.5}}"
        )
    found = {}
    for name, value in metrics.items():
        number = _number(value)
        if not _is_text(name) or number is None:
            raise UsageError(
                f"a metric is a number with a name that can be written, not {_shown(name)}: "
                f"{_shown(value)}"
            )
        if math.isfinite(number):
            found[name] = number
        else:
            logger.warning("metric %s is %s, and is not saved", name, number)
    return found


def _number(value: object) -> float | None:
    """A number, also one in a tensor or an array of one element."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number that no float comes near
        return math.inf
    except Exception:  # of the code of any type
        return None


def _is_text(name: object) -> bool:
    """Whether a name can be written: lone surrogates cannot."""
    try:
        return isinstance(name, str) and bool(name.encode() or True)
    except UnicodeEncodeError:
        return False


def _shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except Exception:  # of the code of any type; a number may have too many digits
        return f"a {type(value).__name__}"


def _check_positive(rule: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{rule}, not {value!r}")


@dataclass(frozen=True)
class _Either(Keep):
    one: Keep
    other: Keep

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return self.one.wanted(steps) | self.other.wanted(steps)

    def wanted_with(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        return self.one.wanted_with(steps, metrics) | self.other.wanted_with(steps, metrics)

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
        _check_positive("KeepLast keeps at least one step", self.count)

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return set(steps[-self.count :])

    def most(self) -> int | None:
        return self.count


@dataclass(frozen=True)
class KeepEvery(Keep):
    """Steps that are a multiple of `interval`."""

    interval: int

    def __post_init__(self) -> None:
        _check_positive("KeepEvery takes a positive interval", self.interval)

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return {step for step in steps if step % self.interval == 0}


@dataclass(frozen=True)
class KeepBest(Keep):
    """The `k` steps with the lowest (`mode="min"`) or highest value of a metric, as
    `save(metrics={...})` had it; of equal ones the newest. A step without the metric is none of
    them, so combine it with `KeepLast`: a job resumes from the newest step, not from the best."""

    metric: str
    k: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_positive("KeepBest keeps at least one step", self.k)
        if self.mode not in ("min", "max"):
            raise UsageError(f"mode is 'min' or 'max', not {self.mode!r}")

    def wanted(self, steps: Sequence[int]) -> set[int]:
        return self.wanted_with(steps, {})

    def wanted_with(self, steps: Sequence[int], metrics: Metrics) -> set[int]:
        sign = 1 if self.mode == "min" else -1
        values = {step: metrics.get(step, {}).get(self.metric) for step in steps}
        ranked = sorted(
            (sign * value, -step) for step, value in values.items() if value is not None
        )
        return {-negated for _, negated in ranked[: self.k]}

    def most(self) -> int | None:
        return self.k + 1  # and the newest
