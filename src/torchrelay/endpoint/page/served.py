"""The steps of a server as its page shows them. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.endpoint.server.step_reader import StepReader
from torchrelay.inspection.opened_state import Contents
from torchrelay.planning.stored import stored_tensors
from torchrelay.record.encoding import decode_at_rest

KEPT = 8  # steps whose contents are remembered, to tell what changed


class ServedWatch:
    """Implements `WatchedSteps` on what a server shows, and on what it showed not long ago."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: OrderedDict[int, tuple[str, Contents]] = OrderedDict()

    def steps(self) -> list[int]:
        with self._service.lock:
            listed = self._service.snapshots.listed
        for one in listed:
            if self._known.get(one.step, ("",))[0] != one.id:
                self._known[one.step] = (one.id, _contents(one))
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return sorted(self._known)

    def contents(self, step: int) -> Contents:
        self.steps()
        if step not in self._known:
            raise KeyError(f"step {step}")
        return self._known[step][1]

    @contextmanager
    def source(self, step: int) -> Iterator[StepReader]:
        """`KeyError` also where the step was replaced while it was read."""
        contents, service = self.contents(step), self._service
        with service.lock:
            found = service.snapshots.by_step(step)
            if found is None or not found.complete:
                raise KeyError(f"step {step}")
            reader = StepReader(found, contents, service.access)
        try:
            yield reader
        finally:
            reader.close()
        with service.lock:
            if service.snapshots.by_id(found.id) is not found:
                raise KeyError(f"step {step}")


def _contents(one: ServedSnapshot) -> Contents:
    body = decode_at_rest(one.record)
    tensors = tuple(stored_tensors(body))
    return Contents(one.step, len(body.ranks), tensors, body.volumes, torch=body.saved.torch)
