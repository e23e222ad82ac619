"""The keeper's process: it has the memory of staged steps, and outlives those who staged them.

Workers find it by the name of its Unix socket, and the kernel says whether they are of its user. It
ends when no worker has been there for the length of its lease, or when it is told to. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import secrets
import signal
import socket
import threading
import time

import msgspec

from torchrelay.endpoint.admission import user_of
from torchrelay.endpoint.security import trusted
from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.serving import Serving, obey
from torchrelay.keeper.server import messages as k
from torchrelay.keeper.server.buddies import Buddies
from torchrelay.keeper.server.copying import KeeperRing
from torchrelay.keeper.server.kept import KeptSteps
from torchrelay.stores.writer.frames import has_hung_up, receive_frame, send_frame
from torchrelay.stores.writer.launch import NICE

FIRST_LEASE = 60.0  # seconds for the first worker to come
CONNECTIONS, HOLD_SECONDS, STALL_SECONDS = 256, 60.0, 10.0
BACKLOG = 128
_TICK = 0.2

_begin = msgspec.msgpack.Decoder(k.BeginKeeping)
_request = msgspec.msgpack.Decoder(k.KeeperRequest)


class Keeping:
    """Carries out what the workers of a host ask for."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._serving = Serving()
        self._kept = KeptSteps(self._serving, 0)
        self._buddies = Buddies(self._serving, self._kept)
        self._over = asyncio.Event()
        self._numbers = itertools.count(1)
        self._workers: set[int] = set()
        self._alone_since = time.monotonic()
        self._lease = FIRST_LEASE
        self._members: list[str] = []
        self._whole_members: list[str] = []  # those who had the newest step that is whole
        self._joining = threading.Lock()
        self._host, self._port, self._token, self._tls = "", 0, "", False

    async def run(self) -> None:
        threading.Thread(target=self._accept, name="torchrelay-accept", daemon=True).start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        while not self._over.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), _TICK)
            if not self._workers and time.monotonic() - self._alone_since > self._lease:
                break
        self._give_up_name()
        await self._serving.close()

    def _give_up_name(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(link,), name="torchrelay-worker", daemon=True
                ).start()

    def _serve(self, link: socket.socket) -> None:
        with link:
            if user_of(link) != os.getuid():
                return
            worker = WorkerLink(next(self._numbers), link)
            obey(link, lambda data: self._do(worker, data))
            with contextlib.suppress(RuntimeError):  # the loop is over
                self._serving.on_loop(self._leave(worker))
                if worker.ends:
                    self._serving.call_soon(self._over.set)

    async def _leave(self, worker: WorkerLink) -> None:
        if worker.number in self._workers:
            self._workers.discard(worker.number)
            self._alone_since = time.monotonic()
            await self._kept.leave(worker.number)

    def _do(self, worker: WorkerLink, data: bytes) -> k.KeeperAnswer:
        request, serving = _request.decode(data), self._serving
        if isinstance(request, m.Tell):
            return m.StatusText(msgspec.json.encode(serving.on_loop(self._status())))
        if isinstance(request, k.End):
            if has_hung_up(worker.link):  # whoever asked was told that it does not answer
                return m.Refused("nobody waits for that")
            worker.ends = True  # when it has its answer, and hangs up
            self._give_up_name()  # whoever comes from now on begins another
            return m.Obeyed()
        if isinstance(request, k.JoinKeeper):
            with self._joining:
                return serving.on_loop(self._join(worker, request))
        if worker.number not in self._workers:
            return m.Refused("join first")
        if isinstance(request, k.RoomWanted):
            return serving.on_loop(self._kept.room(worker.number, request.nbytes, request.step))
        if isinstance(request, k.TellCopies):
            return serving.on_loop(self._copies())
        if isinstance(request, m.AttachSlot):
            fd = serving.received(worker.link)
            serving.on_loop(self._attach(worker, request, fd))
        elif isinstance(request, m.Hash):
            return serving.hashed(request)
        elif isinstance(request, k.HoldSlot):
            serving.on_loop(self._hold(worker, request))
        elif isinstance(request, k.Members):
            serving.on_loop(self._meet(request))
        elif isinstance(request, k.CopyNext):
            serving.on_loop(self._copy_next(request))
        elif isinstance(request, m.Show | m.Note):
            serving.on_loop(self._change(worker, request))
        return m.Obeyed()

    async def _join(self, worker: WorkerLink, join: k.JoinKeeper) -> k.KeeperAnswer:
        is_first = self._serving.app is None
        if is_first:
            self._token = join.token or secrets.token_urlsafe(32)
            wanted = m.Listen(
                join.host,
                0,
                self._token,
                join.certfile,
                join.keyfile,
                HOLD_SECONDS,
                CONNECTIONS,
                STALL_SECONDS,
                join.version,
            )
            self._port = (await self._serving.listen(wanted)).port
            self._host, self._tls = join.host, join.certfile is not None
        if join.token and not secrets.compare_digest(join.token, self._token):
            return m.Refused("it has another token than this worker was given")
        if join.host != self._host:
            return m.Refused(f"it listens at {self._host}, not at {join.host}: end it first")
        if (join.certfile is not None) != self._tls:
            return m.Refused(f"it listens with{'' if self._tls else 'out'} TLS: end it first")
        if is_first or not join.begins:
            self._buddies.trusted = trusted(join.cafile)
            self._kept.memory, self._kept.steps = join.memory, join.steps
            self._lease = join.lease
            self._buddies.rate, self._buddies.copies = join.rate, join.copies
        self._workers.add(worker.number)
        self._kept.enter(worker.number)
        known = list(dict.fromkeys([*self._members, *self._whole_members]))
        return k.Joined(self._host, self._port, self._token, known, os.getpid())

    async def _meet(self, members: k.Members) -> None:
        self._members, self._token = members.urls, members.token
        self._buddies.meet(KeeperRing(sorted(members.urls), members.own), members.token)
        if self._serving.app is not None:
            self._serving.app.take_token(members.token)
            self._serving.service.url = members.own

    async def _copies(self) -> k.CopiesTold:
        return self._buddies.told()

    async def _copy_next(self, word: k.CopyNext) -> None:
        self._buddies.take(word)

    async def _hold(self, worker: WorkerLink, request: k.HoldSlot) -> None:
        self._kept.hold(worker.number, request.slot, request.held)

    async def _attach(self, worker: WorkerLink, request: m.AttachSlot, fd: int) -> None:
        if not self._kept.has(worker.number, request.slot):
            os.close(fd)
            raise ValueError(f"slot {request.slot} is not this worker's")
        self._serving.service.snapshots.attach(request.slot, fd, request.nbytes)
        self._kept.attached(request.slot, request.nbytes)

    async def _change(self, worker: WorkerLink, request: m.Show | m.Note) -> None:
        await self._serving.change(request)
        if isinstance(request, m.Note):
            if request.skipped is None:
                self._whole_members = self._members
            step = await self._kept.note(worker.number, request)
            await self._buddies.copy(step or self._kept.newest)

    async def _status(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "pid": os.getpid(),
            "workers": len(self._workers),
            "lease": self._lease,
            "memory": self._kept.memory or None,
            "staged_bytes": self._kept.nbytes,
            "most_bytes": self._kept.most,
            "members": self._members,
        }
        if self._serving.app is not None:
            facts |= self._serving.status()
            facts["copies"] = self._buddies.facts()
        return facts


class WorkerLink:
    """A worker that is connected: its number, and the socket that its requests come by. `ends`: it
    has said that the keeper is to end."""

    def __init__(self, number: int, link: socket.socket) -> None:
        self.number, self.link, self.ends = number, link, False


def _listen(name: str) -> socket.socket:
    """The socket that workers find; `OSError` with EADDRINUSE where a keeper has the name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")  # of no file system, and gone with the process
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


async def _keep(listener: socket.socket) -> None:
    await Keeping(listener).run()


def run(link: int) -> None:
    """Keep steps under the name that comes by a socket, until it is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=link) as end:
        name = _begin.decode(receive_frame(end)).name
        try:
            listener = _listen(name)
        except OSError as fault:
            taken = fault.errno == errno.EADDRINUSE
            send_frame(end, (k.TAKEN if taken else str(fault)).encode())
            return
        send_frame(end, b"")
    with contextlib.suppress(OSError):
        os.nice(NICE)
    asyncio.run(_keep(listener))
    os._exit(0)  # threads of workers may still wait for the next request
