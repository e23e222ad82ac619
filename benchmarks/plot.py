"""A picture of a result file. Needs matplotlib; without it there is none."""

from __future__ import annotations

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
        values = [row[key] for row in rows]
        for place, value in enumerate(values):
            # From 1, where both are even: to the right is better, to the left worse.
            axes.barh(place, value - 1, left=1, color=MORE if value >= 1 else LESS, height=0.6)
            text = f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"
            where = max(value, 1) * 1.08
            axes.text(where, place, text, va="center", color=INK, fontsize=8)
        axes.axvline(1, color=EVEN, linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(min(0.5, *values) * 0.9, max(2.0, *values) * 2.5)
        axes.xaxis.set_major_formatter("{x:g}x")
        axes.xaxis.set_minor_formatter("")
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.set_title(title, fontsize=10, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
    facts = found["machine"]
    figure.suptitle(
        f"torchrelay {facts['torchrelay']} and torch {facts['torch']}, gloo on loopback, "
        f"{facts['cores']} cores",
        fontsize=11,
        color=INK,
    )
    figure.savefig(path, dpi=120)
    return True
