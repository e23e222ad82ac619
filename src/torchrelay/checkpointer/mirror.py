"""`Mirror`: a second place for the steps of a `Checkpointer`, and those that are in it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torchrelay.checkpointer.catalog import StepCatalog
from torchrelay.checkpointer.keep import Keep, policy
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.errors import RelayError, StepNotFoundError, UsageError
from torchrelay.memory.bounded import bounded
from torchrelay.mirror.background import MirrorHooks, Mirroring, MirrorPlaces
from torchrelay.pending import logger
from torchrelay.sources.places import StoreSource
from torchrelay.stores.locate import OBJECTS, open_store, scheme_of
from torchrelay.stores.retry import storage_faults
from torchrelay.stores.store import Store
from torchrelay.system import needs_linux


@dataclass(frozen=True)
class Mirror:
    """A directory or a bucket that committed steps are copied to, by a process in the background.

    - `every`: the first step that a `Checkpointer` commits or restores is copied, and then every
      `every`-th that it commits. Where the mirror falls behind, only the newest of them is copied.
    - `keep`: which steps to retain there, as for `Checkpointer`.
    """

    url: str | os.PathLike[str]
    every: int = field(default=1, kw_only=True)
    keep: Keep | int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        scheme_of(self.url)
        if type(self.every) is not int or self.every < 1:
            raise UsageError(f"every is a number of steps, at least 1, not {self.every!r}")
        policy(self.keep)


class MirrorSteps:
    """The mirror of a checkpointer. Every rank reads from it; the coordinator copies to it."""

    def __init__(
        self, mirror: Mirror, root: Store, ranks: Coordinator, timeout: float, *, copies: bool
    ) -> None:
        if copies:
            needs_linux("a mirror that steps are copied to")
        self._store = open_store(mirror.url, timeout=timeout)
        _check_places(root.url, self._store.url)
        self._ranks, self._timeout = ranks, timeout
        self._catalog = StepCatalog(self._store, policy(mirror.keep))
        self._damaged: list[int] = []  # steps of the root that a copy found so
        self._mirroring: Mirroring | None = None
        if copies and ranks.coordinates:
            places = MirrorPlaces(root.url, self._store.url, timeout)
            hooks = MirrorHooks(
                partial(ranks.measured, "mirror"),
                lambda: sorted(self._catalog.damaged),
                self._prune,
                self._damaged.append,
            )
            self._mirroring = Mirroring(places, mirror.every, hooks)

    @property
    def url(self) -> str:
        return self._store.url

    def source(self) -> StoreSource:
        return StoreSource(self._store)

    @property
    def failures(self) -> int:
        return 0 if self._mirroring is None else self._mirroring.failures

    def retained(self) -> set[int]:
        """The steps of the root that are to stay until they are copied."""
        return set() if self._mirroring is None else self._mirroring.retained

    def take_damaged(self) -> list[int]:
        """The steps of the root that copies have found damaged since the last call."""
        found, self._damaged[:] = list(self._damaged), []
        return found

    def committed(self, step: int, *, replaces: bool) -> None:
        if self._mirroring is not None:
            self._mirroring.committed(step, replaces=replaces)

    def restored(self, step: int) -> None:
        if self._mirroring is not None:
            self._mirroring.restored(step)

    def note_damaged(self, steps: Iterable[int]) -> None:
        """A load found these steps damaged, wherever it read them."""
        self._catalog.note_damaged(steps)

    def _prune(self, step: int, sizes: Mapping[str, int], metrics: Mapping[str, float]) -> None:
        act = partial(self._catalog.prune, step, sizes, metrics)
        try:
            bounded(act, self._timeout, "remove old steps", file=self.url)
        except RelayError as overdue:
            logger.warning("%s", overdue)

    # Before steps of the root are removed: a restart would take them from here.

    def delete(self, step: int) -> bool:
        """Remove a step. Whether it was there."""
        self._forget({step})
        try:
            self._catalog.delete(step)
        except StepNotFoundError:
            return False
        return True

    def rollback(self, step: int, newer: set[int]) -> set[int]:
        """Remove every step above one; returns them. `newer`: those of the root."""
        self._forget(newer)
        with storage_faults("list the steps", self.url):
            found = [one for one in self._store.steps() if one > step]
        for one in reversed(found):
            self._catalog.delete(one)
        return set(found)

    def _forget(self, steps: set[int]) -> None:
        if self._mirroring is not None:
            self._mirroring.forget(steps, self._timeout)

    # The end.

    def close(self, seconds: float) -> None:
        if self._mirroring is not None:
            self._mirroring.close(seconds)

    def detach_after_fork(self) -> None:
        if self._mirroring is not None:
            self._mirroring.detach_after_fork()


def open_mirror(
    mirror: Mirror | str | os.PathLike[str] | None,
    root: Store,
    ranks: Coordinator,
    timeout: float,
    *,
    copies: bool,
) -> MirrorSteps | None:
    """The mirror that a caller names: as one, or by its place."""
    if mirror is None:
        return None
    named = mirror if isinstance(mirror, Mirror) else Mirror(mirror)
    return MirrorSteps(named, root, ranks, timeout, copies=copies)


def _check_places(root: str, mirror: str) -> None:
    """`UsageError` where the mirror is the root."""
    same = root == mirror
    if not same and {scheme_of(root)[0], scheme_of(mirror)[0]}.isdisjoint(OBJECTS):
        same = Path(root).resolve() == Path(mirror).resolve()
    if same:
        raise UsageError(f"the mirror is another place than the root, not {mirror} too")
