"""Failures of system calls that are this machine's own, whoever the call was for.

A connection that cannot be opened for want of a file descriptor looks like one that the other side
refused. Code that reports a peer as lost asks here first.
"""

from __future__ import annotations

import errno
import os
import socket

from torchrelay.errors import ResourceError
from torchrelay.system import most_open_files

# A resolver that cannot open its files knows no name, or fails with one of these: which one depends
# on the modules that the machine resolves names with.
_OF_A_RESOLVER = {errno.EBUSY, errno.EINVAL, errno.ENOENT, errno.EAGAIN}
_KERNEL = "the kernel has no memory for it: free memory, or see `dmesg`"
_CAUSES = {
    errno.ENFILE: "this machine has no more open files: raise fs.file-max, or close files",
    errno.ENOMEM: _KERNEL,
    errno.ENOBUFS: _KERNEL,
}


def shortage(fault: BaseException) -> ResourceError | None:
    """The error to raise where a failure is for want of something here; None for any other."""
    if isinstance(fault, ResourceError):
        return fault
    if not isinstance(fault, OSError):
        return None
    number = fault.errno
    if isinstance(fault, socket.gaierror) or number in _OF_A_RESOLVER:
        number = _no_descriptor() or number
    if number == errno.EMFILE:
        most = most_open_files()
        cause = (
            f"this process may have {most} files open, and has: raise the limit (ulimit -n), or "
            "close files"
        )
    else:
        cause = _CAUSES.get(number or 0, "")
    if not cause:
        return None
    return ResourceError(f"{os.strerror(number or 0)}: {cause}")


def raise_shortage(fault: BaseException, what: str = "") -> None:
    """Raise `ResourceError`, "cannot {what}: ...", if that is why something failed."""
    found = shortage(fault)
    if found is not None and found is not fault:
        found.message = f"cannot {what}: {found.message}" if what else found.message
        raise found from fault
    if found is not None:
        raise found


def _no_descriptor() -> int | None:
    """The errno of opening a file, where none can be opened."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as fault:
        return fault.errno
    return None
