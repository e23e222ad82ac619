"""A failed call leaves its exception behind, and no tensors in the frames of its traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def emptied_frames() -> Iterator[None]:
    """Within: an exception that leaves keeps no state alive. The library's frames that it leads to
    are over, and would hold their variables for as long as the exception lives, or for good if one
    of those variables leads to it."""
    try:
        yield
    except BaseException as fault:
        seen: set[int] = set()
        faults: list[BaseException | None] = [fault]
        while faults:
            one = faults.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            faults += [one.__cause__, one.__context__]
            for frame, _ in traceback.walk_tb(one.__traceback__):
                if frame.f_globals.get("__name__", "").startswith("torchrelay."):
                    with suppress(RuntimeError):  # a frame that still runs
                        frame.clear()
        raise
