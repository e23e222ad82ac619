"""Failures of storage: which reads are tried again, and how a failure is reported."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torchrelay.errors import CheckpointError, CommitUnknownError, RelayError
from torchrelay.shortage import raise_shortage

logger = logging.getLogger("torchrelay")

_PAUSES = (0.05, 1.0)  # seconds between tries: first, and after long silence

# Errors of the file or service itself, which another attempt does not change.
WRONG = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ENXIO,
        errno.ENODEV,
        errno.EFBIG,
    }
)
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBADF})

Result = TypeVar("Result")


def is_wrong(fault: OSError) -> bool:
    """Whether what is there is not a file that can be read at all: missing, a folder, a pipe."""
    return fault.errno in WRONG


class Retry:
    """How long reads that cannot be done are tried again: while `left` says that seconds remain."""

    def __init__(self, left: Callable[[], float] = lambda: 0.0) -> None:
        self._left = left

    def __call__(self, act: Callable[[], Result]) -> Result:
        pause, longest = _PAUSES
        logged = False
        while True:
            try:
                return act()
            except OSError as fault:
                if is_wrong(fault) or fault.errno in _REFUSED or self._left() <= pause:
                    raise
                if not logged:
                    logger.warning("cannot be read, and is tried again: %s", fault)
                logged = True
            time.sleep(pause)
            pause = min(2 * pause, longest)


ONCE = Retry()


def commit_unknown(step: int, why: str, file: str) -> CommitUnknownError:
    """The error of a commit whose outcome is unknown, with what to do about it."""
    return CommitUnknownError(
        f"it is not known whether step {step} was committed: {why}. Look again later: steps() "
        f"lists it if it was, and verify({step}) checks it; if it is missing, save it again",
        step=step,
        phase="commit",
        file=file,
    )


@contextmanager
def storage_faults(what: str, url: str, step: int | None = None) -> Iterator[None]:
    """Within: a failure of the medium is a `CheckpointError`, "cannot {what}", that names the
    file. `ResourceError` if this process lacks something, and the medium is not at fault."""
    try:
        yield
    except RelayError:  # some are OSErrors too
        raise
    except OSError as fault:
        raise_shortage(fault, what)
        reason = fault.strerror or str(fault)
        if fault.errno == errno.EILSEQ:
            reason += "; rename or remove that object, or keep steps under another prefix"
        file = str(fault.filename or url)
        raise CheckpointError(f"cannot {what}: {reason}", step=step, file=file) from fault
