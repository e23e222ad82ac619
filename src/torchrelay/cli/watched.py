"""Places and what they hold, as the page looks into them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import torchrelay as tr
from torchrelay.cli.sources import opened_source
from torchrelay.cli.steps import listed, opened
from torchrelay.inspection.seam import Contents, StateSource

KEPT = 16  # contents of steps that are held, the last ones asked for


class WatchedPlaces:
    """Implements `WatchedSteps` on places with checkpoints; where several have a step, the first
    of them counts."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = {place: opened(place) for place in places}
        self._started = time.time()
        self._facts: dict[tuple[str, int], dict[str, Any]] = {}
        self._contents: dict[int, Contents] = {}

    def steps(self) -> list[int]:
        return sorted({step for there in self._places.values() for step in there.steps()})

    def contents(self, step: int) -> Contents:
        if step not in self._contents:
            with self.source(step) as source:
                while len(self._contents) >= KEPT:
                    self._contents.pop(next(iter(self._contents)))
                self._contents[step] = source.contents
        return self._contents[step]

    @contextmanager
    def source(self, step: int) -> Iterator[StateSource]:
        for place, there in self._places.items():
            if step in there.steps():
                with opened_source(place, step) as source:
                    yield source
                return
        raise KeyError(f"step {step}")

    def status(self) -> dict[str, Any]:
        """What `/status.json` tells, for places without an endpoint."""
        disks: list[dict[str, Any]] = [
            {"url": there.url, "steps": [self._listed(there, step) for step in there.steps()]}
            for there in self._places.values()
        ]
        steps = [facts["step"] for disk in disks for facts in disk["steps"]]
        return {
            "version": tr.__version__,
            "url": ", ".join(there.url for there in self._places.values()),
            "now": time.time(),
            "started": self._started,
            "step": max(steps, default=None),
            "disk": disks,
            "transfers": [],
            "finished": [],
            "publishes": [],
            "readers": 0,
        }

    def _listed(self, there: tr.Checkpointer, step: int) -> dict[str, Any]:
        key = (there.url, step)
        if key not in self._facts or self._facts[key]["damage"]:
            facts = listed(there, step)
            self._facts[key] = {
                "step": step,
                "bytes": facts.get("bytes", 0),
                "ranks": facts.get("ranks", 0),
                "time": _seconds(facts.get("time", "")),
                "damage": facts["damage"],
            }
        return self._facts[key]

    def close(self) -> None:
        for there in self._places.values():
            there.close()


def _seconds(time: str) -> float | None:
    try:
        return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None
