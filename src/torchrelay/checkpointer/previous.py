"""The committed step that a save takes unchanged files from: mostly the one that was saved last."""

from __future__ import annotations

from contextlib import closing, suppress

import msgspec

from torchrelay.checkpointer.catalog import StepCatalog
from torchrelay.errors import RelayError
from torchrelay.pending import logger
from torchrelay.record.schema import Record
from torchrelay.shares.reuse import KnownStep, Reuse
from torchrelay.stores.listing import Listing
from torchrelay.stores.opening import open_step
from torchrelay.stores.retry import storage_faults


class Previous(msgspec.Struct, array_like=True, frozen=True):
    """A step, as the coordinator names it to the ranks. `token`: of its draft, if this checkpointer
    saved it. `reused`: bytes that it took from its own predecessor; `since_full`: saves since the
    last that wrote everything."""

    step: int
    version: str
    token: str = ""
    reused: int = 0
    since_full: int = 0


class PreviousSteps:
    """Of one `Checkpointer`, on one rank."""

    def __init__(self, catalog: StepCatalog, reuse: Reuse, full_every: int | None) -> None:
        self.reuse = reuse
        self._catalog, self._full_every = catalog, full_every
        self._last: Previous | None = None
        self._refused: set[tuple[int, str]] = set()
        self._damage_seen = self._damage_left_behind = 0

    # On the coordinator.

    def choose(self, listing: Listing) -> Previous | None:
        """The step for the next save; None if that writes everything."""
        found = None
        with suppress(OSError, RelayError), storage_faults("look at a step", self._catalog.url):
            found = self._still(listing) or self._newest(listing)
        if found is None or (found.step, found.version) in self._refused:
            return None
        if self._full_every is not None and found.since_full + 1 >= self._full_every:
            return None
        return found

    def _still(self, listing: Listing) -> Previous | None:
        """The step that was saved last, if it is still there."""
        last = self._last
        if last is None or last.step not in listing or last.step in self._catalog.damaged:
            return None
        return last if self._catalog.store.version(last.step) == last.version else None

    def _newest(self, listing: Listing) -> Previous | None:
        """The newest step, if it is intact."""
        step = next((n for n in reversed(listing) if n not in self._catalog.damaged), None)
        if step is None:
            return None
        version = self._catalog.store.version(step)
        with closing(open_step(self._catalog.store, step)) as opened:
            if not opened.holds():
                return None
            saved = opened.record.saved
        return Previous(step, version, "", saved.reused, saved.since_full)

    def saved(self, step: int, token: str, reused: int, since_full: int) -> None:
        """A step was committed."""
        self._last = None
        with suppress(OSError):
            version = self._catalog.store.version(step)
            self._last = Previous(step, version, token, reused, since_full)

    def refuse(self, previous: Previous) -> None:
        """A save that took files from a step has failed: no other one takes any from it."""
        self._refused.add((previous.step, previous.version))

    # On every rank.

    def saw_damage(self) -> bool:
        """Whether this rank has seen damage, in whatever step, since a save wrote everything. Then
        the next one does: steps share files, and the state in memory has the true bytes."""
        self._damage_seen = self._catalog.damage_seen
        return self._damage_seen > self._damage_left_behind

    def wrote_everything(self) -> None:
        """A step was committed that took nothing from another."""
        self._damage_left_behind = self._damage_seen

    def known(self, previous: Previous | None) -> KnownStep | None:
        """A step, as far as this rank needs to know it; None if it cannot be read."""
        if previous is None:
            return None
        known = self.reuse.known(previous.step, previous.version, previous.token)
        if known is not None:
            return known
        try:
            record = self._record(previous)
        except (OSError, RelayError) as fault:
            logger.info("nothing is taken from step %d: %s", previous.step, fault)
            return None
        if record is None:
            return None
        return KnownStep(previous.step, previous.version, record=record)

    def _record(self, previous: Previous) -> Record | None:
        store = self._catalog.store
        with closing(open_step(store, previous.step)) as opened:
            same = store.version(previous.step) == previous.version
            return opened.record if same else None
