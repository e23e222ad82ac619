"""Wording that a reader stops at does not come back: in docs, docstrings, comments and messages.

Each pattern stands for a sentence that has been rewritten. Rewrite the sentence, not the word.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = 10  # findings in the source, for wording that is right in its place

PATTERNS = {
    r"\banew\b": "again; reshard",
    r"\bbeside\b": "next to; in addition to; in the background",
    r"\b(?:is|are|was|were|be) told\b": "receives; is notified",
    r"\b(?:is|are|was|were|be) had\b": "is available; is allocated",
    r"(?:^|[.;:] )Who(?:ever)? \w+ (?!.*\?)": "name the subject: the sender, a peer that",
    r"(?:^|[.;:] )What (?:is|was|an?|the|each|comes|came|goes|has|lies|cannot) (?!.*\?)": (
        "name the subject instead of a clause"
    ),
    r"(?:^|[.;:] )Those (?:that|which|who|of)\b": "name the subject",
    r"\bby itself\b": "automatically; alone",
    r"\bat hand\b": "available",
    r"\bas ever\b": "as usual",
    r"\bso many\b(?! that)": "that many; a number of",
    r"\blaps?\b": "run; iteration",
    r"\bdoors?\b": "API; entry point",
    r"\b(?:is|are) to (?:be|have)\b": "must be; should be",
    r"\bsees? to\b": "handle",
    r"\b(?:goes|go|went) on\b": "continues; resumes",
    r"\bnobody\b": "no one; name it",
    r"\bthereof\b|\bwherein\b|\bthereby\b|\bwhereby\b": "reword",
}
COMPILED = [(re.compile(pattern, re.M), better) for pattern, better in PATTERNS.items()]


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments, and strings with spaces, by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING and " " in token.string:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line.strip().strip("\"'")


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside of code."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line.strip())


def findings(text: str, suffix: str) -> list[str]:
    prose = python_prose(text) if suffix == ".py" else markdown_prose(text)
    return [
        f"{number}: {found[0].strip()!r} -> {better}"
        for number, line in prose
        for pattern, better in COMPILED
        for found in pattern.finditer(line)
    ]


def found_in(paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{finding}"
        for path in paths
        for finding in findings(path.read_text(encoding="utf-8"), path.suffix)
    ]


@pytest.mark.parametrize(
    ("text", "suffix", "count"),
    [
        ("# What was not hit can be had.\n", ".py", 2),
        ('"""Who comes first waits."""\n', ".py", 1),
        ('x = "copied beside training"\n', ".py", 1),
        ("beside = 1\n", ".py", 0),
        ("A save beside training.\n\n```text\nbeside\n```\n", ".md", 1),
        ("Read `beside`. What is a step?\n", ".md", 0),
        ("Whichever side calls first waits.\n", ".md", 0),
    ],
)
def test_patterns_find_what_they_should(text: str, suffix: str, count: int) -> None:
    assert len(findings(text, suffix)) == count


def test_source_and_examples() -> None:
    found = found_in(sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]))
    assert len(found) <= ALLOWED, "\n".join(found)


def test_module_pages() -> None:
    found = found_in(sorted((ROOT / "docs" / "modules").glob("*.md")))
    assert not found, "\n".join(found)
