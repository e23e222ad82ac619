"""What the demo shows: workers and a host are killed, and training goes on with the same losses."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torchrelay.demo.job import Settings
from torchrelay.demo.launcher import LaunchError, import_ahead
from torchrelay.demo.story import PHASES, Comeback, Kill, Story, Teller, TrainingRun
from torchrelay.demo.worker import Plan, Way

HOSTS = ("a", "a", "b", "b")
RUNS: dict[Way, str] = {
    "nothing": "undisturbed",
    "keeper": "killed, torchrelay",
    "dcp": "killed, dcp on disk",
}


class _Bar(Teller):
    """A run's progress bar, and a line for each thing that happens."""

    def __init__(self, bars: Progress, name: str, steps: int) -> None:
        self._bars, self._task = bars, bars.add_task(name, total=steps)
        self._begun = time.monotonic()

    def step(self, step: int) -> None:
        self._bars.update(self._task, completed=step)

    def event(self, text: str) -> None:
        self._bars.console.print(
            f"{time.monotonic() - self._begun:7.2f} s  {text}", highlight=False
        )


def play(settings: Settings, console: Console, picture: Path) -> int:
    """Run the demo; returns the exit code: 0 if all that it claims was seen to hold."""
    console.print(
        "Four workers on two pretended hosts, a and b, train a transformer by FSDP2. A worker is "
        "killed, then host b with its keeper. As under torchrun, all workers are then started "
        "again. Every step is staged in the keepers' memory, and one in "
        f"{settings.save_every} is saved on disk.",
        highlight=False,
    )
    import_ahead()
    scratch = Path(tempfile.mkdtemp(prefix="torchrelay-demo-"))
    try:
        runs = _runs(settings, console, scratch)
    except LaunchError as fault:
        console.print(f"[red]The demo failed:[/red] {escape(str(fault))}", highlight=False)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    calm, kept = runs["nothing"], runs["keeper"]
    comebacks = {"torchrelay": kept.comebacks, "dcp.load": runs["dcp"].comebacks}
    _show_comebacks(comebacks, console)
    good = _check(calm, kept, console)
    _draw(picture, calm, kept, comebacks, console)
    return 0 if good else 1


def _runs(settings: Settings, console: Console, scratch: Path) -> dict[Way, TrainingRun]:
    kills = [Kill(settings.worker_dies, "worker", 1), Kill(settings.host_dies, "host", 3)]
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    found: dict[Way, TrainingRun] = {}
    with Progress(*columns, console=console) as bars:
        for way, name in RUNS.items():
            folder = scratch / way
            folder.mkdir()
            plan = Plan(settings, way, str(folder), f"demo-{os.getpid()}")
            teller = _Bar(bars, name, settings.steps)
            story = Story(plan, HOSTS, () if way == "nothing" else kills, teller)
            try:
                found[way] = story.play(settings.seconds)
            finally:
                for host in list(story.launcher.keepers):
                    story.launcher.kill_keeper(host)
    return found


def _show_comebacks(comebacks: dict[str, list[Comeback]], console: Console) -> None:
    title = "Seconds from the kill to the first new step"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1))
    found = [(who, one) for who, some in comebacks.items() for one in some]
    table.add_column("")
    for who, one in found:
        table.add_column(f"{one.what},\n{who}", justify="right", no_wrap=True)
    for phase in PHASES:
        table.add_row(phase, *(f"{one.phases[phase]:.2f}" for _, one in found))
    table.add_row("in all", *(f"{one.seconds:.2f}" for _, one in found))
    table.add_row("back at step", *(f"{one.back_at} of {one.step}" for _, one in found))
    console.print(table)


def _check(calm: TrainingRun, kept: TrainingRun, console: Console) -> bool:
    """What the demo claims: training goes on, and no bit is another."""
    again = sum(one.step - one.back_at for one in kept.comebacks)
    same = calm.losses == kept.losses and not kept.differing
    exact = calm.weights == kept.weights
    claims = [
        (len(kept.comebacks) == 2, "Training went on after both kills."),
        (same, "The losses are those of the undisturbed run, bit for bit."),
        (exact, "So are the weights and the optimizer's state in the end."),
    ]
    console.print(f"Steps that were done again: {again}.", highlight=False)
    for good, text in claims:
        mark = "[green]ok[/green]" if good else "[red]FAILED[/red]"
        console.print(f"{mark} {text}", highlight=False)
    return all(good for good, _ in claims)


def _draw(
    picture: Path,
    calm: TrainingRun,
    kept: TrainingRun,
    comebacks: dict[str, list[Comeback]],
    console: Console,
) -> None:
    try:
        from torchrelay.demo.picture import draw

        draw(picture, calm, kept, comebacks)
    except ImportError:
        console.print("No picture: it needs matplotlib.", highlight=False)
        return
    console.print(f"Both curves, with the kills: {picture}", highlight=False, soft_wrap=True)
