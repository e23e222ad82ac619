"""Whether memory of this process can be written: a file mapped for reading cannot, and a write to
it ends the process. No torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

_MAPS = "/proc/self/maps"
Addresses = np.ndarray[Any, np.dtype[Any]]


def first_read_only(addresses: Addresses, sizes: Addresses) -> int:
    """The first of some ranges of memory that has a part which cannot be written; -1 if there is
    none, or where the system does not say."""
    if not len(addresses):
        return -1
    starts, stops = _read_only()
    begins = addresses.astype(np.uint64)
    ends = begins + sizes.astype(np.uint64)
    # The mapping that ends first after the beginning of a range: they do not overlap.
    at = np.searchsorted(stops, begins, side="right")
    inside = at < len(starts)
    inside[inside] = starts[at[inside]] < ends[inside]
    found = np.flatnonzero(inside & (ends > begins))
    return int(found[0]) if len(found) else -1


def _read_only() -> tuple[Addresses, Addresses]:
    """Where mappings that cannot be written begin and end, in ascending order."""
    found: list[int] = []
    with suppress(OSError, ValueError), open(_MAPS, "rb") as file:
        for line in file:
            span, mode, _ = line.split(b" ", 2)
            if mode[1:2] != b"w":
                found += [int(end, 16) for end in span.split(b"-")]
    ends = np.array(found, np.uint64).reshape(-1, 2)
    return ends[:, 0], ends[:, 1]
