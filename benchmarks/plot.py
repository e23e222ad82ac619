"""A picture of a result file. Needs matplotlib; without it there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
INK, MORE, LESS, EVEN = "#222222", "#2a7f62", "#b5533c", "#b0b0b0"


def plot(found: dict[str, Any], path: Path) -> bool:
    """Write a PNG of live transfers; returns whether matplotlib was there to do it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        panels.setdefault(_panel_of(row), []).append(row)
    panels = dict(sorted(panels.items(), key=lambda panel: -len(panel[1])))
    heights = [len(rows) + 1.6 for rows in panels.values()]
    figure = Figure(figsize=(10, 0.9 + 0.26 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    values = [value for row in found["rows"] for value in (row["speed"], row["speed_bar"] or 1)]
    for axes, (title, rows) in zip(grid[:, 0], panels.items(), strict=True):
        labels = [_label(row) for row in rows[::-1]]
        marks = [row["speed_bar"] for row in rows[::-1]]
        _panel(axes, labels, [row["speed"] for row in rows[::-1]], title, marks)
        axes.set_xlim(min(0.5, *values) * 0.9, max(2.0, *values) * 1.5)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_xticks([tick for tick in TICKS if min(values) * 0.8 <= tick <= max(values) * 1.5])
    facts = found["machine"]
    figure.suptitle(
        f"Times as fast: torchrelay {facts['torchrelay']}, torch {facts['torch']}, "
        f"{facts['cores']} cores, one host. Black marks: the bars.",
        fontsize=11,
        color=INK,
    )
    figure.savefig(path, dpi=120)
    return True


def _panel_of(row: dict[str, Any]) -> str:
    how = "asked for" if row["asked"]["route"] else "chosen by itself"
    if row["against"].startswith("torch "):
        return f"against torch's PGTransport over gloo, route {row['route']}, {how}"
    return f"against others, route {row['route']}, {how}"


def _label(row: dict[str, Any]) -> str:
    label = f"{row['title']}: {row['mode']}"
    return label if row["against"].startswith("torch ") else f"{label}; {row['against']}"


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


def _panel(
    axes: Any,
    labels: Sequence[str],
    values: Sequence[float | None],
    title: str,
    marks: Sequence[float | None] = (),
) -> None:
    known = [value for value in values if value is not None]
    for place, value in enumerate(values):
        if value is None:
            continue
        # From 1, where both are even: to the right is better, to the left worse.
        axes.barh(place, value - 1, left=1, color=MORE if value >= 1 else LESS, height=0.6)
        text = f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"
        mark = marks[place] if marks else None
        if mark is not None:
            axes.plot([mark] * 2, [place - 0.42, place + 0.42], color=INK)
        axes.text(max(value, mark or 1, 1) * 1.08, place, text, va="center", color=INK, fontsize=8)
    axes.axvline(1, color=EVEN, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *known) * 0.9, max(2.0, *known) * 2.5)
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_title(title, fontsize=10, color=INK)
    axes.spines[["top", "right"]].set_visible(False)


def plot_training(found: dict[str, Any], path: Path) -> bool:
    """Write a PNG of what changes in training and what is sent, step by step."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [row["step"] for row in found["rows"]]
    axes.plot(steps, [100 * row["changed"] for row in found["rows"]], color=INK, label="changed")
    axes.plot(steps, [100 * row["sent"] for row in found["rows"]], color=MORE, label="sent")
    axes.set_ylim(0)
    axes.set_xlabel("step")
    axes.set_ylabel("% of the elements, % of the bytes")
    axes.legend(frameon=False)
    figure.suptitle(
        f"Weights in bf16, {found['elements'] / 1e6:.1f} million elements, learning rate "
        f"{found['learning_rate']:g}",
        fontsize=11,
        color=INK,
    )
    figure.savefig(path, dpi=120)
    return True


def plot_reuse(found: dict[str, Any], path: Path) -> bool:
    """Write a PNG of the bytes that each step writes, with reuse and without."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    row = found["rows"][0]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = range(1, found["saves"] + 1)
    for way, label, color in (("all", "without reuse", LESS), ("reuse", "with reuse", MORE)):
        values = [nbytes / 1e6 for nbytes in row["written"][way]]
        axes.plot(steps, values, color=color, marker=".", label=label)
    axes.axhline(row["trained_bytes"] / 1e6, color=EVEN, linewidth=1, label="trained")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xticks(list(steps))
    axes.set_xlabel("step")
    axes.set_ylabel("MB written")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Bytes of a step: {row['case']}, {found['ranks']} ranks", fontsize=11)
    figure.savefig(path, dpi=120)
    return True
