"""The process that serves a staged state: HTTP and digests outside the trainer's interpreter.

A trainer starts it with a socket (`stores.writer.launch`). Its requests are answered by a thread;
the event loop has the main one. It imports no torch, and ends when the trainer's end of the
socket closes, however that came about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.app import App
from torchrelay.endpoint.server.limits import LimitedServer
from torchrelay.endpoint.server.local_memory import LocalMemory
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import digests
from torchrelay.endpoint.server.status import status
from torchrelay.endpoint.server.transfers import IDLE_SECONDS
from torchrelay.stores.writer.frames import receive_frame, send_frame

NICE = 5  # the trainer's threads go first
BACKLOG = 128
_SWEEP_SECONDS = 1.0
_CUT_SECONDS = 2.0

Result = TypeVar("Result")
_request = msgspec.msgpack.Decoder(m.ServerRequest)


class Program:
    """Carries out what the trainer asks for."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._app: App | None = None  # from `Listen` on
        self._hold = 0.0
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        threading.Thread(target=self._obey, name="torchrelay-control", daemon=True).start()
        await self._over.wait()
        for task in self._tasks:
            task.cancel()
        if self._app is not None:
            await self._app.close()

    def _obey(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                request = _request.decode(receive_frame(self._link))
                try:
                    answer = self._do(request)
                except Exception as fault:
                    text = fault.strerror if isinstance(fault, OSError) else None
                    answer = m.Refused(text or f"{type(fault).__name__}: {fault}")
                send_frame(self._link, msgspec.msgpack.encode(answer))
        self._loop.call_soon_threadsafe(self._over.set)

    def _on_loop(self, act: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result()

    def _do(self, request: m.ServerRequest) -> m.ServerAnswer:
        if isinstance(request, m.Listen):
            return self._on_loop(self._listen(request))
        if self._app is None:
            return m.Refused("nothing listens yet")
        service = self._app.service
        if isinstance(request, m.AttachSlot):
            _, descriptors, _, _ = socket.recv_fds(self._link, 1, 1)
            service.snapshots.attach(request.slot, descriptors[0], request.nbytes)
        elif isinstance(request, m.Hash):
            return m.VolumeDigests(digests(service.snapshots.slots[request.slot], request.volumes))
        elif isinstance(request, m.Reclaim):
            return self._on_loop(self._reclaim(service, request.slot, request.ask))
        elif isinstance(request, m.Tell):
            return m.StatusText(msgspec.json.encode(status(service)))
        else:
            self._on_loop(self._change(service, request))
        return m.Obeyed()

    async def _listen(self, wanted: m.Listen) -> m.ServerAnswer:
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
        self._app, self._hold = app, wanted.hold
        service.socket = LocalMemory(service, self._loop).name
        port: int = sock.getsockname()[1]
        host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
        service.url = f"http{'s' if context else ''}://{host}:{port}"
        return m.Listening(port)

    async def _change(self, service: Service, request: m.ServerRequest) -> None:
        async with service.changed:
            if isinstance(request, m.Show):
                service.snapshots.show(request)
                service.pending = False
            elif isinstance(request, m.Expect):
                service.pending = request.pending
            elif isinstance(request, m.Note):
                service.ledger.note_publish(
                    request.step,
                    request.nbytes,
                    request.stage_seconds,
                    request.hash_seconds,
                    request.skipped,
                )
            service.changed.notify_all()

    async def _reclaim(self, service: Service, number: int, ask: bool) -> m.Reclaimed:
        """Whether somebody reads from a slot who gets on and may go on; else it is taken back,
        unless that is all that was asked."""
        snapshot = service.snapshots.in_slot(number)
        if snapshot is None:
            return m.Reclaimed(free=True)
        now = time.monotonic()
        since = snapshot.superseded if snapshot.superseded is not None else now
        reading = list(service.ledger.on(snapshot))
        alive = [
            one
            for one in reading
            # Who has the memory mapped keeps it, and the trainer takes other memory.
            if one.kind != "mapped"
            and now - one.seen < (service.stall if one.tasks else IDLE_SECONDS)
        ]
        if ask and now - since < self._hold:
            if alive:
                who = ", ".join(sorted({one.address for one in alive})[:4])
                return m.Reclaimed(free=False, why=f"step {snapshot.step} is read by {who}")
            if now < snapshot.wanted_until:
                why = f"a download of step {snapshot.step} broke off and may be continued"
                return m.Reclaimed(free=False, why=why)
        if ask:
            return m.Reclaimed(free=True)
        service.snapshots.hide(snapshot)
        tasks = []
        for one in reading:
            if one.kind == "mapped":
                continue
            one.cut = f"step {snapshot.step} was replaced before the reader had taken it"
            for task in one.tasks:
                task.cancel()
                tasks.append(task)
            service.ledger.end(one, "failed", one.cut)
        if tasks:
            await asyncio.wait(tasks, timeout=_CUT_SECONDS)
        return m.Reclaimed(free=True, mapped=snapshot.slot.mapped > 0)


async def _sweep(service: Service) -> None:
    while True:
        await asyncio.sleep(_SWEEP_SECONDS)
        service.ledger.sweep()


async def _run(link: socket.socket) -> None:
    await Program(link).run()


def serve(link: int) -> None:
    """Serve, and answer on a socket, given by its descriptor, until its other end closes."""
    for number in (signal.SIGTERM, signal.SIGINT):  # it ends with the trainer, which may have both
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    with socket.socket(fileno=link) as end:
        asyncio.run(_run(end))
