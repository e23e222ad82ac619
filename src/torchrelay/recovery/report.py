"""The result of a recovery, and how it explains itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SourceAccount(NamedTuple):
    """What became of one source on this rank: its newest step, if it has one, and why it was taken
    or not."""

    name: str
    newest: int | None
    outcome: str

    def __str__(self) -> str:
        step = "no step" if self.newest is None else f"step {self.newest}"
        return f"{self.name}: {step}; {self.outcome}"


@dataclass(frozen=True)
class RecoveryReport:
    """How a recovery ended on this rank."""

    source: str  # that the state came from, or most of it
    bytes: int
    sources: dict[str, int]  # bytes by source
    seconds: dict[str, float] = field(default_factory=dict)
    accounts: tuple[SourceAccount, ...] = ()
    missing: tuple[str, ...] = ()  # stored, not in the destination (strict=False)
    extra: tuple[str, ...] = ()  # in the destination, not stored (strict=False)

    def explain(self) -> str:
        """A line for each source, and the seconds of each phase."""
        phases = ", ".join(f"{phase} {spent:.3g} s" for phase, spent in self.seconds.items())
        return "\n".join([*map(str, self.accounts), f"in all: {phases}"])


class Recovered(NamedTuple):
    """What `recover` returns: the state, its step, and how it went."""

    state: Any
    step: int
    report: RecoveryReport
