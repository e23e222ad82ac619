"""What every process that serves staged steps does: listen, and obey who stages them. No torch.

Requests over a socket are answered by a thread; steps and readers belong to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.app import App
from torchrelay.endpoint.server.limits import LimitedServer
from torchrelay.endpoint.server.local_memory import LocalMemory
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import ServedStep, digests
from torchrelay.endpoint.server.status import status
from torchrelay.endpoint.server.transfers import IDLE_SECONDS, Transfer
from torchrelay.stores.writer.frames import receive_frame, send_frame

BACKLOG = 128
_SWEEP_SECONDS = 1.0
_CUT_SECONDS = 2.0

Result = TypeVar("Result")


def obey(link: socket.socket, act: Callable[[bytes], object]) -> None:
    """Answer requests until the other end of a socket closes. What goes wrong is an answer too."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = receive_frame(link)
            try:
                answer = act(request)
            except Exception as fault:
                text = fault.strerror if isinstance(fault, OSError) else None
                answer = m.Refused(text or f"{type(fault).__name__}: {fault}")
            send_frame(link, msgspec.msgpack.encode(answer))


class Serving:
    """Steps that are served, once `listen` was called."""

    def __init__(self) -> None:
        self.app: App | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def service(self) -> Service:
        if self.app is None:
            raise RuntimeError("nothing listens yet")
        return self.app.service

    def on_loop(self, act: Coroutine[Any, Any, Result]) -> Result:
        """Do something where steps come and go; for other threads."""
        return asyncio.run_coroutine_threadsafe(act, self._loop).result()

    def call_soon(self, act: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(act)

    async def listen(self, wanted: m.Listen) -> m.Listening:
        context = None
        if wanted.certfile is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(wanted.certfile, wanted.keyfile)
        service = Service(stall=wanted.stall, version=wanted.version)
        app = App(service, wanted.token, tls=context is not None)
        service.server = LimitedServer(app.handle, most=wanted.connections, patience=wanted.stall)
        family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
        sock = socket.create_server((wanted.host, wanted.port), family=family, backlog=BACKLOG)
        await self._loop.create_server(service.server, sock=sock, ssl=context)
        self._tasks = {
            asyncio.create_task(service.server.sweep()),
            asyncio.create_task(_sweep(service)),
        }
        self.app = app
        service.socket = LocalMemory(service, self._loop).name
        port: int = sock.getsockname()[1]
        host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
        service.url = f"http{'s' if context else ''}://{host}:{port}"
        return m.Listening(port)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.app is not None:
            await self.app.close()

    # What those who stage ask for.

    def received(self, link: socket.socket) -> int:
        """The descriptor that is the next thing on a socket."""
        _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        return descriptors[0]

    def hashed(self, request: m.Hash) -> m.VolumeDigests:
        slot = self.service.snapshots.slots[request.slot]
        return m.VolumeDigests(digests(slot, request.volumes))

    def status(self) -> dict[str, object]:
        return status(self.service)

    async def change(self, request: m.Show | m.Expect | m.Note) -> None:
        service = self.service
        async with service.changed:
            if isinstance(request, m.Show):
                service.snapshots.show(request)
                service.pending = service.pending and not request.record
            elif isinstance(request, m.Expect):
                service.pending = request.pending
            else:
                service.pending = False
                if request.skipped is None:
                    service.snapshots.lead(request.step)
                service.ledger.note_publish(
                    request.step,
                    request.nbytes,
                    request.stage_seconds,
                    request.hash_seconds,
                    request.skipped,
                )
            service.changed.notify_all()

    def readers(self, snapshot: ServedStep) -> list[Transfer]:
        """Who reads a step over TCP and gets on with it. Who has it mapped is not among them."""
        now = time.monotonic()
        return [
            one
            for one in self.service.ledger.on(snapshot)
            if one.kind != "mapped"
            and now - one.seen < (self.service.stall if one.tasks else IDLE_SECONDS)
        ]

    async def hide(self, snapshot: ServedStep, number: int) -> None:
        """Take a slot back; those who still read from it are cut off."""
        service = self.service
        service.snapshots.hide(snapshot, number)
        tasks = []
        for one in service.ledger.on(snapshot):
            if one.kind == "mapped":
                continue
            one.cut = f"step {snapshot.step} was replaced before the reader had taken it"
            for task in one.tasks:
                task.cancel()
                tasks.append(task)
            service.ledger.end(one, "failed", one.cut)
        if tasks:
            await asyncio.wait(tasks, timeout=_CUT_SECONDS)


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        service.ledger.sweep()
