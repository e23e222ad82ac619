"""The steps that are there: which hold, which go."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing, contextmanager

from torchrelay.checkpointer.keep import Keep, KeepAll
from torchrelay.checkpointer.saves.pending import logger
from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    StepNotFoundError,
    StepOrderError,
)
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.stores.opening import OpenedStep, open_newest, open_step
from torchrelay.stores.reading import Fetch, everything
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.stores.seam import Store


class Catalog:
    """A store's steps, and the policy that says which of them stay."""

    def __init__(self, store: Store, keep: Keep) -> None:
        self.store = store
        self._keep = keep
        self._damaged: set[int] = set()  # steps that a load found damaged

    @property
    def url(self) -> str:
        return self.store.url

    def steps(self, patience: Retry = ONCE) -> list[int]:
        with self._faults("list the steps"):
            return patience(self.store.steps)

    @contextmanager
    def _faults(
        self, what: str, step: int | None = None, missing: str | None = None
    ) -> Iterator[None]:
        """What the store's medium refuses, as errors that say where."""
        try:
            yield
        except CheckpointError:  # some are OSErrors too
            raise
        except OSError as fault:
            if missing is not None and isinstance(fault, FileNotFoundError):
                raise StepNotFoundError(f"{missing} in {self.url}", step=step) from None
            reason = fault.strerror or str(fault)
            if fault.errno == errno.EILSEQ:
                reason += "; rename or remove that object, or keep steps under another prefix"
            place = str(fault.filename or self.url)
            raise CheckpointError(f"cannot {what}: {reason}", step=step, file=place) from fault

    def clean(self) -> None:
        with self._faults("look for what writers left behind"):
            try:
                for name in self.store.clean():
                    logger.info("removed %s, left behind by a writer that is gone", name)
            except OSError as fault:
                if fault.errno != errno.EILSEQ:
                    raise
                logger.warning("what writers left behind stays: %s", fault)

    def latest(self) -> int | None:
        while True:
            steps = self.steps()
            found = next(filter(self.holds, reversed(steps)), None)
            # A step that was removed since it was listed has a successor.
            if found == (steps[-1] if steps else None) or self.steps() == steps:
                return found

    def open(self, step: int, patience: Retry = ONCE) -> OpenedStep:
        return open_step(self.store, step, patience)

    def verify(self, step: int | None, progress: ProgressCallback | None, patience: Retry) -> int:
        with self._faults("list the steps"):
            if step is None:
                held = open_newest(self.store, patience)
            else:
                held = self.open(step, patience)
        with closing(held):
            bar = Bar(progress, held.record.nbytes)
            wanted = everything(held.record)
            Fetch(held.files, held.record, wanted, progress=bar.add).check()
            return held.record.step

    def record(self, step: int) -> Checkpoint:
        """The commit record of a step. `DamagedError` unless it is whole and of that step."""
        with closing(self.open(step)) as held:
            return held.record

    def holds(self, step: int) -> bool:
        """Whether the commit record is whole and the files have the sizes it says.

        `CheckpointError` where that cannot be found out.
        """
        try:
            with closing(self.open(step)) as held, self._faults("look at a step", step):
                return held.holds()
        except (DamagedError, StepNotFoundError):
            return False

    def note_damaged(self, step: int) -> None:
        """A load found a step damaged: it counts neither for retention nor as the newest."""
        self._damaged.add(step)

    def check_order(self, step: int, *, overwrite: bool) -> None:
        """Raise `StepOrderError` for a step that a restart would pass over for a newer one.

        Replacing a step that is there is no such case.
        """
        steps = self.steps()
        newer = [found for found in steps if found > step and found not in self._damaged]
        if not newer or (overwrite and step in steps):
            return
        newest = next(filter(self.holds, reversed(newer)), None)
        if newest is not None:
            raise StepOrderError(
                f"step {step} is below the newest, {newest}, which a restart would take: "
                f"rollback({step}) sets the newer steps aside, or save under a higher number",
                step=step,
                file=self.url,
            )

    def rollback(self, step: int) -> list[int]:
        """Set aside every step above this one; the newest first, so that what a crash leaves is
        a rollback to a later step."""
        steps = self.steps()
        if step in steps and not self.holds(step):
            raise DamagedError(
                "the step does not hold, so it is none to go back to: verify() says why",
                step=step,
                file=self.url,
            )
        newer = [found for found in steps if found > step]
        for found in reversed(newer):
            with self._faults("set a step aside", found):
                self.store.set_aside(found)
        self._damaged.difference_update(newer)
        return newer

    def aside(self) -> list[str]:
        with self._faults("list what was set aside"):
            return self.store.aside()

    def remove_aside(self, name: str) -> None:
        with self._faults("remove", missing=f"nothing was set aside as {name!r}"):
            self.store.remove_aside(name)

    def delete(self, step: int) -> None:
        self._damaged.discard(step)
        with self._faults("delete", step, missing=f"no step {step}"):
            self.store.delete(step)

    def _counts(self, step: int) -> bool:
        """Whether a step counts for retention, as it is: it may have been damaged since."""
        try:
            return self.holds(step)
        except FormatError:  # what is not known stays
            return False

    def prune(self, committed: int) -> None:
        """Remove what the policy does not want, and never the step just committed. Never fails."""
        self._damaged.discard(committed)
        if isinstance(self._keep, KeepAll):
            return
        try:
            steps = [step for step in self.steps() if step not in self._damaged]
            good = sorted(filter(self._counts, steps))
            wanted = self._keep.wanted(good) | {*good[-1:], committed}
            for step in good:
                if step not in wanted:
                    self.delete(step)
        except Exception as fault:  # of a policy too: the step is committed all the same
            logger.warning("old steps could not be removed: %s: %s", type(fault).__name__, fault)
