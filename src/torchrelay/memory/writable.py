"""Whether memory of this process can be written: a file mapped for reading cannot, and a write to
it ends the process. No torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

READ_ONLY = "its memory is mapped for reading alone; give a clone of it"
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


class ReadOnlyMemory:
    """The memory of this process that cannot be written, as it was when it was first asked for."""

    def __init__(self) -> None:
        self._found: tuple[Addresses, Addresses] | None = None

    def has(self, tensor: Any) -> bool:
        """Whether elements of a strided tensor on the host are in it."""
        # Memory of torch's own allocator can be made larger, and be written.
        if tensor.device.type != "cpu" or tensor.untyped_storage().resizable():
            return False
        begin = tensor.data_ptr()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        end = begin + (1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size()
        if not begin or not tensor.numel():
            return False
        if self._found is None:
            self._found = _read_only()
        starts, stops = self._found
        at = int(np.searchsorted(stops, np.uint64(begin), side="right"))
        return at < len(starts) and int(starts[at]) < end
