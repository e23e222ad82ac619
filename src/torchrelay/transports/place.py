"""Where this process is, as far as it matters for reaching another one's memory.

Two processes compare what they say here; then the one that wants to read tries it on a few bytes.
Only the attempt counts in the end: a sandbox may refuse what the facts would allow.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from torchrelay.memory.side import in_use
from torchrelay.memory.vectors import OtherMemoryError, read_bytes
from torchrelay.transports import wire

TOKEN_BYTES = 16


@cache
def _machine() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@cache
def _pid_namespace() -> int:  # a process stays in its own
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def here() -> wire.Place:
    """This process's place."""
    return wire.Place(_machine(), os.getuid(), _pid_namespace(), os.getpid(), _devices())


def _devices() -> tuple[str, ...]:
    # Asked only where CUDA is in use already: the question itself would set it up.
    return _visible() if in_use() else ()


@cache
def _visible() -> tuple[str, ...]:
    return tuple(device_id(index) for index in range(torch.cuda.device_count()))


@cache
def device_id(index: int) -> str:
    """What all processes of a machine call this GPU."""
    return str(torch.cuda.get_device_properties(index).uuid)


def apart(mine: wire.Place, theirs: wire.Place) -> str:
    """Why the memory of a process there cannot be read from here; empty if it can be tried."""
    if not mine.machine or not theirs.machine:
        return "the system does not say which machine it is"
    if mine.machine != theirs.machine:
        return "another machine"
    if mine.user != theirs.user:
        return f"another user: {theirs.user} there, {mine.user} here"
    if mine.pids != theirs.pids:
        return "another PID namespace"
    return ""


class Beacon:
    """A random token in this process's memory and in a file that only it has open.

    A receiver that finds the token where it was told to look reads the process that it means to.
    """

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.pid = os.getpid()
        self.fd = os.memfd_create("torchrelay-beacon", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._map = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._map[:TOKEN_BYTES] = self.token
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


_beacon: Beacon | None = None
_lock = threading.Lock()


def beacon() -> Beacon | None:
    """The beacon of this process; None where the system has no such files."""
    global _beacon
    with _lock:
        # After a fork the child needs one of its own.
        if (_beacon is None or _beacon.pid != os.getpid()) and hasattr(os, "memfd_create"):
            _beacon = Beacon()
        return _beacon


def cannot_read(memory: wire.Memory) -> str:
    """Try to read the memory of the process; why not, or empty."""
    if len(memory.token) != TOKEN_BYTES or not 0 < memory.beacon < 1 << 64:
        return "the sender does not say how to recognise its memory"
    try:
        if read_bytes(memory.place.pid, memory.beacon, len(memory.token)) == memory.token:
            return ""
    except OtherMemoryError as fault:
        return f"the kernel does not let this process read the sender's memory: {fault.strerror}"
    return "another process has the sender's number"


def cannot_open(memory: wire.Memory) -> str:
    """Try to open a file of the process; why not, or empty."""
    if len(memory.token) != TOKEN_BYTES:
        return "the sender does not say how to recognise its files"
    try:
        fd = os.open(path_of(memory, memory.fd), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as fault:
        return f"the kernel does not let this process open the sender's files: {fault.strerror}"
    try:
        if os.pread(fd, len(memory.token), 0) == memory.token:
            return ""
    except OSError as fault:
        return f"the sender's files cannot be read: {fault.strerror}"
    finally:
        os.close(fd)
    return "another process has the sender's number"


def path_of(memory: wire.Memory, fd: int) -> str:
    return f"/proc/{memory.place.pid}/fd/{fd}"
