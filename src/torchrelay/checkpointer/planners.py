"""Planners of the user's own, as they are handed in."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from torchrelay.errors import UsageError


def planners(
    given: SavePlanner | LoadPlanner | Iterable[SavePlanner | LoadPlanner] | None,
) -> tuple[SavePlanner | None, LoadPlanner | None]:
    """The planner for saves and that for loads, of one or both in any order."""
    several = () if given is None else given
    if isinstance(several, (SavePlanner, LoadPlanner)):
        several = (several,)
    save: SavePlanner | None = None
    load: LoadPlanner | None = None
    for planner in several:
        if isinstance(planner, SavePlanner) and save is None:
            save = planner
        elif isinstance(planner, LoadPlanner) and load is None:
            load = planner
        else:
            raise UsageError(f"planner takes a SavePlanner and a LoadPlanner, not {planner!r}")
    return save, load
