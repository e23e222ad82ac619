"""Run the route conformance suite and write its table: `python -m tests.conformance.routes`.

The suite is every test that is parametrized by way (`tests/support/ways.py`): the same test for
each route, with nothing but the way forced. `--quick` leaves out what the daily suite leaves out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.ways import WAYS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "routes.md"
BEGIN, END = "<!-- conformance -->\n", "<!-- end of conformance -->\n"

CASES = {
    "exact: states of every kind, new tensors and in place, atomic and not": (
        "tests/relay/test_properties.py",
        "tests/record/test_columns.py",
    ),
    "several receivers": ("tests/relay/test_fanout.py",),
    "transfers at once": ("tests/relay/test_concurrency.py",),
    "one after the other: refusals, deadlines, changed bytes, what is left": (
        "tests/relay/test_sequences.py",
        "tests/transports/routes/test_choice.py",
    ),
    "a peer is killed or stopped, at each phase": (
        "tests/faults/test_relay_faults.py",
        "tests/faults/test_unknown_outcomes.py",
    ),
    "a call is interrupted": ("tests/faults/test_interrupts.py",),
    "faults of the transports that were there before": ("tests/known_faults/test_live.py",),
}
"""Files of the suite, by what they are about."""


def way_of(item: str) -> str:
    """The way that a test takes, by its name; empty where it takes none or several."""
    found = re.search(r"\[(.*)\]", item)
    words = re.split(r"[-_\s]", found[1]) if found else []
    return next((way for way in WAYS if way in words), "")


class Count:
    """What became of each test, by case and way."""

    def __init__(self, *, quick: bool) -> None:
        self._quick = quick
        self.good: Counter[tuple[str, str]] = Counter()
        self.all: Counter[tuple[str, str]] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: Any) -> None:
        chosen = [item for item in items if self._wanted(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    def _wanted(self, item: pytest.Item) -> bool:
        slow = item.get_closest_marker("slow") is not None
        return bool(way_of(item.nodeid)) and not (self._quick and slow)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        file = report.nodeid.partition("::")[0]
        case = next(case for case, files in CASES.items() if file in files)
        self.all[case, way_of(report.nodeid)] += 1
        self.good[case, way_of(report.nodeid)] += report.passed


def table(count: Count) -> str:
    head = f"| | {' | '.join(f'`{way}`' for way in WAYS)} |\n|---|{'---|' * len(WAYS)}\n"
    rows = []
    for case in CASES:
        cells = [
            f"{count.good[case, way]} of {count.all[case, way]}" if count.all[case, way] else "-"
            for way in WAYS
        ]
        rows.append(f"| {case} | {' | '.join(cells)} |\n")
    return head + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tests of the daily suite alone")
    parser.add_argument("--dry", action="store_true", help="print the table, write no page")
    asked = parser.parse_args()
    count = Count(quick=asked.quick)
    files = [str(ROOT / file) for files in CASES.values() for file in files]
    marks = ["-m", "slow or not slow"]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *marks, *files], plugins=[count])
    found = table(count)
    print(found)
    if not asked.dry:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}{found}{END}{after}", encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
