"""Memory of a step lent to a process of the same user on this host, to be mapped there.

A process asks over a Unix socket, whose name it has from `/local.json`, and gets descriptors of the
memory, or a handle of memory of a GPU. While it keeps that connection open, the memory is not
written to again: the publisher takes other memory for its next step instead.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from torchrelay.endpoint.server.device_steps import lease_of
from torchrelay.endpoint.server.http.sockets import Acceptor, listen_by_name, user_of
from torchrelay.endpoint.server.messages import Show
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import Part
from torchrelay.endpoint.server.transfers import Transfer
from torchrelay.processes.frames import receive_frame, send_frame
from torchrelay.sources.lent_memory import (
    MAX_SLOTS,
    DeviceLease,
    DeviceLeaseRequest,
    LeasedSlot,
    LeaseRequest,
    MemoryLease,
)

ASK_SECONDS = 2.0
REQUEST_BYTES = 4 << 10
MAX_LEASES = 256
BACKLOG = 64

_request = msgspec.msgpack.Decoder(LeaseRequest | DeviceLeaseRequest)


class LocalMemory:
    """Lends memory of a server until `close`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._leases = 0
        self.name = f"torchrelay-{secrets.token_hex(16)}"
        self._acceptor = Acceptor(listen_by_name(self.name, BACKLOG), self._serve)
        self.close = self._acceptor.close

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(ASK_SECONDS)
        with ExitStack() as in_use:  # until the process is done with it
            lease, parts = self._lease(sock, in_use)
            send_frame(sock, msgspec.msgpack.encode(lease))
            if parts:
                _send_memory(sock, parts)
            if not lease.why:
                sock.settimeout(None)
                while sock.recv(REQUEST_BYTES):  # until it closes its end, or dies
                    pass

    def _lease(
        self, sock: socket.socket, in_use: ExitStack
    ) -> tuple[MemoryLease | DeviceLease, list[Part]]:
        """The answer to a process that asks, and the host memory that is lent to it."""
        if user_of(sock) != os.getuid():
            return MemoryLease([], "the memory belongs to another user"), []
        if self._leases >= MAX_LEASES:
            return MemoryLease([], "too many processes have the memory"), []
        try:
            request = _request.decode(receive_frame(sock, REQUEST_BYTES))
        except msgspec.MsgspecError:
            return MemoryLease([], "it is asked otherwise"), []
        service = self._service
        with service.lock:
            if isinstance(request, DeviceLeaseRequest):
                shown = service.on_device(request)
                if shown is None:
                    return DeviceLease(why="the step is not in memory of a GPU"), []
                in_use.enter_context(self._lent(shown=shown))
                return lease_of(shown), []
            snapshot = service.snapshots.by_id(request.snapshot)
            parts = list(snapshot.parts.values()) if snapshot and snapshot.complete else []
            if snapshot is None or not 0 < len(parts) <= MAX_SLOTS:
                return MemoryLease([], "the step is gone"), []
            slots = [
                LeasedSlot(slot.nbytes, {v.name: (v.start, v.nbytes) for v in volumes.values()})
                for slot, volumes in parts
            ]
            total = sum(nbytes for one in slots for _, nbytes in one.volumes.values())
            reader = (request.reader[:64], "this host", "mapped", snapshot, "mapped", total)
            in_use.enter_context(self._lent(parts, service.transfers.enter(*reader)))
            return MemoryLease(slots), parts

    @contextmanager
    def _lent(
        self,
        parts: Sequence[Part] = (),
        transfer: Transfer | None = None,
        shown: Show | None = None,
    ) -> Iterator[None]:
        """Within, a process has memory of the host, or of a GPU. Its transfer ends when it reports
        how that went, or is swept."""

        def count(one: int) -> None:
            self._leases += one
            for part in parts:
                part.slot.mapped += one
            if transfer is not None:
                transfer.kind, transfer.leases = "mapped", transfer.leases + one
            if shown is not None:
                self._service.devices.leases[shown.slot] += one

        count(1)
        self._service.transfers.mapped += 1
        try:
            yield
        finally:
            with self._service.lock:
                count(-1)


def _send_memory(sock: socket.socket, parts: list[Part]) -> None:
    with ExitStack() as opened:
        fds = []
        for slot, _ in parts:  # opened again for reading alone
            path = f"/proc/self/fd/{slot.file.fileno()}"
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            opened.callback(os.close, fds[-1])
        socket.send_fds(sock, [b"m"], fds)
