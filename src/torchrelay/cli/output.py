"""Output of commands: one-line errors, progress bars, tables, JSON.

Exit statuses: 0, everything is right; 1, an error, or a step that is damaged; 2, a wrong command
line; 130, interrupted; 141, whatever read the output ended first (as `head` does).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, NoReturn

import typer

from torchrelay.errors import DamagedError, DigestError, FormatError, ManifestError, RelayError
from torchrelay.progress import Progress, ProgressCallback

JSON = typer.Option(False, "--json", help="Print JSON.")


@contextmanager
def one_line_errors(status: int = 1) -> Iterator[None]:
    """An error of ours is one line and an exit status, not a traceback."""
    try:
        yield
        sys.stdout.flush()
    except RelayError as fault:
        fail(str(fault), status)
    except BrokenPipeError:  # the status that a shell shows for programs that SIGPIPE ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except OSError as fault:  # of a file that the command was given
        where = f" [{fault.filename}]" if fault.filename else ""
        fail(f"{fault.strerror or fault}{where}", status)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def end_with_status() -> None:
    """A command that runs until it is ended takes SIGTERM as it takes Ctrl-C, also where a shell
    started it in the background, with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def fail(message: str, status: int = 1) -> NoReturn:
    """Print a message as an error and leave with an exit status."""
    print("error: " + plain(message.replace("\n", "; ")), file=sys.stderr)
    raise typer.Exit(status) from None


@contextmanager
def progress_bar(what: str) -> Iterator[ProgressCallback]:
    """A bar with rate and time left, on a terminal alone; yields the function that moves it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if not console.is_terminal:  # a bar that is disabled prints an empty line, up to rich 14.2
        yield lambda progress: None
        return
    text = TextColumn("{task.description}", markup=False)
    with RichProgress(text, *columns, console=console) as bar:
        task = bar.add_task(what, total=None)

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, total=progress.total)

        yield show


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Lines whose cells stand below each other; the last cell of a line may be of any length.
    Nothing in them is taken for markup, and nothing is cut off."""
    widths: dict[int, int] = {}
    for row in rows:
        for at, cell in enumerate(row[:-1]):
            widths[at] = max(widths.get(at, 0), len(cell))
    for row in rows:
        cells = [cell.ljust(widths.get(at, 0)) for at, cell in enumerate(row)]
        print("  ".join(map(plain, cells)).rstrip())


def wrong(fault: RelayError | OSError) -> dict[str, str | None]:
    """A fault of a state as facts. A state that cannot be read may be intact, so it is "unread"
    instead of "damage"."""
    damaged = isinstance(fault, DamagedError | DigestError | ManifestError)
    unread = not damaged or isinstance(fault, FormatError)
    return {"damage": None if unread else str(fault), "unread": str(fault) if unread else None}


def in_words(facts: Mapping[str, Any]) -> str:
    """The fault of a state, worded to follow "it is"; empty if it has none."""
    if facts.get("damage"):
        return f"damaged: {facts['damage']}"
    return f"not checked: {facts['unread']}" if facts.get("unread") else ""


def count(number: int, noun: str) -> str:
    """A number of things: "1 tensor", "2 tensors"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plain(text: str) -> str:
    """Text that moves no cursor: a state's names may hold control characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def print_json(value: object) -> None:
    """JSON that every program reads: a number that is not finite is null."""
    try:
        print(json.dumps(value, indent=2, allow_nan=False))
    except ValueError:
        print(json.dumps(_finite(value), indent=2))


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def size(nbytes: int) -> str:
    """Bytes as people read them."""
    from rich.filesize import decimal

    return decimal(nbytes)
