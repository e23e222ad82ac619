"""A picture of a result file. Needs matplotlib; without it there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INK, MORE, LESS, EVEN = "#222222", "#2a7f62", "#b5533c", "#b0b0b0"


def plot(found: dict[str, Any], path: Path) -> bool:
    """Write a PNG; returns whether matplotlib was there to do it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = found["rows"][::-1]  # horizontal bars are drawn from the bottom
    labels = [f"{row['title']}\n{row['mode']}" for row in rows]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, key, title in zip(
        figure.subplots(1, 2, sharey=True),
        ("speed", "fewer_bytes"),
        ("times as fast as torch's PGTransport", "times fewer bytes from the sender"),
        strict=True,
    ):
        _panel(axes, labels, [row[key] for row in rows], title)
    facts = found["machine"]
    figure.suptitle(
        f"torchrelay {facts['torchrelay']} and torch {facts['torch']}, gloo on loopback, "
        f"{facts['cores']} cores",
        fontsize=11,
        color=INK,
    )
    figure.savefig(path, dpi=120)
    return True


def plot_checkpoint(found: dict[str, Any], path: Path) -> bool:
    """How ours compares with DCP and with safetensors, in each row that has them."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    bars: list[tuple[str, float | None, float | None]] = []
    for row in found["rows"]:
        if row["key"] == "step":
            continue
        medians = {entry["name"]: entry["median"] for entry in row["entries"]}
        dcp = next((value for name, value in medians.items() if name.startswith("dcp")), None)
        other = next((value for name, value in medians.items() if name.startswith("safet")), None)
        for name, value in medians.items():
            if name.startswith("torchrelay"):
                label = row["title"] + name.removeprefix("torchrelay").replace(", ", "\n", 1)
                bars.append((label, dcp and dcp / value, other and other / value))
    labels, *columns = zip(*bars[::-1], strict=True)
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, values, title in zip(
        figure.subplots(1, 2, sharey=True),
        columns,
        ("times as fast (memory: as little) as torch's DCP", "times as fast as safetensors"),
        strict=True,
    ):
        _panel(axes, labels, values, title)
    facts = found["machine"]
    figure.suptitle(
        f"torchrelay {facts['torchrelay']} and torch {facts['torch']}, checkpoints of "
        f"{found['rows'][0]['state_bytes'] / 1e9:.2g} GB, {facts['cores']} cores",
        fontsize=11,
        color=INK,
    )
    figure.savefig(path, dpi=120)
    return True


def _panel(axes: Any, labels: Sequence[str], values: Sequence[float | None], title: str) -> None:
    known = [value for value in values if value is not None]
    for place, value in enumerate(values):
        if value is None:
            continue
        # From 1, where both are even: to the right is better, to the left worse.
        axes.barh(place, value - 1, left=1, color=MORE if value >= 1 else LESS, height=0.6)
        text = f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"
        axes.text(max(value, 1) * 1.08, place, text, va="center", color=INK, fontsize=8)
    axes.axvline(1, color=EVEN, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *known) * 0.9, max(2.0, *known) * 2.5)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_title(title, fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
