"""Commands that look into one state: inspect, verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from torchrelay.cli.output import (
    JSON,
    count,
    fail,
    in_words,
    plain,
    print_columns,
    print_json,
    progress_bar,
    size,
    wrong,
)
from torchrelay.cli.sources import SOURCE, STEP, instead, is_url, opened_source, state_kind
from torchrelay.errors import CheckpointError, DigestError, ManifestError, UsageError
from torchrelay.progress import Bar

if TYPE_CHECKING:
    from torchrelay.inspection.opened_state import Contents, OpenedState
    from torchrelay.stores.reading.chunks import VerifiedFiles

INCLUDE = typer.Option([], "--include", help="Only paths that match a pattern, such as 'model.*'.")


def inspect(
    source: str = SOURCE,
    step: int | None = STEP,
    include: list[str] = INCLUDE,
    stats: bool = typer.Option(
        False, "--stats", help="Read the values: norm, minimum, maximum, number of NaNs."
    ),
    shards: bool = typer.Option(False, "--shards", help="Show each rank's part of each tensor."),
    as_json: bool = JSON,
) -> None:
    """Show a state as a tree: shapes, dtypes, sizes, and which ranks hold which part."""
    with opened_source(source, step) as state:
        from torchrelay.cli.tree import tree_rows
        from torchrelay.inspection.facts import state_facts
        from torchrelay.inspection.parameter_names import parameter_names

        (chosen,) = matched(include, state)
        facts = state_facts(chosen, parameter_names(state.contents.values))
        if stats:
            _add_statistics(state, chosen, facts)
        if as_json:
            print_json({"source": state.name, **facts})
            return
        print_columns(tree_rows(facts, shards=shards))
        _print_totals(chosen, facts["bytes"])


def matched(
    patterns: Sequence[str], *states: OpenedState, option: str = "--include"
) -> list[Contents]:
    """The paths of each state that match; `UsageError` for patterns that match none in any."""
    from torchrelay.inspection.facts import narrowed

    chosen = [narrowed(state.contents, patterns) for state in states]
    if patterns and not any(one.tensors or one.values or one.aliases for one in chosen):
        tensors = (tensor for state in states for tensor in state.contents.tensors)
        tops = sorted({tensor.name.partition(".")[0] for tensor in tensors})
        raise UsageError(f"{option} {patterns[0]} matches no path; the state has {', '.join(tops)}")
    return chosen


def _add_statistics(state: OpenedState, chosen: Contents, facts: dict[str, Any]) -> None:
    from torchrelay.inspection.statistics import statistics

    with progress_bar("reading") as show:
        bar = Bar(show, facts["bytes"])
        for tensor, about in zip(chosen.tensors, facts["tensors"], strict=True):
            numbers = statistics(state, tensor)
            about["stats"] = None if numbers is None else asdict(numbers)
            bar.add(about["bytes"])


def _print_totals(contents: Contents, nbytes: int) -> None:
    step = "" if contents.step is None else f"step {contents.step}: "
    values = f", {count(len(contents.values), 'value')}" if contents.values else ""
    files = len({volume.name for volume in contents.volumes})
    ranks = f", saved by {contents.ranks} ranks" if contents.ranks > 1 else ""
    print(
        f"{step}{count(len(contents.tensors), 'tensor')}, {size(nbytes)}{values}"
        f"; {count(files, 'file')}{ranks}"
    )


def verify(
    source: str = SOURCE,
    step: int | None = STEP,
    every: bool = typer.Option(False, "--all", help="Verify every step."),
    as_json: bool = JSON,
) -> None:
    """Read every byte of a state and check every digest. Exit status 1 if one is wrong."""
    if every and step is not None:
        raise UsageError("--step and --all exclude each other: give one of them")
    steps: list[int | None] = [*_steps(source)] if every else [step]
    known: VerifiedFiles = set()
    checked = [verified(source, wanted, alone=len(steps) == 1, known=known) for wanted in steps]
    if as_json:
        print_json(checked)
    for facts in [] if as_json else checked:
        what = f"step {facts['step']}" if "step" in facts else facts["source"]
        note = f", but {facts['note']}" if facts.get("note") else ""
        words = in_words(facts)
        print(plain(f"{what} is {words}" if words else f"{what} verifies{note}"))
    if any(map(in_words, checked)):
        raise typer.Exit(1)


def _steps(source: str) -> list[int]:
    from torchrelay.stores.locate import open_store

    if is_url(source) or state_kind(source) not in ("torchrelay", "dcp"):
        raise UsageError(
            f"--all is for a directory with steps, and {source} is one state: leave it out"
        )
    there = open_store(source)
    steps = there.steps()
    if not steps:
        fail(f"no steps in {there.url}{instead(source)}")
    return steps


def verified(
    source: str, step: int | None, *, alone: bool = False, known: VerifiedFiles | None = None
) -> dict[str, Any]:
    """The result for one state, after every byte was read. A state that cannot be read raises if it
    is `alone`; one of several does not hide the others. Files in `known` are not read again."""
    found = step
    found_wrong: dict[str, str | None] = {"damage": None, "unread": None}
    note = ""
    try:
        with opened_source(source, step) as state:
            found = state.contents.step
            with progress_bar("verifying" if found is None else f"verifying step {found}") as show:
                note = state.verify(show, known)
    except (CheckpointError, DigestError, ManifestError) as fault:
        found_wrong = wrong(fault)
        if alone and found_wrong["damage"] is None:
            raise
        found = fault.step if found is None else found
    if found is not None:
        return {"step": found, **found_wrong}
    return {"source": source, **found_wrong, "note": note}
