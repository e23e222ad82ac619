"""The one operation that turns a draft into a step, and whether it was carried out.

    with self.passing():    from here on no one can say that it will not happen
        ...                 `OSError`: it did not happen; `CommitUnknownError`: it may have

A save that stops waiting for its commit revokes it. Either that is in time, and the thread that was
left behind does not commit any more, or the outcome is unknown.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.errors import CommitUnknownError


class CommitPoint:
    """The part of a draft that is passed once or revoked; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passing = False
        self._revoked = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within: the commit is carried out. `OSError` if it was revoked before."""
        with self._lock:
            if self._revoked:
                raise OSError(errno.ECANCELED, "the save was given up")
            self._passing = True
        try:
            yield
        except OSError:
            self._passing = False
            raise

    def revoke(self) -> bool:
        """Whether it is certain that the commit did not happen, and will not."""
        with self._lock:
            self._revoked = not self._passing
            return self._revoked


def commit_unknown(step: int, why: str, file: str) -> CommitUnknownError:
    """The error of a commit whose outcome is unknown, with what to do about it."""
    return CommitUnknownError(
        f"it is not known whether step {step} was committed: {why}. Look again later: steps() "
        f"lists it if it was, and verify({step}) checks it; if it is missing, save it again",
        step=step,
        phase="commit",
        file=file,
    )
