"""Steps at rest as a source: those of a directory or a bucket."""

from __future__ import annotations

import os

from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError
from torchrelay.memory.bounded import bounded
from torchrelay.sources.seam import Opened
from torchrelay.stores.locate import OBJECTS, open_store, scheme_of
from torchrelay.stores.opening import open_step
from torchrelay.stores.retry import Retry
from torchrelay.stores.seam import Store


class StoreSource:
    """A place with steps, by its name or as a `Store`."""

    def __init__(self, place: str | os.PathLike[str] | Store) -> None:
        self._store = open_store(place) if isinstance(place, (str, os.PathLike)) else place
        self.cost = 3 if scheme_of(self._store.url)[0] in OBJECTS else 2

    @property
    def name(self) -> str:
        return self._store.url

    def steps(self, deadline: Deadline) -> list[int]:
        def look() -> list[int]:
            try:
                return Retry(deadline.early)(self._store.steps)
            except OSError as fault:
                raise CheckpointError(
                    f"cannot list the steps: {fault.strerror or fault}", file=self.name
                ) from fault

        return bounded(look, deadline.early(), "list the steps", file=self.name)

    def open(self, step: int, deadline: Deadline) -> Opened:
        return bounded(
            lambda: open_step(self._store, step, Retry(deadline.early)),
            deadline.early(),
            "open the step",
            file=self.name,
        )
