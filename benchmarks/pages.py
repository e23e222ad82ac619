"""How fast this machine hands out memory: the condition under which new tensors are made.

A guest's free memory goes cold while it is idle: its host takes it back, and each page costs more
the next time.
"""

from __future__ import annotations

import mmap
import time
from contextlib import suppress
from typing import Any

PROBE = 256 << 20
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
ADVICE = {"huge": 14, "4K": 15}  # MADV_HUGEPAGE, MADV_NOHUGEPAGE


class Probe:
    """Takes some memory with each size of page, and holds it until `close`.

    Held, it is not what the next lap gets, which would make that one look better.
    """

    def __init__(self, nbytes: int = PROBE) -> None:
        self.rates: dict[str, float | None] = {}  # GB/s
        self._held: list[mmap.mmap] = []
        for name, advice in ADVICE.items():
            area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._held.append(area)
            self.rates[name] = None  # where the kernel knows neither
            with suppress(OSError):
                area.madvise(advice)
                begun = time.perf_counter()
                area.madvise(POPULATE_WRITE)
                self.rates[name] = round(nbytes / 1e9 / (time.perf_counter() - begun), 2)

    def close(self) -> None:
        for area in self._held:
            area.close()
        self._held.clear()


def just_freed() -> dict[str, Any]:
    """Rates for memory that was in use a moment ago."""
    Probe().close()
    again = Probe()
    again.close()
    return again.rates
