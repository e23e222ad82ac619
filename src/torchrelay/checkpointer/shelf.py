"""The steps that are there: which hold, which go."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torchrelay.checkpointer.keep import Keep, KeepAll
from torchrelay.checkpointer.pending import logger
from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    ManifestError,
    RelayError,
    StepNotFoundError,
)
from torchrelay.stores.reading import Fetch, everything
from torchrelay.stores.records import Checkpoint, decode
from torchrelay.stores.seam import Store

Progress = Callable[[int, int], None]


class Shelf:
    """A store's steps, and the policy that says which of them stay."""

    def __init__(self, store: Store, keep: Keep) -> None:
        self.store = store
        self._keep = keep
        self._good: set[int] = set()

    @property
    def url(self) -> str:
        return self.store.url

    def latest(self) -> int | None:
        for step in reversed(self.store.steps()):
            if self.holds(step):
                return step
        return None

    def verify(self, step: int | None, progress: Progress | None) -> int:
        if step is None:
            steps = self.store.steps()
            if not steps:
                raise StepNotFoundError(f"no step in {self.url}")
            step = steps[-1]
        record = self.record(step)
        bar = Bar(progress, record.nbytes)
        Fetch(self.store, record, everything(record), progress=bar.add).check()
        return step

    def record(self, step: int) -> Checkpoint:
        """The commit record of a step. `DamagedError` unless it is whole and of that step."""
        file = f"{self.url}/step-{step}/manifest.json"
        try:
            data = self.store.manifest(step)
        except FileNotFoundError:
            raise StepNotFoundError(f"no step {step} in {self.url}", step=step) from None
        except OSError as fault:
            raise DamagedError(f"cannot be read: {fault}", step=step, file=file) from fault
        try:
            record = decode(data)
        except ManifestError as fault:
            raise DamagedError(
                f"manifest.json: {fault.message}", step=step, phase="verify", file=file
            ) from fault
        if record.step != step:
            raise DamagedError(f"manifest.json is that of step {record.step}", step=step, file=file)
        return record

    def holds(self, step: int) -> bool:
        """Whether the commit record is whole and the files have the sizes it says."""
        try:
            record, sizes = self.record(step), self.store.sizes(step)
        except (RelayError, OSError):
            return False
        return all(sizes.get(file.name) == file.nbytes for file in record.files)

    def delete(self, step: int) -> None:
        self._good.discard(step)
        try:
            self.store.delete(step)
        except FileNotFoundError:
            raise StepNotFoundError(f"no step {step} in {self.url}", step=step) from None
        except OSError as fault:
            raise CheckpointError(f"cannot delete: {fault}", step=step, file=self.url) from fault

    def prune(self) -> None:
        """Remove what the policy does not want, once something newer is safe. Never fails."""
        if isinstance(self._keep, KeepAll):
            return
        try:
            steps = self.store.steps()
            self._good = {step for step in steps if step in self._good or self.holds(step)}
            good = sorted(self._good)
            wanted = self._keep.wanted(good) | set(good[-1:])
            for step in good:
                if step not in wanted:
                    self.delete(step)
        except (RelayError, OSError) as fault:
            logger.warning("old steps could not be removed: %s", fault)


class Bar:
    """Bytes done of all, for the caller's progress function."""

    def __init__(self, show: Progress | None, total: int = 0) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._done = 0
        self.total = total

    def add(self, nbytes: int) -> None:
        if self._show is not None:
            with self._lock:
                self._done += nbytes
                self._show(min(self._done, self.total), self.total)
