"""The command that compares two states: diff."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from torchrelay.arguments import matches
from torchrelay.cli.commands.contents import INCLUDE, matched
from torchrelay.cli.output import JSON, count, print_columns, print_json, progress_bar
from torchrelay.cli.sources import SOURCE, opened_source
from torchrelay.progress import Bar

if TYPE_CHECKING:
    from torchrelay.inspection.comparison import Differences, Distance
    from torchrelay.inspection.opened_state import OpenedState

FROZEN = typer.Option(
    [], "--expect-frozen", help="Fail if a path that matches, such as 'backbone.*', changed."
)
SHOWN = 4  # paths in a line
DIFFERENT = 1  # an exit status, as diff(1) has it


def diff(
    before: str = SOURCE,
    after: str = SOURCE,
    include: list[str] = INCLUDE,
    values: bool = typer.Option(False, "--values", help="Compare the values, too."),
    frozen: list[str] = FROZEN,
    as_json: bool = JSON,
) -> None:
    """Show the differences between two states.

    Exit status 0: equal; 1: different; 2: one of them cannot be read. Without --values, tensors of
    the same shape and dtype count as equal. With --expect-frozen, exit status 1 means that paths
    of these patterns changed in any bit, and other paths may.
    """
    with opened_source(before) as one, opened_source(after) as other:
        from torchrelay.inspection.comparison import compare, thawed

        found = compare(*matched(include, one, other))
        matched(frozen, one, other, option="--expect-frozen")
        compared = found.same if values else [path for path in found.same if matches(path, frozen)]
        distance = _distances(one, other, compared)
        differing = [tensor.path for tensor in distance if tensor.differing]
        changed = thawed(found, frozen) + [path for path in differing if matches(path, frozen)]
        if as_json:
            facts = {"distances": list(map(asdict, distance))} if values or frozen else {}
            print_json({**asdict(found), **facts, **({"thawed": changed} if frozen else {})})
        else:
            _print(found, distance, bool(values or frozen))
            if frozen:
                print(f"{count(len(changed), 'frozen path')} changed{_listed(changed)}")
        if changed if frozen else differing or not found.equal:
            raise typer.Exit(DIFFERENT)


def _listed(paths: Sequence[str]) -> str:
    more = ", ..." if len(paths) > SHOWN else ""
    return f": {', '.join(paths[:SHOWN])}{more}" if paths else ""


def _distances(one: OpenedState, other: OpenedState, names: Sequence[str]) -> list[Distance]:
    from torchrelay.inspection.comparison import distance
    from torchrelay.inspection.facts import nbytes_of

    before = {tensor.name: tensor for tensor in one.contents.tensors}
    after = {tensor.name: tensor for tensor in other.contents.tensors}
    differing = []
    with progress_bar("comparing") as show:
        bar = Bar(show, sum(nbytes_of(before[name]) for name in names))
        for name in names:
            differing.append(distance((one, before[name]), (other, after[name])))
            bar.add(nbytes_of(before[name]))
    return differing


def _print(found: Differences, distance: list[Distance], values: bool) -> None:
    rows = [("-", path, "", "") for path in found.removed]
    rows += [("+", path, "", "") for path in found.added]
    rows += [("~", change.path, change.before, f"-> {change.after}") for change in found.changed]
    differing = [tensor for tensor in distance if tensor.differing]
    rows += [
        ("~", tensor.path, f"{tensor.differing} of {tensor.elements} elements", _distance(tensor))
        for tensor in differing
    ]
    print_columns(rows)
    words = f"{len(found.added)} added, {len(found.removed)} removed, {len(found.changed)} changed"
    if values:
        words += f"; values differ in {len(differing)} of {count(len(distance), 'tensor')}"
    else:
        verb = "has" if len(found.same) == 1 else "have"
        words += f"; {count(len(found.same), 'tensor')} {verb} the same shape and dtype"
    print(words)


def _distance(tensor: Distance) -> str:
    if tensor.largest is None:
        return "differ"
    relative = "" if tensor.relative is None else f", {tensor.relative:.3g} of the norm"
    return f"by at most {tensor.largest:.3g}{relative}"
