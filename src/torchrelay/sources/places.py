"""From what a caller names to a source; steps at rest, of a directory or a bucket, as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError, StepNotFoundError, UsageError
from torchrelay.files import is_dir
from torchrelay.memory.bounded import bounded
from torchrelay.sources.access import Access
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.source import Opened, Source
from torchrelay.stores.locate import OBJECTS, directory_at, open_store, scheme_of
from torchrelay.stores.opening import open_step
from torchrelay.stores.retry import Retry, storage_faults
from torchrelay.stores.store import Store


class StoreSource:
    """A directory or bucket, by its name or as a `Store`. A directory that is named must exist: a
    mistyped name is not an empty source. Nor is a place without steps that has what looks like one:
    to list its steps is a `StepNotFoundError` that says what was probably meant."""

    def __init__(self, place: str | os.PathLike[str] | Store) -> None:
        named = isinstance(place, (str, os.PathLike))
        self._store = open_store(place) if isinstance(place, (str, os.PathLike)) else place
        is_bucket = scheme_of(self._store.url)[0] in OBJECTS
        self.cost = 3 if is_bucket else 2
        self._directory = directory_at(self._store.url) if named and not is_bucket else None

    @property
    def name(self) -> str:
        return self._store.url

    def steps(self, deadline: Deadline) -> list[int]:
        def look() -> list[int]:
            if self._directory is not None and not is_dir(self._directory):
                raise CheckpointError(
                    "no such directory: check the path, or pass the Checkpointer of a new run",
                    file=self.name,
                )
            patience = _patience(deadline)
            with storage_faults("list the steps", self.name):
                found = patience(self._store.steps)
                other = "" if found else patience(self._store.lookalike)
                if not other or (found := patience(self._store.steps)):  # the first one, by now
                    return found
            raise StepNotFoundError(f"no step in {self.name}, which is not empty: {other}")

        return bounded(look, deadline.early(), "list the steps", file=self.name)

    def open(self, step: int, deadline: Deadline) -> Opened:
        return bounded(
            lambda: open_step(self._store, step, _patience(deadline)),
            deadline.early(),
            "open the step",
            file=self.name,
        )

    def end(self, reason: str = "", nbytes: int = 0) -> None:
        """Nothing: a store does not know its readers."""


def _patience(deadline: Deadline) -> Retry:
    """Reads that fail are tried again until there is just the time left to tell all ranks."""
    spare = min(2.0, deadline.seconds / 3)
    return Retry(lambda: deadline.left() - spare)


@runtime_checkable
class HasSource(Protocol):
    """A `Checkpointer` or a `Keeper`."""

    def source(self) -> Source: ...


Place = str | os.PathLike[str] | Sequence[str] | HasSource | Source


def as_source(
    place: Place, access: Access | None = None, *, same_host: bool = True, verify: bool = False
) -> Source:
    """The source that a URL, several URLs of endpoints, a path, a bucket's URL, a `Checkpointer` or
    a `Keeper` stands for, or a source itself. The options are those of endpoints."""
    if isinstance(place, str) and place.startswith(("http://", "https://")):
        place = [place]
    if isinstance(place, (str, os.PathLike)):
        return StoreSource(place)
    if isinstance(place, HasSource):
        return place.source()
    if isinstance(place, Source):
        return place
    if isinstance(place, Sequence) and place and all(isinstance(one, str) for one in place):
        return EndpointSource(place, access=access, same_host=same_host, verify=verify)
    raise UsageError(
        f"a source is a URL, a path, a Checkpointer, a Keeper or Relay.peer(rank), not {place!r}"
    )
