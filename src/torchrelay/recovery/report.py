"""What a recovery returns, and how it explains itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class SourceAccount(NamedTuple):
    """What came of one source on this rank: its newest step, if it has one, and why it was taken
    or not. `estimated`: seconds that it would take, where several had the step."""

    name: str
    newest: int | None
    outcome: str
    estimated: float | None = None

    def __str__(self) -> str:
        step = "no step" if self.newest is None else f"step {self.newest}"
        spent = "" if self.estimated is None else f", about {self.estimated:.2g} s"
        return f"{self.name}: {step}{spent}; {self.outcome}"


@dataclass(frozen=True)
class RecoveryReport:
    """How a recovery went on this rank."""

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
