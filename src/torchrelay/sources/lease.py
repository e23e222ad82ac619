"""What a process and an endpoint of the same host say to each other about memory. No torch."""

from __future__ import annotations

import msgspec


class Wish(msgspec.Struct, array_like=True):
    """What a process asks for: the memory of a step, or one part of it, for a reader."""

    snapshot: str
    reader: str
    part: int = 0


class MemoryLease(msgspec.Struct, array_like=True):
    """What it gets, with a descriptor: bytes of the memory, and for each volume where it lies in it
    and how large it is. `why` it gets none. `parts`: of how many memories the step is."""

    nbytes: int
    volumes: dict[str, tuple[int, int]]
    why: str = ""
    parts: int = 1


class LocalFacts(msgspec.Struct):
    """`/local.json`: the machine that an endpoint is on, and the name of its Unix socket there."""

    machine: str
    socket: str
