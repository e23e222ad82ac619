"""A step being written, as a save sees it: within the time of the save, with errors that say where.

A save ends in one of three ways, which is decided here:

    committed        `commit` returned, or `look` found the step in place
    not committed    any error but `CommitUnknownError`; a commit that was left behind is revoked
    unknown          `CommitUnknownError`: the commit was begun, and its outcome is not known
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from torchrelay.errors import CheckpointError, RelayError, StepExistsError, StorageTimeoutError
from torchrelay.memory.bounded import bounded
from torchrelay.pending import logger
from torchrelay.record.schema import Record
from torchrelay.shares.commit_record import check_files, sealed
from torchrelay.stores.draft import Draft
from torchrelay.stores.listing import Listing
from torchrelay.stores.retry import commit_unknown, storage_faults
from torchrelay.stores.store import Store

GRACE = 0.5  # seconds past the deadline for a look, or for cleaning up


class StepDraft:
    """Every rank has one. The coordinator calls `begin`, and `commit` or `discard`; the others know
    the draft by its token, its id and its path or URL on the coordinator. Each call takes at most
    as many seconds as `left` returns."""

    def __init__(
        self, store: Store, step: int, token: str, left: Callable[[], float], *, overwrite: bool
    ) -> None:
        self._store, self._step, self._left = store, step, left
        self.token = token
        self.files: Draft = store.draft(step, token, overwrite=overwrite)
        self.id = ""

    def begin(self, listing: Listing | None = None) -> None:
        """Create it, unless the step exists and may not be replaced; see `Draft.begin`."""
        abandoned = threading.Event()

        def act() -> None:
            self.files.begin(listing)
            if abandoned.is_set():
                self.files.discard()

        exists = f"step {self._step} is committed: pass overwrite=True to replace it"
        self._carry_out("plan", "begin a step", act, exists, abandoned)
        self.id = self.files.id

    def check_visible(self, rank: int, place: str) -> None:
        """`CheckpointError` unless this rank sees the draft; the coordinator has it at `place`."""
        look, url = self.files.check_visible, self._store.url
        try:
            bounded(look, self._left(), "look for the draft", file=url)
        except FileNotFoundError:
            raise CheckpointError(
                f"rank {rank} does not see {place}, which rank 0 created: is it on a shared file "
                f"system? Rank {rank} has {url}",
                rank=rank,
                step=self._step,
                phase="plan",
                file=self.files.place,
            ) from None

    def commit(self, record: Record) -> None:
        """Make it the step, if it has what the record says."""
        manifest = sealed(record)

        def act() -> None:
            check_files(self.files, record)
            self.files.commit(manifest)

        exists = f"another writer committed step {self._step} meanwhile: give each job its root"
        try:
            self._carry_out("commit", "commit", act, exists)
        except StorageTimeoutError as overdue:
            if self.files.revoke():
                raise
            raise self._unknown("the storage did not answer in time") from overdue

    def look(self, silence: CheckpointError) -> None:
        """This rank does not know how the commit ended. Returns if the step is in place; otherwise
        its outcome is unknown."""
        found = None
        with suppress(OSError, RelayError):
            found = bounded(lambda: self._store.draft_id(self._step), GRACE, "look for the step")
        if found != self.id:
            fault = self._unknown(silence.message)
            fault.rank = silence.rank
            raise fault from silence

    def _unknown(self, why: str) -> CheckpointError:
        return commit_unknown(self._step, why, f"{self._store.url}/step-{self._step}")

    def discard(self) -> None:
        """Remove what was written; never raises. If the storage does not answer, the draft stays
        until a process cleans up."""
        try:
            bounded(self.files.discard, max(GRACE, self._left()), "remove the draft")
        except StorageTimeoutError as overdue:
            logger.warning("the draft of step %d stays: %s", self._step, overdue.message)

    def _carry_out(
        self,
        phase: str,
        what: str,
        act: Callable[[], None],
        exists: str,
        left: threading.Event | None = None,
    ) -> None:
        """Do it in time. Failures of the medium are errors with step, phase and file."""
        url = self._store.url
        try:
            with storage_faults(what, url):
                try:
                    bounded(act, self._left(), what, file=url, left=left)
                except FileExistsError as fault:
                    text = f"Checkpoint already exists: {exists}"
                    raise StepExistsError(text, file=str(fault.filename or url)) from fault
        except RelayError as fault:
            fault.step, fault.phase = self._step, phase
            raise
