"""A committed step with its record, ready to be read."""

from __future__ import annotations

from functools import cached_property

import xxhash

from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    FormatError,
    ManifestError,
    StepNotFoundError,
)
from torchrelay.record.encoding import decode_at_rest
from torchrelay.record.schema import Record
from torchrelay.shortage import raise_shortage
from torchrelay.stores.listing import MANIFEST
from torchrelay.stores.retry import ONCE, Retry, is_wrong
from torchrelay.stores.store import Store


class OpenedStep:
    """Its record and its files belong together, whatever takes the step's place meanwhile."""

    def __init__(self, store: Store, step: int, patience: Retry) -> None:
        self._step = step
        self._file = f"{store.url}/step-{step}/{MANIFEST}"
        self.files = store.open(step, patience)
        try:
            self._data = self.files.manifest()
        except BaseException:
            self.files.close()
            raise
        # Steps that are open with the same digest are of the same save.
        self.digest = xxhash.xxh3_128_digest(self._data)

    @cached_property
    def record(self) -> Record:
        """The commit record. `DamagedError` unless it is whole and of this step, `FormatError`
        where a later version of this library wrote it."""
        try:
            record = decode_at_rest(self._data)
            if record.step != self._step:
                raise ManifestError(f"it is that of step {record.step}")
        except ManifestError as fault:
            kind = FormatError if isinstance(fault, FormatError) else DamagedError
            raise kind(
                f"{MANIFEST}: {fault.message}", step=self._step, phase="verify", file=self._file
            ) from fault
        return record

    def holds(self) -> bool:
        """Whether the files have the sizes that the record says."""
        sizes = self.files.sizes()
        return all(sizes.get(file.name) == file.nbytes for file in self.record.volumes)

    def close(self) -> None:
        self.files.close()


def open_step(store: Store, step: int | None, patience: Retry = ONCE) -> OpenedStep:
    """Open a step, or the newest. `StepNotFoundError` if it does not exist, `DamagedError` where
    its record is not a file, `CheckpointError` where it cannot be read."""
    if step is None:
        return open_newest(store, patience)
    try:
        return OpenedStep(store, step, patience)
    except FileNotFoundError:
        raise StepNotFoundError(f"no step {step} in {store.url}", step=step) from None
    except (OSError, EOFError) as fault:
        raise_shortage(fault, f"read step {step} in {store.url}")
        wrong = isinstance(fault, EOFError) or is_wrong(fault)
        kind = DamagedError if wrong else CheckpointError
        reason = getattr(fault, "strerror", None) or str(fault)
        file = getattr(fault, "filename", None) or f"{store.url}/step-{step}/{MANIFEST}"
        raise kind(f"cannot be read: {reason}", step=step, phase="read", file=file) from fault


def open_newest(store: Store, patience: Retry = ONCE) -> OpenedStep:
    """Open the newest step; one that is replaced or removed meanwhile by its successor is not
    missed."""
    while True:
        steps = patience(store.steps)
        if not steps:
            raise StepNotFoundError(f"no step in {store.url}")
        try:
            return open_step(store, steps[-1], patience)
        except StepNotFoundError:
            if patience(store.steps) == steps:
                raise
