"""The demo: workers and a host are killed, and training resumes with the same losses."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from torchrelay.demo.job import Settings
from torchrelay.demo.launcher import LaunchError, import_ahead
from torchrelay.demo.story import PHASES, Comeback, Kill, Story, TrainingRun
from torchrelay.demo.worker import Plan

HOSTS = ("a", "a", "b", "b")


def play(settings: Settings, console: Console) -> int:
    """Run the demo; returns the exit code: 0 if all of its claims hold."""
    device, where = _training_device()
    console.print(
        "Four workers on two pretended hosts, a and b, train a transformer by FSDP2 "
        f"on {where}. A worker is "
        "killed, then host b with its keeper. As under torchrun, all workers are then started "
        "again. Every step is staged in the keepers' memory, and one in "
        f"{settings.save_every} is saved on disk.",
        highlight=False,
    )
    import_ahead()
    scratch = Path(tempfile.mkdtemp(prefix="torchrelay-demo-"))
    try:
        calm, killed = _runs(settings, device, console, scratch)
    except LaunchError as fault:
        console.print(f"[red]The demo failed:[/red] {escape(str(fault))}", highlight=False)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _show_comebacks(killed.comebacks, console)
    return 0 if _check(calm, killed, console) else 1


def _training_device() -> tuple[str, str]:
    """The type of device to train on, and how it is called in a sentence."""
    if not torch.cuda.is_available():
        return "cpu", "the CPU"
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    return "cuda", f"one GPU that they share ({name})" if count == 1 else f"{count} GPUs ({name})"


def _runs(settings: Settings, device: str, console: Console, scratch: Path) -> list[TrainingRun]:
    """A run that nothing happens to, and the same one with kills."""
    kills = [Kill(settings.worker_dies, "worker", 1), Kill(settings.host_dies, "host", 3)]
    columns = (
        TextColumn("{task.description:20}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        calm = _run(Plan(settings, str(scratch / "undisturbed"), None, device=device), [], bars)
        job = f"demo-{os.getpid()}"
        killed = Plan(settings, str(scratch / "killed"), job, device=device)
        return [calm, _run(killed, kills, bars)]


def _run(plan: Plan, kills: list[Kill], bars: Progress) -> TrainingRun:
    """A run with its progress bar, and a line for each thing that happens."""
    folder = Path(plan.folder)
    folder.mkdir()
    task, begun = bars.add_task(folder.name, total=plan.settings.steps), time.monotonic()

    def on_event(text: str) -> None:
        bars.console.print(f"{time.monotonic() - begun:7.2f} s  {text}", highlight=False)

    story = Story(plan, HOSTS, kills, lambda step: bars.update(task, completed=step), on_event)
    try:
        return story.play(plan.settings.seconds)
    finally:
        for host in list(story.launcher.keepers):
            story.launcher.kill_keeper(host)


def _show_comebacks(comebacks: list[Comeback], console: Console) -> None:
    title = "Seconds from the kill to the first new step"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1))
    table.add_column("")
    for one in comebacks:
        table.add_column(one.what, justify="right", no_wrap=True)
    for phase in PHASES:
        table.add_row(phase, *(f"{one.phases[phase]:.2f}" for one in comebacks))
    table.add_row("in all", *(f"{one.seconds:.2f}" for one in comebacks))
    table.add_row("back at step", *(f"{one.back_at} of {one.step}" for one in comebacks))
    console.print(table)


def _check(calm: TrainingRun, kept: TrainingRun, console: Console) -> bool:
    """Whether the claims of the demo hold: training resumes, and no bit differs."""
    again = sum(one.step - one.back_at for one in kept.comebacks)
    same = calm.losses == kept.losses and not kept.differing
    exact = calm.weights == kept.weights
    claims = [
        (len(kept.comebacks) == 2, "Training resumed after both kills."),
        (same, "The losses are those of the undisturbed run, bit for bit."),
        (exact, "So are the weights and the optimizer's state in the end."),
    ]
    console.print(f"Steps that were done again: {again}.", highlight=False)
    for good, text in claims:
        mark = "[green]ok[/green]" if good else "[red]FAILED[/red]"
        console.print(f"{mark} {text}", highlight=False)
    return all(good for good, _ in claims)
