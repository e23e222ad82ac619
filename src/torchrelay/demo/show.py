"""What the demo shows: progress bars, losses, and a table beside torch's own transport."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from torchrelay.demo import rank as child
from torchrelay.demo.crew import CrewError, Workers
from torchrelay.demo.job import Settings
from torchrelay.demo.versus import NEW, Lap

RANKS = range(child.WORLD)


def play(settings: Settings, console: Console) -> int:
    """Run the demo; returns the exit code: 0 if all that it claims was seen to hold."""
    try:
        with Workers(settings) as crew:
            good = _pass_on(crew, settings, console)
            good = _compare(crew, settings, console) and good
    except CrewError as fault:
        console.print(f"[red]The demo failed:[/red] {escape(str(fault))}", highlight=False)
        return 1
    return 0 if good else 1


def _pass_on(crew: Workers, settings: Settings, console: Console) -> bool:
    with console.status("Starting four processes"):
        crew.hear("ready")
    console.print("Four processes on this machine, joined by gloo.", highlight=False)
    with console.status("Rank 0 trains"):
        ((losses, size),) = crew.hear("trained", [0])
    console.print(
        f"Rank 0 trained a transformer for {len(losses)} steps, loss {losses[0]:.4f} to "
        f"{losses[-1]:.4f}. Its state is {size / 1e6:.1f} MB: weights, AdamW, random state, "
        "data position.",
        highlight=False,
    )
    moved = _show_transfer(crew, console)
    fingerprints = [each[0] for each in moved]
    exact = len(set(fingerprints)) == 1
    console.print(
        f"{_mark(exact)} Ranks 1 to 3 have rank 0's state, bit for bit: digest {fingerprints[0]}."
        if exact
        else f"{_mark(exact)} The states differ: {fingerprints}",
        highlight=False,
    )
    sent = moved[0][1] / size
    console.print(
        f"Rank 0 sent {sent:.2f} times the state's bytes to give it to three ranks"
        + (": they read its memory themselves." if sent < 0.5 else "."),
        highlight=False,
    )
    return _show_losses(crew, settings, console) and exact


def _show_transfer(crew: Workers, console: Console) -> list[tuple[str, int, float]]:
    """A bar for each rank while the state is on its way."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        names = ["sends" if rank == 0 else "receives" for rank in RANKS]
        tasks = [bars.add_task(f"rank {rank} {names[rank]}", total=None) for rank in RANKS]

        def update(rank: int, seen: tuple[int, int]) -> None:
            bars.update(tasks[rank], completed=seen[0], total=seen[1])

        return crew.hear("moved", progress=update)


def _show_losses(crew: Workers, settings: Settings, console: Console) -> bool:
    with console.status("All ranks train on"):
        losses = crew.hear("losses")
    table = Table(title="All ranks train on with the same data", title_justify="left")
    table.add_column("step", justify="right")
    for rank in RANKS:
        table.add_column(f"loss on rank {rank}", justify="right")
    for step, row in enumerate(zip(*losses, strict=True), settings.steps_before + 1):
        table.add_row(str(step), *(f"{loss:.9f}" for loss in row))
    console.print(table)
    same = all(each == losses[0] for each in losses)
    console.print(
        f"{_mark(same)} The losses are the same on all ranks."
        if same
        else f"{_mark(same)} The losses differ.",
        highlight=False,
    )
    return same


def _compare(crew: Workers, settings: Settings, console: Console) -> bool:
    """The same state to the same three ranks, by torch's own transport and by this library."""
    exact = True
    with console.status("Comparing with torch's PGTransport"):
        for _ in child.KINDS:
            exact = len(set(crew.hear("checked"))) == 1 and exact
        laps: list[list[list[Lap]]] = [[] for _ in child.KINDS]
        for _ in range(settings.rounds):
            for kind in laps:
                kind.append(crew.hear("lap"))
    table = Table(
        title=f"The same state to three ranks, median of {settings.rounds}", title_justify="left"
    )
    table.add_column("by")
    table.add_column("mode")
    for name in ("seconds", "MB sent", "messages", "speed"):
        table.add_column(name, justify="right")
    seconds = [median(max(lap.seconds for lap in lap_of) for lap_of in kind) for kind in laps]
    stock: dict[bool, float] = {}
    for (who, mode), kind, took in zip(child.KINDS, laps, seconds, strict=True):
        is_new = mode == NEW
        if who == "torch":
            stock[is_new] = took
        sent = kind[-1][0]
        table.add_row(
            "PGTransport" if who == "torch" else "torchrelay",
            mode,
            f"{took:.3f}",
            f"{sent.bytes / 1e6:.1f}",
            str(sent.messages),
            f"{stock[is_new] / took:.2f}x",
        )
    console.print(table)
    text = "Each of these delivered the same bits." if exact else "A transfer lost bits."
    console.print(f"{_mark(exact)} {text}", highlight=False)
    return exact


def _mark(good: bool) -> str:
    return "[green]ok[/green]" if good else "[red]FAILED[/red]"
