"""Arguments of a `Checkpointer`, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torchrelay.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

_MIN_BUDGET = 16 << 20
RETRIES = 2  # of an asynchronous save whose failure stops nothing


def checked_retries(retries: int | None, on_busy: str, on_error: str, stage: str) -> int:
    """How often a save is tried again; `UsageError` where a word is none that there is."""
    if on_busy not in ("wait", "skip"):
        raise UsageError(f"on_busy is 'wait' or 'skip', not {on_busy!r}")
    if on_error not in ("raise", "warn"):
        raise UsageError(f"on_error is 'raise' or 'warn', not {on_error!r}")
    if stage not in ("auto", "host", "device"):
        raise UsageError(f"stage is 'auto', 'host' or 'device', not {stage!r}")
    if retries is None:
        return RETRIES if on_error == "warn" else 0
    if type(retries) is not int or retries < 0:
        raise UsageError(f"retries is a number from 0, not {retries!r}")
    return retries


def check_keeper(keeper: object) -> None:
    if keeper is not None and not callable(getattr(keeper, "stage", None)):
        raise UsageError(f"keeper is a Keeper, as tr.Keeper(job) makes it, not {keeper!r}")


def check_sizes(memory_budget: int | None, file_bytes: int | None) -> None:
    if memory_budget is not None and memory_budget < _MIN_BUDGET:
        raise UsageError(f"memory_budget is at least {_MIN_BUDGET} bytes, not {memory_budget}")
    if file_bytes is not None and file_bytes < 1:
        raise UsageError(f"file_bytes is a positive number or None, not {file_bytes}")


def planners(
    given: SavePlanner | LoadPlanner | Iterable[SavePlanner | LoadPlanner] | None,
) -> tuple[SavePlanner | None, LoadPlanner | None]:
    """The planner for saves and that for loads, of one or both in any order."""
    if given is None:
        return None, None
    # Whoever has no planner does not wait for torch's.
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

    several = given if isinstance(given, Iterable) else (given,)
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
