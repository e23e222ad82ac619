"""What a transfer should cost: seconds by phase, before it begins.

Each phase costs something at once, something a leaf and something a byte, by route. The numbers
below were measured (docs/performance.md) on a machine whose memory is copied at `COPY_RATE`; they
are scaled by how fast this one's is, and then by how earlier transfers of the same relay went.
"""

from __future__ import annotations

import ctypes
import threading
import time
from functools import cache
from typing import NamedTuple

COPY_RATE = 6e9  # bytes a second, one thread, where the table was measured
_PROBE = 4 << 20


class Cost(NamedTuple):
    """Seconds at once, a leaf and a byte."""

    fixed: float = 0.0
    leaf: float = 0.0
    byte: float = 0.0


_PLAN = Cost(0.0005, 2e-6)
# By side; then by phase, and route where it matters.
TABLE: dict[str, dict[str, dict[str, Cost]]] = {
    "send": {
        "capture": {"": _PLAN},
        "join": {"": Cost(0.002, 2.5e-6)},
        "data": {
            "group": Cost(0.002, 1e-6, 1 / 2.4e9),
            "host": Cost(0.001, 8e-7, 1 / 9e9),
            "cuda_ipc": Cost(0.002, 1e-6, 1 / 1.4e12),
        },
    },
    "recv": {
        "prepare": {"": _PLAN},
        "call": {"": Cost(0.001, 1e-6)},
        "join": {"": Cost(0.002, 2.5e-6)},
        "data": {
            "group": Cost(0.002, 1e-6, 1 / 2.4e9),
            "host": Cost(0.001, 8e-7, 1 / 9e9),
            "cuda_ipc": Cost(0.002, 1e-6, 1 / 1.4e12),
        },
        "commit": {"": Cost(0.0002, 3e-7)},
        "commit, staged": {"": Cost(0.0005, 1e-6, 1 / 12e9)},
    },
}


class Costs:
    """The costs of one relay's transfers, learned as they go. Thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], float] = {}  # actual seconds over those of the table
        self._lock = threading.Lock()

    def predict(
        self, side: str, route: str, *, leaves: int, nbytes: int, staged: bool = False
    ) -> dict[str, float]:
        """Seconds by phase of a transfer of a state of that size."""
        found = {}
        for phase, table in _phases(side, staged).items():
            cost = table.get(route) or table.get("") or table["group"]
            copies = cost.byte * nbytes
            if route != "cuda_ipc":
                copies *= COPY_RATE / copy_rate()
            seconds = cost.fixed + cost.leaf * leaves + copies
            with self._lock:
                found[phase] = seconds * self._seen.get((side, route, phase), 1.0)
        return found

    def learn(
        self, side: str, route: str, predicted: dict[str, float], actual: dict[str, float]
    ) -> None:
        """Take note of how a transfer went. The last ones count most."""
        with self._lock:
            for phase, seconds in predicted.items():
                if phase in actual and seconds > 0:
                    key = (side, route, phase)
                    before = self._seen.get(key, 1.0)
                    ratio = before * actual[phase] / seconds
                    self._seen[key] = (before + ratio) / 2 if key in self._seen else ratio


def _phases(side: str, staged: bool) -> dict[str, dict[str, Cost]]:
    table = TABLE[side]
    found = {phase: costs for phase, costs in table.items() if "," not in phase}
    if staged and "commit, staged" in table:
        found["commit"] = table["commit, staged"]
    return found


@cache
def copy_rate() -> float:
    """Bytes a second that one thread copies here, measured once, in a few milliseconds."""
    source, to = ctypes.create_string_buffer(_PROBE), ctypes.create_string_buffer(_PROBE)
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        ctypes.memmove(to, source, _PROBE)
        best = min(best, time.perf_counter() - begun)
    return _PROBE / max(best, 1e-9)
