"""The steps of a store: which are intact, which stay, which go."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from typing import NamedTuple

from torchrelay.checkpointer.keep import Keep, KeepAll
from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    StepNotFoundError,
    StepOrderError,
)
from torchrelay.pending import logger
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.schema import Record
from torchrelay.stores.listing import Listing
from torchrelay.stores.opening import open_step
from torchrelay.stores.reading.chunks import check_chunks
from torchrelay.stores.retry import Retry, storage_faults
from torchrelay.stores.store import Store

HEADROOM = 1 << 20  # bytes that a save leaves free: commit record, directory
LOOKED_AT = 2  # of the newest steps, at each save: a restart would take one of them


class _Checked(NamedTuple):
    """A step that was found intact: how the listing showed it, the sizes of its files, the metrics
    of its save, and whether its replicas differ."""

    shown: list[tuple[str, int]]
    sizes: Mapping[str, int]
    metrics: Mapping[str, float]
    marked: bool = False


class StepCatalog:
    """A store's steps, and the policy that says which of them stay."""

    def __init__(self, store: Store, keep: Keep, retained: Callable[[], set[int]] = set) -> None:
        """`retained`: steps that stay for now, whatever the policy says."""
        self.store = store
        self._keep, self._retained = keep, retained
        self.damaged: set[int] = set()  # steps that a load found damaged
        self.damage_seen = 0  # how often something was found damaged
        self._checked: dict[int, _Checked] = {}

    @property
    def url(self) -> str:
        return self.store.url

    # Looking.

    def steps(self) -> list[int]:
        with storage_faults("list the steps", self.url):
            return self.store.steps()

    def latest(self) -> int | None:
        while True:
            steps = self.steps()
            found = next(filter(self.holds, reversed(steps)), None)
            # A step that was removed since it was listed has a successor.
            if found == (steps[-1] if steps else None) or self.steps() == steps:
                return found

    def record(self, step: int) -> Record:
        """The commit record of a step. `DamagedError` unless it is whole and of that step."""
        with closing(open_step(self.store, step)) as opened:
            return opened.record

    def verify(self, step: int | None, progress: ProgressCallback | None, patience: Retry) -> int:
        with storage_faults("list the steps", self.url):
            opened = open_step(self.store, step, patience)
        with closing(opened):
            bar = Bar(progress, opened.record.volume_bytes)
            try:
                check_chunks(opened.files, opened.record, bar.add)
            except DamagedError:
                self.note_damage()
                raise
            assert opened.record.step is not None
            return opened.record.step

    def holds(self, step: int) -> bool:
        """Whether the commit record is whole and the files have the recorded sizes.

        `CheckpointError` if the storage does not tell.
        """
        return self._look(step, []) is not None

    def _look(self, step: int, shown: list[tuple[str, int]]) -> _Checked | None:
        """A step that is intact."""
        with suppress(DamagedError, StepNotFoundError):
            faults = storage_faults("look at a step", self.url)
            with closing(open_step(self.store, step)) as opened, faults:
                if opened.holds():
                    sizes = {file.name: file.nbytes for file in opened.record.volumes}
                    record = opened.record
                    return _Checked(shown, sizes, record.saved.metrics, record.mark is not None)
        return None

    def is_marked(self, step: int) -> bool:
        """Whether a step is intact, and its replicas differ."""
        found = self._look(step, [])
        return found is not None and found.marked

    def note_damaged(self, steps: Iterable[int]) -> None:
        """A load found steps damaged: they count neither for retention nor as the newest."""
        for step in steps:
            self.damaged.add(step)
            self.note_damage()

    def note_damage(self) -> None:
        """Bytes were found damaged, of whatever step."""
        self.damage_seen += 1

    # Before a save.

    def check_space(self, nbytes: int) -> None:
        """Raise `CheckpointError` if a step with that many bytes of data does not fit."""
        with storage_faults("look for free space", self.url):
            free = self.store.free_bytes()
        need = nbytes + HEADROOM
        if free is None or free >= need:
            return
        retained = self._keep.most()
        if retained is None:
            advice = f"keep={self._keep!r} allows steps that are never removed: free some space"
        else:
            advice = (
                f"keep={self._keep!r} retains {retained}, and a save writes one more before it "
                f"removes one, {(retained + 1) * nbytes:,} bytes in all: free some space, or "
                "retain fewer steps"
            )
        raise CheckpointError(
            f"no space: the step takes {need:,} bytes and {free:,} are free, "
            f"{need - free:,} are missing; {advice}",
            file=self.url,
        )

    def check_order(self, step: int, *, overwrite: bool) -> Listing:
        """Raise `StepOrderError` for a step that a restart would not take because of a newer one,
        which is not marked.

        Replacing an existing step is allowed. Returns the listing that it looked at.
        """
        with storage_faults("list the steps", self.url):
            listing = self.store.listing()
        newer = [found for found in listing if found > step and found not in self.damaged]
        if not newer or (overwrite and step in self.steps()):
            return listing
        newest = next(filter(self._is_preferred, reversed(newer)), None)
        if newest is not None:
            raise StepOrderError(
                f"step {step} is below the newest, {newest}, which a restart would take: "
                f"rollback({step}) deletes the newer steps, or save under a higher number",
                step=step,
                file=self.url,
            )
        return listing

    def _is_preferred(self, step: int) -> bool:
        """Whether a restart takes a step where it has the choice."""
        found = self._look(step, [])
        return found is not None and not found.marked

    # After a save.

    def prune(
        self,
        committed: int,
        sizes: Mapping[str, int],
        metrics: Mapping[str, float],
        *,
        marked: bool = False,
    ) -> None:
        """Remove the steps that the policy does not want, and never the newest that is not marked
        or the one just committed, which has files of these sizes and these metrics. Never fails."""
        self.damaged.discard(committed)
        if isinstance(self._keep, KeepAll):
            return
        try:
            with storage_faults("list the steps", self.url):
                listing = self.store.listing()
            saved = _Checked([], sizes, metrics, marked)
            self._checked = self._intact(listing, committed, saved)
            good = list(self._checked)
            right = [step for step, one in self._checked.items() if not one.marked]
            known = {step: one.metrics for step, one in self._checked.items()}
            wanted = self._keep.wanted_with(good, known) | self._retained()
            wanted |= {*good[-1:], *right[-1:], committed}
            for step in good:
                if step not in wanted:
                    self._drop(step, listing)
        except Exception as fault:  # also of a policy: the step is committed all the same
            logger.warning("old steps could not be removed: %s: %s", type(fault).__name__, fault)

    def _drop(self, step: int, listing: Listing) -> None:
        """Remove an old step. One that cannot be removed does not keep the others."""
        try:
            self.delete(step, listing)
        except StepNotFoundError:
            logger.info("step %d was removed by another process", step)
        except CheckpointError as fault:
            logger.warning("an old step could not be removed: %s", fault)

    def _intact(self, listing: Listing, committed: int, saved: _Checked) -> dict[int, _Checked]:
        """The steps that count for retention. One that was checked counts until the listing shows
        another in its place; only the newest ones are looked at again."""
        intact: dict[int, _Checked] = {}
        newest = [step for step in listing if step != committed][-LOOKED_AT:]
        for step, shown in listing.items():
            before = self._checked.get(step)
            if step == committed:
                intact[step] = saved._replace(shown=shown)
            elif step in self.damaged:
                continue
            elif (
                before is not None
                and before.shown == shown
                and (step not in newest or self._has_files(step, before.sizes))
            ):
                intact[step] = before
            else:
                # Of a bucket the listing does not show that a step was replaced: files of other
                # sizes do.
                with suppress(FormatError):  # written by a later version: it stays
                    if (found := self._look(step, shown)) is not None:
                        intact[step] = found
        return intact

    def _has_files(self, step: int, sizes: Mapping[str, int]) -> bool:
        try:
            with closing(self.store.open(step)) as opened:
                return sizes.items() <= opened.sizes().items()
        except OSError:
            return False

    # Removing.

    def delete(self, step: int, listing: Listing | None = None) -> None:
        self.damaged.discard(step)
        self._checked.pop(step, None)
        with storage_faults("delete", self.url, step):
            try:
                self.store.delete(step, listing)
            except FileNotFoundError:
                raise StepNotFoundError(f"no step {step} in {self.url}", step=step) from None

    def rollback(self, step: int) -> list[int]:
        """Delete every step above this one; the newest first, so that a crash leaves a rollback to
        a later step."""
        self.check_rollback(step)
        newer = [found for found in self.steps() if found > step]
        for found in reversed(newer):
            self.delete(found)
        return newer

    def check_rollback(self, step: int) -> None:
        """`DamagedError` where a run could not resume from a step."""
        if step in self.steps() and not self.holds(step):
            raise DamagedError(
                "the step is not intact, so a run cannot resume from it: verify() says why",
                step=step,
                file=self.url,
            )

    def clean(self) -> None:
        """Remove what dead writers left behind."""
        with storage_faults("look for what writers left behind", self.url):
            try:
                for name in self.store.clean():
                    logger.info("removed %s, left behind by a dead writer", name)
            except OSError as fault:
                if fault.errno != errno.EILSEQ:
                    raise
                logger.warning("drafts of dead writers stay: %s", fault)
