"""The command that measures this machine: bench."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import typer

import torchrelay as tr
from torchrelay.cli.output import JSON, one_line_errors, print_json, print_table, size
from torchrelay.errors import CheckpointError

MEGABYTES, SMALL_MEGABYTES = 256, 8
PARTS = 4  # a model and its gradients' two moments, and a little that is no float32

FOLDER = typer.Option(Path(), "--dir", help="A folder on the disk to be measured.")


class _Task(NamedTuple):
    """What is measured, by torchrelay and by torch. Each returns the seconds that count."""

    what: str
    ours: Callable[[], float]
    theirs: Callable[[], float] | None
    against: str


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("bench")(_bench)


def _bench(
    megabytes: int = typer.Option(MEGABYTES, "--mb", min=1, help="Size of the state."),
    folder: Path = FOLDER,
    repeats: int = typer.Option(5, "--repeats", min=1, help="Iterations; the median counts."),
    small: bool = typer.Option(False, "--small", help="A tiny state, one iteration: a test."),
    as_json: bool = JSON,
) -> None:
    """Measure saves and loads on this machine, in turn with torch's own."""
    if small:
        megabytes, repeats = SMALL_MEGABYTES, 1
    with one_line_errors():
        scratch = _scratch(folder)
        try:
            with tr.Checkpointer(scratch / "run", group=False, keep=2) as there:
                tasks = _tasks(there, _state(megabytes << 20), scratch / "torch.pt")
                rows = _measured(tasks, megabytes << 20, repeats)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if as_json:
            print_json(rows)
        else:
            _print(rows, megabytes << 20)


def _scratch(folder: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="torchrelay-bench-", dir=folder))
    except OSError as fault:
        raise CheckpointError(
            f"cannot be written to: {fault.strerror}; name another with --dir", file=str(folder)
        ) from fault


def _state(nbytes: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    rows = max(1, nbytes // PARTS // 4 // 8 // 1024)
    layers = {f"layers.{n}.weight": torch.randn(rows, 1024) for n in range(8)}
    moments = {
        name: {"exp_avg": torch.randn(rows, 1024), "exp_avg_sq": torch.rand(rows, 1024)}
        for name in layers
    }
    half = {name: weight.to(torch.bfloat16) for name, weight in layers.items()}
    return {"model": layers, "optim": moments, "ema": half, "step": 1}


def _tasks(there: tr.Checkpointer, state: dict[str, Any], file: Path) -> list[_Task]:
    import torch

    from torchrelay.dropin.stock_dcp import write_torch_save

    steps = iter(range(1, 1 << 30))
    blank = _blank(state)

    def stall() -> float:
        begun = time.perf_counter()
        pending = there.save_async(next(steps), state)
        seconds = time.perf_counter() - begun
        pending.result()
        return seconds

    def load_torch() -> None:
        _copy(blank, torch.load(file, map_location="cpu", weights_only=True))

    there.prepare(state)
    return [
        _Task(
            "save, durable",
            lambda: _timed(lambda: there.save(next(steps), state)),
            lambda: _timed(lambda: write_torch_save(file, state)),
            "torch.save and fsync",
        ),
        _Task("stall of save_async", stall, None, ""),
        _Task(
            "load into live tensors, verified",
            lambda: _timed(lambda: there.load(into=blank)),
            lambda: _timed(load_torch),
            "torch.load, not verified",
        ),
        _Task("verify", lambda: _timed(there.verify), None, ""),
    ]


def _blank(state: Any) -> Any:
    import torch

    if isinstance(state, dict):
        return {key: _blank(value) for key, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else state


def _copy(into: Any, found: Any) -> None:
    for key, value in into.items():
        if isinstance(value, dict):
            _copy(value, found[key])
        elif hasattr(value, "copy_"):
            value.copy_(found[key])


def _timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def _measured(tasks: list[_Task], nbytes: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for task in tasks:
        ours, theirs = [], []
        for _ in range(repeats):
            ours.append(task.ours())
            if task.theirs is not None:
                theirs.append(task.theirs())
        seconds = median(ours)
        rows.append(
            {
                "what": task.what,
                "seconds": seconds,
                "bytes_per_second": nbytes / seconds,
                "against": task.against or None,
                "their_seconds": median(theirs) if theirs else None,
                "speed": median(theirs) / seconds if theirs else None,
            }
        )
    return rows


def _print(rows: list[dict[str, Any]], nbytes: int) -> None:
    table = [
        [
            row["what"],
            f"{row['seconds']:.3f} s",
            f"{size(int(row['bytes_per_second']))}/s",
            "" if row["against"] is None else f"{row['their_seconds']:.3f} s",
            "" if row["speed"] is None else f"{row['speed']:.2f}x",
            row["against"] or "",
        ]
        for row in rows
    ]
    print_table(["what", "torchrelay", "rate", "torch", "speed", "against"], table)
    print(f"a state of {size(nbytes)}; medians; bytes that were just written are in memory")
