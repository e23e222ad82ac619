"""The picture of a demo: both loss curves with the kills, and how long each comeback took."""

from __future__ import annotations

from pathlib import Path

from torchrelay.demo.story import PHASES, Comeback, TrainingRun

COLORS = dict(
    zip(PHASES, ("#b0b0b0", "#7f7f7f", "#2a7f62", "#66a182", "#aed4c0", "#3b6fb6"), strict=True)
)


def draw(
    path: Path, calm: TrainingRun, disturbed: TrainingRun, comebacks: dict[str, list[Comeback]]
) -> None:
    """Write a PNG. `ImportError` where there is no matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    curves, bars = figure.subplots(2, 1, height_ratios=(3, 2))
    steps = sorted(calm.losses)
    curves.plot(steps, [calm.mean(s) for s in steps], color="#c0c0c0", lw=5, label="undisturbed")
    there = sorted(disturbed.losses)
    curves.plot(there, [disturbed.mean(s) for s in there], color="#2a7f62", label="with two kills")
    for one in disturbed.comebacks:
        curves.axvline(one.step, color="#b22222", ls="--", lw=1)
        top = curves.get_ylim()[1]
        curves.annotate(f"{one.what} is killed", (one.step, top), color="#b22222", va="top")
    curves.set_xlabel("step")
    curves.set_ylabel("loss, mean of the workers")
    curves.legend()
    rows = [(f"{one.what}, {who}", one) for who, some in comebacks.items() for one in some]
    for place, (_, one) in enumerate(reversed(rows)):
        left = 0.0
        for phase in PHASES:
            label = phase if place == 0 else None
            spent = one.phases[phase]
            bars.barh(place, spent, left=left, color=COLORS[phase], label=label)
            left += spent
    bars.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    bars.set_ylim(-0.6, len(rows) + 0.2)  # room for the legend
    bars.set_xlabel("seconds from the kill to the first new step")
    bars.legend(ncols=len(PHASES), fontsize="small")
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
