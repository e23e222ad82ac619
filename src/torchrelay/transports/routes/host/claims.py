"""How a process makes sure that a process number of this machine is that of the rank it talks to.

The rank's process has a claim, which it alone can have made, in a file that no other process has
open and in its memory. Only what the kernel says counts: the process with that number is of this
user, has such a file, and can be read. A peer that lies gains nothing: it cannot have this process
read itself, or a third one.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import numpy as np

from torchrelay.memory.sealed import keeps_bytes, memory_file, seal
from torchrelay.memory.vectors import OtherMemoryError, read_bytes

_NAME = "torchrelay-claim"
_CLAIM = struct.Struct("<II16s")  # owner, reader, transfer


class Claimant(NamedTuple):
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
        self.claimant = Claimant(os.getpid(), self._fd, address)

    def close(self) -> None:
        """Nobody looks at it any more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        with suppress(AttributeError):  # one that could not be made
            self.close()


def cannot_read(claimant: Claimant, claim: bytes) -> str:
    """Try to read the memory of the process; why not, or empty. It is known to be the right one."""
    try:
        if read_bytes(claimant.pid, claimant.beacon, len(claim)) == claim:
            return ""
    except OtherMemoryError as fault:
        return f"the kernel does not let this process read the sender's memory: {fault.strerror}"
    return "the sender's memory is not where it was said to be"


def cannot_open(claimant: Claimant, claim: bytes) -> str:
    """See whether the process is the one that claims to be; why that is not sure, or empty."""
    if len(claim) == _CLAIM.size or claimant.pid < 1 or claimant.fd < 0:
        return "the sender does not say how to recognise its process"
    if os.access(f"/proc/self/task/{claimant.pid}", os.F_OK):
        return "the sender names this process itself"
    try:
        with open(open_memfd(claimant, claimant.fd, os.O_RDONLY), "rb", buffering=0) as file:
            sealed = keeps_bytes(file.fileno())
            found = file.read(len(claim) + 1)
        user = _users(claimant.pid)
    except OSError as fault:
        return f"the kernel does not let this process open the sender's files: {fault.strerror}"
    if user != (os.getuid(), os.geteuid()):
        return f"another user: {user[0]} there, {os.getuid()} here"
    return "" if sealed and found == claim else "another process has the sender's number"


def open_memfd(claimant: Claimant, fd: int, flags: int) -> int:
    """Open a file of another process; `OSError` unless it is a memfd.

    Any other is not even opened: a FIFO would wait, a device might do something.
    """
    looked_at = os.open(f"/proc/{claimant.pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
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
