"""The machine that this process runs on."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def machine() -> str:
    """Which machine this is, while it runs; empty where that is not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
