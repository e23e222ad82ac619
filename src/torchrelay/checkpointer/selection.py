"""Patterns of dotted paths, as `only=` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torchrelay.errors import MismatchError
from torchrelay.plan.outline import dotted
from torchrelay.state.tree import slots
from torchrelay.stores.records import Checkpoint

_SHOWN = 8


def check_only(record: Checkpoint, patterns: Sequence[str]) -> None:
    """Raise `MismatchError` for a pattern that no path of any rank matches; it names near keys."""
    if not patterns:
        return
    paths = {dotted(path) for outline in record.outlines for path, _ in slots(outline.tree)}
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise MismatchError(
                f"only={pattern!r} matches nothing in the step; {_near(pattern, paths)}",
                step=record.step,
            )


def _near(pattern: str, paths: set[str]) -> str:
    asked = pattern.rstrip("*").rstrip(".")
    keys = {".".join(path.split(".")[: asked.count(".") + 1]) for path in paths}
    near = get_close_matches(asked, sorted(keys | paths), _SHOWN, 0.6)
    if near:
        return f"near it: {', '.join(near)}"
    tops = sorted({path.partition(".")[0] for path in paths})
    return f"its keys: {', '.join(tops[:_SHOWN])}" + (" ..." if len(tops) > _SHOWN else "")
