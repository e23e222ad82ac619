"""How much memory there is, and how much of it is left.

Linux promises more memory than it has, and kills processes when all of it is used. So large
blocks are compared with what is left, and refused with both figures. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from torchrelay.errors import ResourceError

CHECKED_BYTES = 64 << 20  # smaller blocks are taken unseen: a look costs about a millisecond
_UNLIMITED = 1 << 60
_MEMINFO = "/proc/meminfo"
_GROUPS = "/proc/self/cgroup"
_MOUNT = "/sys/fs/cgroup"
# By version of control groups: the files of the limit and of what is used, and the lines of
# `memory.stat` that the kernel takes back before it runs out.
_FILES = {
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
}


def check_free(nbytes: int) -> None:
    """`MemoryError` with figures if a block is larger than what is left."""
    if nbytes < CHECKED_BYTES:
        return
    free = free_bytes()
    if free is not None and nbytes > free:
        raise MemoryError(f"{nbytes} bytes of memory are needed, and {free} are free")


def take_free(nbytes: int, what: str) -> None:
    """`ResourceError`, "no memory for {what}", with the figures of `check_free`."""
    try:
        check_free(nbytes)
    except MemoryError as fault:
        raise ResourceError(f"no memory for {what}: {fault}") from None


def free_bytes() -> int | None:
    """The bytes that this process may still take, by the machine and by its control groups; None
    where the system does not say."""
    left = [max(group.limit - group.used, 0) for group in _groups()]
    with suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in _text(_MEMINFO).splitlines())
        kib = {line[0]: int(line[1]) for line in lines}
        left.append((kib["MemAvailable:"] + kib["SwapFree:"]) << 10)
    return min(left, default=None)


def total_bytes() -> int | None:
    """The bytes that this process and all others of its smallest control group may have together,
    or all processes of the machine; None where the system does not say."""
    limits = [group.limit for group in _groups()]
    with suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


class _ControlGroup(NamedTuple):
    """A control group that limits memory."""

    limit: int
    used: int  # without the pages that the kernel takes back before it runs out


def _groups() -> Iterator[_ControlGroup]:
    """The groups of this process, and all above them, that have a limit."""
    with suppress(OSError):
        for line in _text(_GROUPS).splitlines():
            _, names, path = line.split(":", 2)
            if names == "":
                yield from _groups_above(_MOUNT, path, 2)
            elif "memory" in names.split(","):
                yield from _groups_above(f"{_MOUNT}/memory", path, 1)


def _groups_above(mount: str, path: str, version: int) -> Iterator[_ControlGroup]:
    """In a container the path may be that of its host: then the groups that exist here count."""
    limit, used, reclaimed = _FILES[version]
    names = [name for name in path.split("/") if name not in ("", ".", "..")]
    for depth in range(len(names), -1, -1):
        folder = "/".join([mount, *names[:depth]])
        with suppress(OSError, ValueError):  # "max", or no such group here
            most = int(_text(f"{folder}/{limit}"))
            if most < _UNLIMITED:
                now = int(_text(f"{folder}/{used}"))
                lines = (line.split() for line in _text(f"{folder}/memory.stat").splitlines())
                cached = sum(int(line[1]) for line in lines if line and line[0] in reclaimed)
                yield _ControlGroup(most, now - min(cached, now))


def _text(path: str) -> str:
    with open(path) as file:
        return file.read(1 << 16)
