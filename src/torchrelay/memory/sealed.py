"""Files of memory that others may map, and that keep their size, or all of their bytes.

Touching what was cut off a mapped file would end the process that does. A seal is a promise of the
kernel, so it can be trusted whoever made the file.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from torchrelay import system

_fcntl: Any = system.fcntl


def memory_file(name: str) -> int:
    """A descriptor of an empty file of memory that can be sealed; `OSError` where a system has no
    such files."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def sealed_memory(nbytes: int) -> int:
    """A descriptor of memory that stays as large as it is. It has no pages yet."""
    fd = memory_file("torchrelay-arena")
    try:
        os.ftruncate(fd, nbytes)
        _fcntl.fcntl(fd, _fcntl.F_ADD_SEALS, _fcntl.F_SEAL_SHRINK | _fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def keeps_size(fd: int) -> bool:
    """Whether a file of memory never becomes smaller."""
    return bool(_fcntl.fcntl(fd, _fcntl.F_GET_SEALS) & _fcntl.F_SEAL_SHRINK)


def seal(fd: int) -> None:
    """No process can change this file from now on."""
    _fcntl.fcntl(fd, _fcntl.F_ADD_SEALS, _all_seals())


def keeps_bytes(fd: int) -> bool:
    """Whether no process can change a file of memory."""
    return bool(_fcntl.fcntl(fd, _fcntl.F_GET_SEALS) & _all_seals() == _all_seals())


def _all_seals() -> int:
    seals = ("F_SEAL_WRITE", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")
    return sum(getattr(_fcntl, name) for name in seals)
