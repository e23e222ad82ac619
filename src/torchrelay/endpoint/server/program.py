"""The process that serves a staged state: HTTP and digests outside the trainer's interpreter.

A trainer starts it with a socket (`stores.writer.launch`). It imports no torch, and ends when the
trainer's end of the socket closes, however that came about.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import msgspec

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.serving import Serving, obey
from torchrelay.stores.writer.launch import trainer_at

_request = msgspec.msgpack.Decoder(m.ServerRequest)


class Program:
    """Carries out what the trainer asks for."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._serving = Serving()
        self._hold = 0.0
        self._over = asyncio.Event()

    async def run(self) -> None:
        threading.Thread(target=self._obey, name="torchrelay-control", daemon=True).start()
        await self._over.wait()
        await self._serving.close()

    def _obey(self) -> None:
        obey(self._link, self._do)
        self._serving.call_soon(self._over.set)

    def _do(self, data: bytes) -> m.ServerAnswer:
        request, serving = _request.decode(data), self._serving
        if isinstance(request, m.Listen):
            self._hold = request.hold
            return serving.on_loop(serving.listen(request))
        if isinstance(request, m.Hash):
            return serving.hashed(request)
        if isinstance(request, m.Reclaim):
            return serving.on_loop(self._reclaim(request.slot, request.ask))
        if isinstance(request, m.Tell):
            return m.StatusText(msgspec.json.encode(serving.status()))
        if isinstance(request, m.AttachSlot):
            fd = serving.received(self._link)
            serving.service.snapshots.attach(request.slot, fd, request.nbytes)
        else:
            serving.on_loop(serving.change(request))
        return m.Obeyed()

    async def _reclaim(self, number: int, ask: bool) -> m.Reclaimed:
        """Whether somebody reads from a slot who gets on and may go on; else it is taken back,
        unless that is all that was asked."""
        service = self._serving.service
        snapshot = service.snapshots.in_slot(number)
        if snapshot is None:
            return m.Reclaimed(free=True)
        now = time.monotonic()
        since = snapshot.superseded if snapshot.superseded is not None else now
        if ask and now - since < self._hold:
            # Who has the memory mapped keeps it, and the trainer takes other memory.
            if alive := self._serving.readers(snapshot):
                who = ", ".join(sorted({one.address for one in alive})[:4])
                return m.Reclaimed(free=False, why=f"step {snapshot.step} is read by {who}")
            if now < snapshot.wanted_until:
                why = f"a download of step {snapshot.step} broke off and may be continued"
                return m.Reclaimed(free=False, why=why)
        if ask:
            return m.Reclaimed(free=True)
        mapped = service.snapshots.slots[number].mapped > 0
        await self._serving.hide(snapshot, number)
        return m.Reclaimed(free=True, mapped=mapped)


async def _run(link: socket.socket) -> None:
    await Program(link).run()


def serve(link: int) -> None:
    """Serve, and answer on a socket, given by its descriptor, until its other end closes."""
    with trainer_at(link) as end:
        asyncio.run(_run(end))
