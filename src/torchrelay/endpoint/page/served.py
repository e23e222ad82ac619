"""The steps of a server as its page shows them. No torch."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.endpoint.server.rank_reader import RankReader, SourceFault
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.errors import EndpointError
from torchrelay.inspection.seam import Contents, VolumeFacts
from torchrelay.plan.stored import StoredTensors
from torchrelay.record.encoding import decode_at_rest
from torchrelay.sources.access import Access
from torchrelay.stores.local.files import through
from torchrelay.stores.shares.layout import rank_of

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
    def source(self, step: int) -> Iterator[ServedReader]:
        """`KeyError` also where the step was replaced while it was read."""
        contents, service = self.contents(step), self._service
        with service.lock:
            found = service.snapshots.by_step(step)
            if found is None or not found.complete:
                raise KeyError(f"step {step}")
            reader = ServedReader(found, contents, service.access)
        try:
            yield reader
        finally:
            reader.close()
        with service.lock:
            if service.snapshots.by_id(found.id) is not found:
                raise KeyError(f"step {step}")


def _contents(one: ServedSnapshot) -> Contents:
    body = decode_at_rest(one.record)
    volumes = [
        VolumeFacts(f.name, f.nbytes, rank_of(f.name), f.chunk_bytes, f.digests)
        for f in body.volumes
    ]
    tensors = tuple(StoredTensors(body).listed())
    return Contents(one.step, len(body.ranks), tensors, volumes, torch=body.saved.torch)


class ServedReader:
    """Implements `StateReader` on a step in memory; other ranks are asked for their parts."""

    def __init__(self, step: ServedSnapshot, contents: Contents, access: Access) -> None:
        self.contents = contents
        self._step, self._ranks = step, RankReader(step, access)
        # Descriptors of its own: a slot may be given back while this reads.
        self._files = {
            name: (os.dup(part.slot.file.fileno()), volume.start)
            for part in step.parts.values()
            for name, volume in part.volumes.items()
        }

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        name = self._step.order[volume].name
        if name not in self._files:
            try:
                self._ranks.read_part(volume, start, view)
            except SourceFault as fault:
                rank = self._step.places[volume]
                raise EndpointError(f"rank {rank} did not send its part: {fault}") from fault
            return
        fd, first = self._files[name]
        if not through(os.preadv, fd, [view], first + start):
            raise EndpointError(f"{name} ends before byte {start + view.nbytes}")

    def close(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()
        self._ranks.close()
