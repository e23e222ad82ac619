"""Which tests were skipped, and why: the end of every run lists the reasons.

With `--only-expected-skips` a run fails if a test was skipped for another reason than those below.
CI runs so: a package or program that CI lacks would otherwise hide a test that fails.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

OPTION = "--only-expected-skips"
EXPECTED = re.compile(
    r"GPU|CUDA"
    r"|^no such case: "  # two parameters of a test that do not meet
    r"|^no other torch: "  # one in an interpreter of its own, which few machines have
    r"|(ray|torchtitan|vllm|verl)\b.*(is|are) (not installed|missing)"
    r"|torchft's native part has wheels for x86_64 alone"
    r"|\b(vllm|verl|ray|torchtitan)\b.*No module named"
    r"|could not import '(vllm|verl|ray|torchtitan)\b"
)


def reason_of(report: Any) -> str:
    """The reason of a skipped test's report, without its place."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ").strip()


def unexpected(reports: Iterable[Any]) -> list[Any]:
    return [report for report in reports if not EXPECTED.search(reason_of(report))]


def summary(reports: Iterable[Any]) -> list[str]:
    """A line for each reason, the most frequent first."""
    counts = Counter(map(reason_of, reports))
    return [f"{count:5} {reason}" for reason, count in counts.most_common()]
