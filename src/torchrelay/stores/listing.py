"""The steps that a store lists, and the names of their files."""

from __future__ import annotations

import re
from collections.abc import Callable

from torchrelay.record.manifest import MAX_RECORD_BYTES

# The directories of each step, in ascending order: names, and numbers that are others if the step
# was replaced. Steps that are still being written may be among them.
Listing = dict[int, list[tuple[str, int]]]

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = MAX_RECORD_BYTES
DATA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors(\.index\.json)?")


def settled(look: Callable[[], Listing], committed: Callable[[Listing], list[int]]) -> list[int]:
    """The steps of a listing that are committed. One that was removed since it was listed has a
    successor, which may not be listed: then the listing is made again."""
    listing = look()
    while True:
        steps = committed(listing)
        if len(steps) == len(listing) or (again := look()) == listing:
            return steps
        listing = again
