"""The steps of a server as its page looks into them. No torch."""

from __future__ import annotations

import http.client
import os
import ssl
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import ServedStep
from torchrelay.errors import EndpointError
from torchrelay.inspection.seam import Contents, VolumeFacts
from torchrelay.record.checkpoint.commit import decode
from torchrelay.sources.connection import Answered, Host
from torchrelay.stores.local.files import through
from torchrelay.stores.shares.layout import rank_of

KEPT = 8  # steps whose contents are remembered, to say what changed
READ_SECONDS = 60.0  # that another rank may take to give some bytes


class ServedWatch:
    """Implements `WatchedSteps` on what a server shows, and on what it showed not long ago."""

    def __init__(self, service: Service, token: str | None) -> None:
        self._service, self._token = service, token
        self._known: OrderedDict[int, tuple[str, Contents]] = OrderedDict()

    def steps(self) -> list[int]:
        for one in list(self._service.snapshots.listed):
            self._remember(one)
        return sorted(self._known)

    def _remember(self, one: ServedStep) -> Contents:
        known = self._known.get(one.step)
        if known is None or known[0] != one.id:
            known = self._known[one.step] = (one.id, _contents(one))
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return known[1]

    def contents(self, step: int) -> Contents:
        self.steps()
        if step not in self._known:
            raise KeyError(f"step {step}")
        return self._known[step][1]

    @contextmanager
    def source(self, step: int) -> Iterator[ServedSource]:
        """`KeyError` also where the step was replaced while it was looked at."""
        found = self._service.snapshots.by_step(step)
        if found is None:
            raise KeyError(f"step {step}")
        source = ServedSource(found, self._remember(found), self._token)
        try:
            yield source
        finally:
            source.close()
        if found not in self._service.snapshots.shown:
            raise KeyError(f"step {step}")


def _contents(one: ServedStep) -> Contents:
    body = decode(one.record)
    volumes = [
        VolumeFacts(f.name, f.nbytes, rank_of(f.name), f.chunk_bytes, f.digests) for f in body.files
    ]
    return Contents(one.step, body.world, tuple(body.tensors), volumes, torch=body.torch)


class ServedSource:
    """Implements `StateReader` on a step in memory; other ranks are asked for their parts."""

    def __init__(self, step: ServedStep, contents: Contents, token: str | None) -> None:
        self.contents = contents
        self._step, self._token = step, token
        # Descriptors of its own: a slot may be given back while this reads.
        self._files = {
            name: (os.dup(part.slot.file.fileno()), volume.start)
            for part in step.parts.values()
            for name, volume in part.volumes.items()
        }
        self._hosts: dict[int, Host] = {}

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        name = self._step.order[volume].name
        if name not in self._files:
            self._fetch(volume, start, view)
            return
        fd, first = self._files[name]
        if not through(os.preadv, fd, [view], first + start):
            raise EndpointError(f"{name} ends before byte {start + view.nbytes}")

    def _fetch(self, volume: int, start: int, view: memoryview) -> None:
        rank = self._step.places[volume]
        if rank not in self._hosts:
            context = ssl.create_default_context()
            self._hosts[rank] = Host(self._step.ranks[rank], token=self._token, context=context)
        host = self._hosts[rank]
        path = f"/volumes/{self._step.id}/{self._step.order[volume].name}"
        try:
            for _ in host.read(path, start, [view], seconds=READ_SECONDS):
                pass
        except (OSError, Answered, http.client.HTTPException) as fault:
            raise EndpointError(
                f"rank {rank} at {host.url} did not give its part: {fault}"
            ) from fault

    def close(self) -> None:
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()
        for host in self._hosts.values():
            host.close()
