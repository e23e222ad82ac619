"""The result of a check: one row for each thing that was looked at, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "slow", "problem"]
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    - `verdict`: "ok"; "slow": everything holds, at a cost that the remedy avoids; "problem": a
      promise of the library does not hold here.
    - `found`: what was seen, with its figures.
    - `remedy`: what to do about it; empty if the verdict is "ok".
    """

    area: str
    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def exit_status(rows: Sequence[Finding]) -> int:
    """1 if there is a problem, else 0."""
    return int(any(row.verdict == "problem" for row in rows))


def as_json(rows: Sequence[Finding]) -> str:
    return json.dumps(
        {"ok": not exit_status(rows), "rows": [asdict(row) for row in rows]}, indent=2
    )


def as_text(rows: Sequence[Finding]) -> str:
    """The table for people: areas as headings, and the remedy below each row that has one."""
    subjects = max((len(row.subject) for row in rows), default=0)
    lines, area = [], ""
    for row in rows:
        if row.area != area:
            area = row.area
            lines += ["", area]
        lines.append(f"  {row.verdict:<7}  {row.subject:<{subjects}}  {row.found}".rstrip())
        if row.remedy:
            lines.append(f"           -> {row.remedy}")
    counts = dict.fromkeys(("ok", "slow", "problem"), 0)
    for row in rows:
        counts[row.verdict] += 1
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.items())]
    return "\n".join(lines).lstrip("\n")
