"""What was measured, and what it has to reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

Unit = Literal["GB/s", "seconds", "bytes"]


@dataclass(frozen=True)
class Entry:
    """One tool in one row. `laps` are seconds, or bytes in a row of bytes."""

    name: str
    laps: list[float]
    first: float | None = None  # the lap that is not counted
    exact: bool | None = None  # None: this row does not look
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return median(self.laps)


@dataclass(frozen=True)
class Bar:
    """How one entry has to compare with another: times as fast at least, or as much at most."""

    ours: str
    other: str | None = None  # None: `most` is bytes
    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        if self.least is not None:
            return f">= {self.least:g}x {self.other}"
        if self.other is not None:
            return f"<= {self.most:g}x {self.other}"
        return f"<= {(self.most or 0) / 1e6:,.0f} MB"


class Verdict(NamedTuple):
    ours: str
    text: str
    value: float
    passed: bool


@dataclass(frozen=True)
class Row:
    key: str
    title: str
    unit: Unit
    state_bytes: int
    entries: list[Entry]
    bars: Sequence[Bar] = ()
    note: str = ""

    def entry(self, name: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.name == name), None)

    def ratio(self, entry: Entry) -> float:
        """Times as fast, or as little, as the first entry."""
        return self.entries[0].value / entry.value

    def verdicts(self) -> list[Verdict]:
        found = []
        for bar in self.bars:
            ours = self.entry(bar.ours)
            other = None if bar.other is None else self.entry(bar.other)
            if ours is None or (bar.other is not None and other is None):
                continue  # a tool that is not installed
            if other is None:
                value = ours.value
            elif bar.least is not None:
                value = other.value / ours.value
            else:
                value = ours.value / other.value
            passed = value >= bar.least if bar.least is not None else value <= (bar.most or 0)
            found.append(Verdict(bar.ours, str(bar), value, passed))
        return found

    @property
    def exact(self) -> bool:
        return all(entry.exact is not False for entry in self.entries)


def record(row: Row) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for entry in row.entries:
        one: dict[str, Any] = {
            "name": entry.name,
            "median": round(entry.value, 6),
            "laps": [round(lap, 6) for lap in entry.laps],
            "ratio": round(row.ratio(entry), 3),
        }
        if row.unit == "GB/s":
            one["GB/s"] = round(row.state_bytes / entry.value / 1e9, 3)
        if entry.first is not None:
            one["first"] = round(entry.first, 6)
        if entry.exact is not None:
            one["bit_exact"] = entry.exact
        if entry.phases:
            one["phases"] = {name: round(value, 6) for name, value in entry.phases.items()}
        found.append(one)
    return {
        "key": row.key,
        "title": row.title,
        "unit": row.unit,
        "state_bytes": row.state_bytes,
        "note": row.note,
        "entries": found,
        "bars": [
            {"name": v.ours, "bar": v.text, "value": round(v.value, 3), "passed": v.passed}
            for v in row.verdicts()
        ],
    }
