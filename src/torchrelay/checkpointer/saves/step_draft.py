"""A step on its way, as a save sees it: within the save's deadline, with errors that say where.

A save ends in one of three ways, and this is where it is decided which:

    committed        `commit` returned, or `look` found the step in place
    not committed    any error but `CommitUnknownError`; a commit that was left behind is revoked
    unknown          `CommitUnknownError`: the act that counts was begun, and nobody knows its end
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from torchrelay.checkpointer.saves.pending import logger
from torchrelay.deadlines import Deadline, Stopwatch
from torchrelay.errors import CheckpointError, RelayError, StepExistsError, StorageTimeoutError
from torchrelay.memory.bounded import bounded
from torchrelay.progress import ProgressCallback
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.stores.local.final_act import unknown
from torchrelay.stores.seam import Draft, Store
from torchrelay.stores.shares.drafting import check_files, sealed
from torchrelay.stores.shares.plans import Outlines
from torchrelay.transports.group.assembly import Call

HEADROOM = 1 << 20  # bytes kept free beside the data: commit record, directory
GRACE = 0.5  # seconds past the deadline for a look, or for cleaning up

Result = TypeVar("Result")


@dataclass
class Save:
    """One save under way on this rank."""

    step: int
    overwrite: bool
    call: Call
    deadline: Deadline
    progress: ProgressCallback | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)
    token: str = ""
    mark: str = ""
    planned: bool = False  # whether every rank has its plan, and awaits the others' last word
    draft: StepDraft | None = None
    outlines: Outlines | None = None


class StepDraft:
    """One of these on every rank. The coordinator calls `begin`, and `commit` or `discard`."""

    def __init__(
        self, store: Store, step: int, token: str, deadline: Deadline, *, overwrite: bool
    ) -> None:
        self._store = store
        self._step = step
        self._deadline = deadline
        self._place = f"{store.url}/step-{step}"
        self.files: Draft = store.draft(step, token, overwrite=overwrite)

    def begin(self, nbytes: int) -> str:
        """Is there room, and is the step free? The mark by which ranks know the step later."""
        given_up = threading.Event()

        def act() -> None:
            self._check_room(nbytes)
            self.files.begin()
            if given_up.is_set():
                self.files.discard()

        exists = f"step {self._step} is committed: pass overwrite=True to replace it"
        with self._faults("plan", "begin a step", exists):
            try:
                self._bounded("begin a step", act)
            except StorageTimeoutError:
                given_up.set()
                raise
        return self.files.mark

    def _check_room(self, nbytes: int) -> None:
        free = self._store.free_bytes()
        need = nbytes + HEADROOM
        if free is not None and free < need:
            raise CheckpointError(
                f"no room: the step takes {need:,} bytes, {free:,} are free, "
                f"{need - free:,} are missing",
                file=self._store.url,
            )

    def commit(self, record: Checkpoint) -> None:
        """Make it the step, if it has what the record says."""
        manifest = sealed(record)

        def act() -> None:
            check_files(self.files, record)
            self.files.commit(manifest)

        exists = f"step {self._step} was committed by another writer meanwhile"
        with self._faults("commit", "commit", exists):
            try:
                self._bounded("commit", act)
            except StorageTimeoutError as late:
                if self.files.revoke():
                    raise
                why = "the storage was asked, and did not answer in time"
                raise unknown(self._step, why, self._place) from late

    def look(self, mark: str, silence: CheckpointError) -> None:
        """Nobody said how the commit went. Returns if the step is in place; else it is not
        known."""
        found = None
        with suppress(OSError, RelayError):
            found = bounded(lambda: self._store.mark(self._step), GRACE, "look for the step")
        if found != mark:
            fault = unknown(self._step, silence.message, self._place)
            fault.rank = silence.rank
            raise fault from silence

    def discard(self) -> None:
        """Remove what was written; never raises. Storage that does not answer keeps it until a
        process cleans up."""
        try:
            bounded(self.files.discard, max(GRACE, self._deadline.left()), "remove the draft")
        except StorageTimeoutError as late:
            logger.warning("the draft of step %d stays: %s", self._step, late.message)

    def _bounded(self, what: str, act: Callable[[], Result]) -> Result:
        return bounded(act, self._deadline.early(), what, file=self._store.url)

    @contextmanager
    def _faults(self, phase: str, what: str, exists: str) -> Iterator[None]:
        """What the store's medium refuses, as errors that say step, phase and file."""
        try:
            yield
        except RelayError as fault:
            fault.step, fault.phase = self._step, phase
            raise
        except OSError as fault:
            taken = isinstance(fault, FileExistsError)
            kind = StepExistsError if taken else CheckpointError
            raise kind(
                exists if taken else f"cannot {what}: {fault.strerror or fault}",
                step=self._step,
                phase=phase,
                file=str(fault.filename or self._store.url),
            ) from fault
