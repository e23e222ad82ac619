"""The one act that makes a draft a step, and the question whether it was done.

    with act.begun():       it is under way: from here on nobody can say that it will not happen
        ...                 an `OSError` says that it did not; `CommitUnknownError` that it may have

A save that gives up waiting for its commit revokes the act. Either that is in time, and a thread
that was left behind does not do it any more, or the outcome is unknown.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.errors import CommitUnknownError


class FinalAct:
    """Done once or revoked; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._revoked = False

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Within: the act is done. `OSError` if it was revoked before."""
        with self._lock:
            if self._revoked:
                raise OSError(errno.ECANCELED, "the save was given up")
            self._begun = True
        try:
            yield
        except OSError:
            self._begun = False
            raise

    def revoke(self) -> bool:
        """Whether it is certain that the act was not done, and will not be."""
        with self._lock:
            self._revoked = not self._begun
            return self._revoked


def unknown(step: int, why: str, file: str) -> CommitUnknownError:
    """An error that says what to do about it."""
    return CommitUnknownError(
        f"it is not known whether step {step} was committed: {why}. Look again: steps() says "
        f"whether it is there, verify({step}) whether it is whole; if it is not there, save it "
        "again",
        step=step,
        phase="commit",
        file=file,
    )
