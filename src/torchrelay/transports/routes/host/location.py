"""Where a process runs, as far as it matters for reaching its memory from another one.

Two processes compare their locations first. Whether one can read the other is then found out by
`claims.py`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from torchrelay.machine import machine
from torchrelay.memory.gpu.side import in_use
from torchrelay.transports.wire.messages import ProcessLocation


@cache
def _pid_namespace() -> int:  # a process stays in its own
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def here() -> ProcessLocation:
    """Where this process runs."""
    # Devices are listed only if CUDA is in use already: listing them would set it up.
    devices = map(device_id, range(torch.cuda.device_count() if in_use() else 0))
    return ProcessLocation(machine(), os.getuid(), _pid_namespace(), os.getpid(), tuple(devices))


@cache
def device_id(index: int) -> str:
    """What all processes of a machine call this GPU."""
    return str(torch.cuda.get_device_properties(index).uuid)


def unreachable(mine: ProcessLocation, theirs: ProcessLocation) -> str:
    """Why the memory of a process there cannot be read from here; empty if it can be tried."""
    if not mine.machine or not theirs.machine:
        return "the system does not say which machine it is"
    if mine.machine != theirs.machine:
        return "another machine"
    if mine.user != theirs.user:
        return f"another user: {theirs.user} there, {mine.user} here"
    if mine.pids != theirs.pids:
        return "another PID namespace"
    if mine.pid and mine.pid == theirs.pid:
        return "this process itself"
    return ""
