"""Paths of a step: patterns that select some of them, and hints about paths that are missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from torchrelay.arguments import matches
from torchrelay.errors import MismatchError
from torchrelay.planning.selection import Texts
from torchrelay.record.schema import Record
from torchrelay.state.tree import show, slots

_SHOWN = 8
_COMPARED = 2048  # keys that a pattern is compared with to find a similar one
_LONGEST = 200  # characters of a key that is


def check_include(record: Record, patterns: Sequence[str]) -> None:
    """Raise `MismatchError` for a pattern that matches no path of any rank; it names similar
    keys."""
    left = list(patterns)
    for name in _names(record) if left else ():
        left = [pattern for pattern in left if not matches(name, [pattern])]
        if not left:
            return
    if left:
        raise MismatchError(
            f"include={left[0]!r} matches nothing in the step; {_similar(left[0], record)}",
            step=record.step,
        )


def _names(record: Record) -> Iterator[str]:
    texts = Texts(sum(outline.leaves for outline in record.outlines))
    for outline in record.outlines:
        for path, _ in slots(outline.tree):
            yield texts.of(path)


def _similar(pattern: str, record: Record) -> str:
    wanted = pattern.rstrip("*").rstrip(".")
    depth = wanted.count(".") + 1
    tops: set[str] = set()
    keys: set[str] = set()
    for name in _names(record):
        tops.add(name.partition(".")[0][:_LONGEST])
        for key in (".".join(name.split(".", depth)[:depth]), name):
            if len(keys) < _COMPARED and len(key) <= _LONGEST:
                keys.add(key)
    similar = get_close_matches(wanted[:_LONGEST], sorted(keys), _SHOWN, 0.6)
    if similar:
        return f"similar: {', '.join(similar)}"
    return f"its keys: {', '.join(sorted(tops))}"


def add_savers(fault: MismatchError, record: Record, rank: int) -> None:
    """Have a mismatch say which ranks saved its path, if this one did not."""
    if fault.path is None or len(record.ranks) < 2:
        return
    has_path = [
        any(show(path) == fault.path for path, _ in slots(outline.tree))
        for outline in record.outlines
    ]
    savers = [saver for saver, number in enumerate(record.ranks) if has_path[number]]
    if not savers or rank in savers or len(savers) == len(record.ranks):
        return
    who = f"rank {savers[0]}" if len(savers) == 1 else f"ranks {', '.join(map(str, savers[:8]))}"
    fault.message += (
        f"; only {who} saved {fault.path}: save it on every rank, or leave it out of `into` on the "
        "others"
    )
