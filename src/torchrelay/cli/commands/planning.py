"""The command that says how often to stage and to save: plan."""

from __future__ import annotations

from math import isfinite

import typer

from torchrelay.cli.output import JSON, one_line_errors, print_json, print_table
from torchrelay.recovery.cadence import Cadence, KeptCopy, cadence, cost, failures

HOUR, DAY = 3600.0, 86400.0


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("plan")(_plan)


def _plan(
    step: float = typer.Option(..., "--step", help="Seconds that a training step takes."),
    hosts: int = typer.Option(1, "--hosts", help="Hosts of the job."),
    mtbf: float = typer.Option(
        180.0, "--mtbf", help="Days between two failures of one host, or of a process on it."
    ),
    beyond: float = typer.Option(
        0.05, "--beyond", help="The share of failures that leave nothing in memory, 0 to 1."
    ),
    stage_stall: float = typer.Option(
        0.1, "--stage-stall", help="Seconds that a stage stalls training."
    ),
    stage_busy: float = typer.Option(
        0.0, "--stage-busy", help="Seconds until copies of a staged step are at their hosts."
    ),
    stage_back: float = typer.Option(
        30.0, "--stage-back", help="Seconds from a failure to the next step, from memory."
    ),
    save_stall: float = typer.Option(
        0.5, "--save-stall", help="Seconds that a save stalls training."
    ),
    save_busy: float = typer.Option(0.0, "--save-busy", help="Seconds until a save is durable."),
    save_back: float = typer.Option(
        300.0, "--save-back", help="Seconds from a failure to the next step, from disk."
    ),
    as_json: bool = JSON,
) -> None:
    """How often to stage into memory and to save to disk, and what failures cost then."""
    with one_line_errors():
        often = failures(hosts, mtbf * DAY, beyond)
        memory = cadence(KeptCopy(stage_stall, often.survived, stage_back, stage_busy), step)
        disk_copy = KeptCopy(save_stall, often.lost, save_back, save_busy)
        disk = cadence(disk_copy, step)
        # Without copies in memory every failure goes back to the disk.
        alone = KeptCopy(save_stall, mtbf * DAY / hosts, save_back, save_busy)
        disk_alone = cadence(alone, step)
        rows = [
            ("stage into memory", memory),
            ("save to disk", disk),
            ("save to disk, nothing staged", disk_alone),
            ("the same every hour", cost(alone, step, max(1, round(HOUR / step)))),
        ]
        if as_json:
            print_json([{"what": what, **_facts(found)} for what, found in rows])
            return
        heads = ["what", "every", "steps", "stalled", "done again", "coming back", "lost"]
        print_table(heads, [_row(what, found) for what, found in rows])
        both = memory.lost + disk.lost
        print(
            f"a failure every {_time(mtbf * DAY / hosts)}; staged and saved like this, "
            f"{_share(both)} of the time is lost; from disk alone {_share(disk_alone.lost)}"
        )


def _facts(found: Cadence) -> dict[str, float | int | None]:
    return {
        "seconds": found.interval if isfinite(found.interval) else None,
        "steps": found.steps,
        "stalled": found.stalled,
        "redone": found.redone,
        "restoring": found.restoring,
        "lost": found.lost,
    }


def _row(what: str, found: Cadence) -> list[str]:
    if not isfinite(found.interval):
        return [what, "never", "", "", "", "", ""]
    parts = (found.stalled, found.redone, found.restoring, found.lost)
    return [what, _time(found.interval), str(found.steps), *map(_share, parts)]


def _time(seconds: float) -> str:
    if not isfinite(seconds):
        return "never"
    for unit, name in ((DAY, "d"), (HOUR, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def _share(part: float) -> str:
    return f"{100 * part:.2f} %"
