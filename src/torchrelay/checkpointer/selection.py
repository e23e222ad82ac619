"""Patterns of dotted paths, as `only=` takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torchrelay.errors import MismatchError
from torchrelay.plan.selection import Texts
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.state.tree import slots

_SHOWN = 8
_COMPARED = 2048  # keys that a pattern is compared with to find one like it
_LONGEST = 200  # characters of a key that is


def check_only(record: Checkpoint, patterns: Sequence[str]) -> None:
    """Raise `MismatchError` for a pattern that no path of any rank matches; it names near keys."""
    left = list(patterns)
    for name in _names(record) if left else ():
        left = [pattern for pattern in left if not fnmatchcase(name, pattern)]
        if not left:
            return
    if left:
        raise MismatchError(
            f"only={left[0]!r} matches nothing in the step; {_near(left[0], record)}",
            step=record.step,
        )


def _names(record: Checkpoint) -> Iterator[str]:
    texts = Texts(sum(len(outline.leaves) for outline in record.outlines))
    for outline in record.outlines:
        for path, _ in slots(outline.tree):
            yield texts.of(path)


def _near(pattern: str, record: Checkpoint) -> str:
    asked = pattern.rstrip("*").rstrip(".")
    depth = asked.count(".") + 1
    tops: set[str] = set()
    keys: set[str] = set()
    for name in _names(record):
        tops.add(name.partition(".")[0])
        for key in (".".join(name.split(".", depth)[:depth]), name):
            if len(keys) < _COMPARED and len(key) <= _LONGEST:
                keys.add(key)
    if asked in keys and asked == pattern:
        return f"what is in it: only={asked + '.*'!r}"
    near = get_close_matches(asked[:_LONGEST], sorted(keys), _SHOWN, 0.6)
    if near:
        return f"near it: {', '.join(near)}"
    shown = [top[:_LONGEST] for top in sorted(tops)[:_SHOWN]]
    return f"its keys: {', '.join(shown)}" + (" ..." if len(tops) > _SHOWN else "")
