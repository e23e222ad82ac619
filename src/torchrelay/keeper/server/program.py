"""The keeper's process: it has the memory of staged steps, and outlives those who staged them.

It is a step server, with retention of steps and replication between hosts. Workers find it by the
name of its Unix socket, and the kernel says whether they belong to its user. It ends when no worker
has been connected for the length of its lease, or on request. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass, replace

import msgspec

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.http.sockets import Acceptor, listen_by_name, user_of
from torchrelay.endpoint.server.program import ReceivedMemory, memory_of, obey, stage
from torchrelay.endpoint.server.service import status
from torchrelay.endpoint.server.step_server import StepServer
from torchrelay.keeper.choice import KeeperRing
from torchrelay.keeper.server import messages as k
from torchrelay.keeper.server.replication import Replication
from torchrelay.keeper.server.retention import Retention
from torchrelay.memory.pages import return_freed_memory
from torchrelay.processes.child_process import NICE
from torchrelay.processes.frames import has_hung_up, receive_frame, send_frame

FIRST_LEASE = 60.0  # seconds for the first worker to come
BACKLOG = 128
_TICK = 0.2

_request = msgspec.msgpack.Decoder(k.KeeperRequest)
_decision = msgspec.msgpack.Decoder(k.KeeperDecision)


class JoinedKeeper:
    """A keeper that was joined: its server, and what it does with the steps in it."""

    def __init__(self, join: k.JoinKeeper, token: str, lock: threading.RLock) -> None:
        self.server = StepServer(msgspec.structs.replace(join.listen, token=token))
        self.service = self.server.service
        self.retention = Retention(self.service, join)
        self.replication = Replication(self.service, self.retention, lock)


class KeeperProgram:
    """Carries out what the workers of a host ask for, each on a thread."""

    def __init__(self, listener: socket.socket) -> None:
        self._kept: JoinedKeeper | None = None
        self._lock = threading.RLock()  # one request at a time, though it may wait for readers
        self._over = threading.Event()
        self._numbers = itertools.count(1)
        self._alone_since = time.monotonic()
        self._members: list[str] = []
        self._known: list[str] = []  # keepers that had the newest step that is complete
        self._acceptor = Acceptor(listener, self._serve)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self._over.set())
        while not self._over.wait(_TICK):
            lease = FIRST_LEASE if self._kept is None else self._kept.retention.settings.lease
            with self._lock:
                alone = time.monotonic() - self._alone_since
                if alone > lease and not (self._kept and self._kept.retention.workers):
                    break
        self._acceptor.close()
        if self._kept is not None:
            self._kept.server.close()

    def _serve(self, sock: socket.socket) -> None:
        if user_of(sock) != os.getuid():
            return
        worker = WorkerLink(next(self._numbers), sock)
        obey(sock, lambda data: self._do(worker, data))
        with self._lock:
            kept = self._kept
            if kept is not None and worker.number in kept.retention.workers:
                self._alone_since = time.monotonic()
                with kept.service.lock:
                    kept.retention.leave(worker.number)
        if worker.ends:
            self._over.set()

    def _do(self, worker: WorkerLink, data: bytes) -> k.KeeperAnswer:
        request = _request.decode(data)
        with memory_of(worker.link, request) as memory:
            return self._obeyed(worker, request, memory)

    def _obeyed(
        self, worker: WorkerLink, request: k.KeeperRequest, memory: ReceivedMemory
    ) -> k.KeeperAnswer:
        with self._lock:
            if isinstance(request, m.Tell):
                return m.StatusText(msgspec.json.encode(self._status()))
            if isinstance(request, k.End):
                if has_hung_up(worker.link):  # its request has timed out
                    return m.Refused("the sender is gone")
                worker.ends = True  # when it has its answer, and closes the connection
                self._acceptor.close()  # the next worker begins another keeper
                return m.Obeyed()
            if isinstance(request, k.JoinKeeper):
                return self._join(worker, request)
            if self._kept is None or worker.number not in self._kept.retention.workers:
                return m.Refused("join first")
            with self._kept.service.lock:
                answer = self._do_joined(self._kept, worker, request)
        if isinstance(request, m.StageSlot):
            return stage(self._kept.service, memory, request)
        return answer

    def _do_joined(
        self, kept: JoinedKeeper, worker: WorkerLink, request: k.KeeperRequest
    ) -> k.KeeperAnswer:
        if isinstance(request, k.AskReport):
            return kept.replication.report()
        if isinstance(request, m.Reserve):
            if request.decision:
                kept.retention.decided = decision = _decision.decode(request.decision)
                kept.replication.due = decision.copy
            return kept.retention.reserve(worker.number, request.nbytes)
        if isinstance(request, m.StageSlot):
            if not kept.retention.has(worker.number, request.slot):
                raise ValueError(f"slot {request.slot} is not this worker's")
            if request.attached:
                kept.retention.attached(request.slot, request.nbytes)
        elif isinstance(request, k.HoldSlot):
            kept.retention.hold(worker.number, request.slot, request.retained)
        elif isinstance(request, k.Members):
            self._meet(kept, request)
        elif isinstance(request, m.Show):
            kept.service.show(request)
        elif isinstance(request, m.FinishPublish):
            self._finish(kept, request)
        return m.Obeyed()

    def _join(self, worker: WorkerLink, join: k.JoinKeeper) -> k.KeeperAnswer:
        is_first = self._kept is None
        if self._kept is None:
            token = join.listen.token or secrets.token_urlsafe(32)
            self._kept = JoinedKeeper(join, token, self._lock)
        kept, wanted, had = self._kept, join.listen, self._kept.retention.settings.listen
        token = kept.service.access.token or ""
        if wanted.token and not secrets.compare_digest(wanted.token, token):
            return m.Refused("it has another token than this worker was given")
        if wanted.host != had.host:
            return m.Refused(f"it listens at {had.host}, not at {wanted.host}: end it first")
        if (wanted.certfile is None) != (had.certfile is None):
            with_tls = "without" if had.certfile is None else "with"
            return m.Refused(f"it listens {with_tls} TLS: end it first")
        if is_first or not join.begins:
            kept.retention.settings = join
            cafile = wanted.cafile or wanted.certfile
            kept.service.access = replace(kept.service.access, cafile=cafile)
        kept.retention.workers.add(worker.number)
        known = list(dict.fromkeys([*self._members, *self._known]))
        return k.Joined(kept.server.port, token, known, os.getpid())

    def _meet(self, kept: JoinedKeeper, members: k.Members) -> None:
        self._members = members.urls
        kept.service.access = replace(kept.service.access, token=members.token)
        kept.service.url = members.own
        kept.replication.meet(KeeperRing(sorted(members.urls), members.own))

    def _finish(self, kept: JoinedKeeper, ended: m.FinishPublish) -> None:
        kept.service.finish(ended)
        if ended.failed:
            return
        if ended.skipped is None:
            self._known = self._members
        kept.retention.tidy()
        kept.replication.copy(kept.service.snapshots.newest)

    def _status(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "pid": os.getpid(),
            "workers": 0,
            "lease": FIRST_LEASE,
            "memory": None,
            "staged_bytes": 0,
            "most_bytes": 0,
            "members": self._members,
        }
        if (kept := self._kept) is not None:
            with kept.service.lock:
                facts |= {
                    "workers": len(kept.retention.workers),
                    "lease": kept.retention.settings.lease,
                    "memory": kept.retention.settings.memory,
                    "staged_bytes": kept.retention.nbytes,
                    "most_bytes": kept.retention.most,
                    **status(kept.service),
                    "copies": kept.replication.facts(),
                }
        return facts


@dataclass
class WorkerLink:
    """A worker that is connected. `ends`: it has said that the keeper is to end."""

    number: int
    link: socket.socket
    ends: bool = False


def run(link: int) -> None:
    """Keep steps under the name that comes by a socket, until the lease is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=link) as end:
        name = receive_frame(end).decode()
        try:
            listener = listen_by_name(name, BACKLOG)
        except OSError as fault:
            taken = fault.errno == errno.EADDRINUSE
            send_frame(end, (k.TAKEN if taken else str(fault)).encode())
            return
        send_frame(end, b"")
    with contextlib.suppress(OSError):
        os.nice(NICE)
    return_freed_memory()
    KeeperProgram(listener).run()
    os._exit(0)  # threads that copy may still wait for bytes
