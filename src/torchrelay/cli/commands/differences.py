"""The command that compares two states: diff."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from torchrelay.cli.commands.contents import INCLUDE, matched
from torchrelay.cli.output import JSON, count, print_columns, print_json, progress_bar
from torchrelay.cli.sources import SOURCE, opened_source
from torchrelay.progress import Bar

if TYPE_CHECKING:
    from torchrelay.inspection.comparison import Differences, Distance
    from torchrelay.inspection.opened_state import OpenedState

DIFFERENT = 1  # an exit status, as diff(1) has it


def diff(
    before: str = SOURCE,
    after: str = SOURCE,
    include: list[str] = INCLUDE,
    values: bool = typer.Option(False, "--values", help="Compare the values, too."),
    as_json: bool = JSON,
) -> None:
    """Show the differences between two states.

    Exit status 0: equal; 1: different; 2: one of them cannot be read. Without --values, tensors of
    the same shape and dtype count as equal.
    """
    with opened_source(before) as one, opened_source(after) as other:
        from torchrelay.inspection.comparison import compare

        found = compare(*matched(include, one, other))
        distance = _distances(one, other, found) if values else []
        if as_json:
            differing = {"distances": list(map(asdict, distance))} if values else {}
            print_json({**asdict(found), **differing})
        else:
            _print(found, distance, values)
        if not found.equal or any(tensor.differing for tensor in distance):
            raise typer.Exit(DIFFERENT)


def _distances(one: OpenedState, other: OpenedState, found: Differences) -> list[Distance]:
    from torchrelay.inspection.comparison import distance
    from torchrelay.inspection.facts import nbytes_of

    before = {tensor.name: tensor for tensor in one.contents.tensors}
    after = {tensor.name: tensor for tensor in other.contents.tensors}
    differing = []
    with progress_bar("comparing") as show:
        bar = Bar(show, sum(nbytes_of(before[name]) for name in found.same))
        for name in found.same:
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
