"""What commands print: one-line errors, progress bars, tables, JSON.

Exit statuses: 0, everything is right; 1, an error, or a step that is damaged; 2, a wrong command
line; 130, interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

from torchrelay.errors import RelayError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """An error of ours is one line and exit status 1, not a traceback."""
    try:
        yield
    except RelayError as fault:
        fail(str(fault))
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail(message: str) -> None:
    """Print a message as an error and leave with status 1."""
    print("error: " + message.replace("\n", "; "), file=sys.stderr)
    raise typer.Exit(1) from None


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with rate and time left, on a terminal alone; yields the function that moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table; nothing in it is taken for markup, and nothing is cut off."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(80, 4 * len(columns) + _widest(columns, rows)))
    table = Table()
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)


def _widest(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    return sum(
        max((len(str(row[at])) for row in rows), default=0) + len(column)
        for at, column in enumerate(columns)
    )


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def size(nbytes: int) -> str:
    """Bytes as people read them."""
    from rich.filesize import decimal

    return decimal(nbytes)
