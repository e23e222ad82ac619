"""How much memory is left, asked before much of it is taken.

Linux promises more memory than it has, and kills processes when all of it is used. So large
blocks are compared with what is left, and refused with both figures. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

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
    found = [*_of_machine(), *_of_groups()]
    return min(found, default=None)


def _of_machine() -> Iterator[int]:
    with suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in _text(_MEMINFO).splitlines())
        kib = {line[0]: int(line[1]) for line in lines}
        yield (kib["MemAvailable:"] + kib["SwapFree:"]) << 10


def _of_groups() -> Iterator[int]:
    """The memory left by each group of this process, and by each above it."""
    with suppress(OSError):
        for line in _text(_GROUPS).splitlines():
            _, names, path = line.split(":", 2)
            if names == "":
                yield from _up(_MOUNT, path, 2)
            elif "memory" in names.split(","):
                yield from _up(f"{_MOUNT}/memory", path, 1)


def _up(mount: str, path: str, version: int) -> Iterator[int]:
    """In a container the path may be that of its host: then the groups that are there count."""
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
                yield max(most - now + min(cached, now), 0)


def _text(path: str) -> str:
    with open(path) as file:
        return file.read(1 << 16)
