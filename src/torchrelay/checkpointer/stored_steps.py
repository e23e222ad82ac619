"""The steps of a root and perhaps of its mirror: what is read there, and what is removed.

A step that is removed is removed from the mirror first: a restart would take it from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress

from torchrelay.checkpointer.catalog import StepCatalog
from torchrelay.checkpointer.keep import Keep
from torchrelay.checkpointer.mirror import MirrorSteps
from torchrelay.coordination.call import Call
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline
from torchrelay.errors import DamagedError, RecoveryError, StepNotFoundError
from torchrelay.loading.first_start import has_steps
from torchrelay.loading.loader import Loader, LoadRequest
from torchrelay.mirror.source import MirroredSource, sources_of
from torchrelay.results import Loaded
from torchrelay.sources.places import StoreSource
from torchrelay.sources.source import Source
from torchrelay.stores.store import Store


class StoredSteps:
    """`catalog`: the steps of the root."""

    def __init__(self, root: Store, keep: Keep, mirror: MirrorSteps | None) -> None:
        self._mirror = mirror
        self.catalog = StepCatalog(root, keep, set if mirror is None else mirror.retained)

    def source(self) -> Source:
        """The steps of both."""
        root = StoreSource(self.catalog.store)
        if self._mirror is None:
            return root
        return MirroredSource(root, self._mirror.source(), self.catalog.note_damage)

    @property
    def mirror_failures(self) -> int:
        return 0 if self._mirror is None else self._mirror.failures

    # Reading. All ranks call it together.

    def load(
        self, ranks: Coordinator, call: Call, request: LoadRequest, deadline: Deadline
    ) -> Loaded:
        """Load a step of either."""
        loader = Loader(self.source(), ranks)
        with ranks.measured("load", request.step) as measured:
            try:
                loaded = loader.load(call, request, deadline)
            except DamagedError:
                self.catalog.note_damage()
                raise
            finally:
                self._note_damaged(loader.damaged)
            measured.end(loaded.report)
        return loaded

    def restore(
        self, ranks: Coordinator, call: Call, request: LoadRequest, deadline: Deadline
    ) -> int | None:
        """Load the newest step; None on every rank if there is none."""
        try:
            sources = sources_of(self.source())
            if not any(has_steps(source, ranks.rank, call, deadline) for source in sources):
                return None
            step = self.load(ranks, call, request, deadline).step
        except StepNotFoundError as fault:
            raise RecoveryError(
                f"{fault.message}: repair or remove it, and do not start at step 0",
                rank=fault.rank,
                phase="restore",
                file=fault.file,
            ) from fault
        if self._mirror is not None and step is not None:
            self._mirror.restored(step)
        return step

    def _note_damaged(self, steps: Iterable[int]) -> None:
        """A load found steps damaged, wherever it read them."""
        self.catalog.note_damaged(steps)
        if self._mirror is not None:
            self._mirror.note_damaged(steps)

    # On the coordinator.

    def committed(self, step: int, replaces: bool) -> None:
        """A step is in the root, perhaps in place of another save of it. Returns at once."""
        if self._mirror is not None:
            self.catalog.note_damaged(self._mirror.take_damaged())
            self._mirror.committed(step, replaces=replaces)

    def rollback(self, step: int) -> list[int]:
        """Delete every step above one; returns them."""
        if self._mirror is None:
            return self.catalog.rollback(step)
        self.catalog.check_rollback(step)
        newer = {found for found in self.catalog.steps() if found > step}
        mirrored = self._mirror.rollback(step, newer)
        return sorted(mirrored.union(self.catalog.rollback(step)))

    def delete(self, step: int) -> None:
        mirrored = self._mirror is not None and self._mirror.delete(step)
        with suppress(StepNotFoundError) if mirrored else nullcontext():
            self.catalog.delete(step)

    # The end.

    def close(self, seconds: float) -> None:
        """Wait for a copy to the mirror."""
        if self._mirror is not None:
            self._mirror.close(seconds)

    def detach_after_fork(self) -> None:
        if self._mirror is not None:
            self._mirror.detach_after_fork()
