"""Where this process is, as far as it matters for reaching another one's memory.

Two processes compare what they say here; then the one that wants to read sees for itself. What
counts in the end is what the kernel says: that the process with the other's number is of this user
and has a file with the claim that only the right rank can have made, and that it can be read. A
peer that lies gains nothing: it cannot have this process read itself, or a third one.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.machine import machine
from torchrelay.memory.gpu.side import in_use
from torchrelay.memory.sealed import keeps_bytes, memory_file, seal
from torchrelay.memory.vectors import OtherMemoryError, read_bytes
from torchrelay.transports.wire.messages import Place

_NAME = "torchrelay-claim"
_CLAIM = struct.Struct("<II16s")  # owner, reader, transfer


@cache
def _pid_namespace() -> int:  # a process stays in its own
    with suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def here() -> Place:
    """This process's place."""
    # Devices are asked for only where CUDA is in use already: the question itself would set it up.
    devices = map(device_id, range(torch.cuda.device_count() if in_use() else 0))
    return Place(machine(), os.getuid(), _pid_namespace(), os.getpid(), tuple(devices))


@cache
def device_id(index: int) -> str:
    """What all processes of a machine call this GPU."""
    return str(torch.cuda.get_device_properties(index).uuid)


def apart(mine: Place, theirs: Place) -> str:
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


class Process(NamedTuple):
    """A process of this machine, and where its claim is: in a file of it, and in its memory."""

    pid: int
    fd: int
    beacon: int


def claim(nonce: bytes, owner: int, reader: int, transfer: bytes) -> bytes:
    """The bytes by which a process proves to rank `reader` that it is rank `owner`'s.

    The reader made the nonce, so a claim of another process or an earlier transfer does not match.
    """
    return nonce + _CLAIM.pack(owner, reader, transfer)


class Proof:
    """A claim in memory of this process and in a file that only it has open.

    Bytes that a peer sends may come to lie at an address that it knows; in this file they cannot.
    `OSError` where the system has no such files.
    """

    def __init__(self, claim: bytes) -> None:
        self._fd = memory_file(_NAME)
        os.write(self._fd, claim)
        seal(self._fd)
        self._map = mmap.mmap(self._fd, len(claim), prot=mmap.PROT_READ)
        address = np.frombuffer(self._map, np.uint8).ctypes.data
        self.process = Process(os.getpid(), self._fd, address)

    def close(self) -> None:
        """Nobody looks at it any more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        with suppress(AttributeError):  # one that could not be made
            self.close()


def cannot_read(process: Process, claim: bytes) -> str:
    """Try to read the memory of the process; why not, or empty. It is known to be the right one."""
    try:
        if read_bytes(process.pid, process.beacon, len(claim)) == claim:
            return ""
    except OtherMemoryError as fault:
        return f"the kernel does not let this process read the sender's memory: {fault.strerror}"
    return "the sender's memory is not where it was said to be"


def cannot_open(process: Process, claim: bytes) -> str:
    """See whether the process is the one that claims to be; why that is not sure, or empty."""
    if len(claim) == _CLAIM.size or process.pid < 1 or process.fd < 0:
        return "the sender does not say how to recognise its process"
    if os.access(f"/proc/self/task/{process.pid}", os.F_OK):
        return "the sender names this process itself"
    try:
        with open(open_memfd(process, process.fd, os.O_RDONLY), "rb", buffering=0) as file:
            sealed = keeps_bytes(file.fileno())
            found = file.read(len(claim) + 1)
        user = _users(process.pid)
    except OSError as fault:
        return f"the kernel does not let this process open the sender's files: {fault.strerror}"
    if user != (os.getuid(), os.geteuid()):
        return f"another user: {user[0]} there, {os.getuid()} here"
    return "" if sealed and found == claim else "another process has the sender's number"


def open_memfd(process: Process, fd: int, flags: int) -> int:
    """Open a file of another process; `OSError` unless it is a memfd.

    Any other is not even opened: a FIFO would wait, a device might do something.
    """
    looked_at = os.open(f"/proc/{process.pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
    try:
        found = os.fstat(looked_at)
        if not stat.S_ISREG(found.st_mode) or found.st_dev != _memfd_device():
            raise OSError(errno.EINVAL, "the file is not a memfd")
        return os.open(f"/proc/self/fd/{looked_at}", flags | os.O_CLOEXEC)
    finally:
        os.close(looked_at)


@cache
def _memfd_device() -> int:
    """The device that every memfd of this machine is on, and nothing else."""
    fd = memory_file(_NAME)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _users(pid: int) -> tuple[int, int]:
    """Real and effective user of a process, as the kernel has it; `OSError` if there is none."""
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        _, found, rest = file.read(1 << 16).partition(b"\nUid:")
    if found:
        real, effective, *_ = map(int, rest.split(b"\n", 1)[0].split())
        return real, effective
    raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
