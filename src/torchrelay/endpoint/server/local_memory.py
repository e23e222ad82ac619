"""Memory of a step lent to a process of the same user on this host, to be mapped there.

A process asks over a Unix socket, whose name it has from `/local.json`, and gets descriptors of the
memory, or a handle of memory of a GPU. While it keeps that connection open, the memory is not
written to again: the publisher takes other memory for its next step instead.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from torchrelay.endpoint.server.device_steps import lease_of
from torchrelay.endpoint.server.http.accepting import Acceptor, listen_by_name
from torchrelay.endpoint.server.http.admission import user_of
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import Part
from torchrelay.sources.lent_memory import (
    MAX_SLOTS,
    DeviceLease,
    DeviceLeaseRequest,
    LeasedSlot,
    LeaseRequest,
    MemoryLease,
)
from torchrelay.stores.writer.frames import receive_frame, send_frame

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
        why = ""
        if user_of(sock) != os.getuid():
            why = "the memory belongs to another user"
        elif self._leases >= MAX_LEASES:
            why = "too many processes have the memory"
        else:
            with suppress(msgspec.MsgspecError):
                request = _request.decode(receive_frame(sock, REQUEST_BYTES))
                if isinstance(request, DeviceLeaseRequest):
                    self._serve_device(sock, request)
                    return
                with self._lent(request) as parts:
                    if parts:
                        _send(sock, parts)
                        _until_closed(sock)
                        return
                why = "the step is gone"
        send_frame(sock, msgspec.msgpack.encode(MemoryLease([], why)))

    def _serve_device(self, sock: socket.socket, request: DeviceLeaseRequest) -> None:
        service = self._service
        with service.lock:
            shown = service.on_device(request)
            if shown is None:
                lease = DeviceLease(why="the step is not in memory of a GPU")
            else:
                lease = lease_of(shown)
                service.devices.borrow(shown)
                service.transfers.mapped += 1
                self._leases += 1
        try:
            send_frame(sock, msgspec.msgpack.encode(lease))
            if shown is not None:
                _until_closed(sock)
        finally:
            with service.lock:
                if shown is not None:
                    service.devices.give_back(shown)
                    self._leases -= 1

    @contextmanager
    def _lent(self, request: LeaseRequest) -> Iterator[list[Part]]:
        """Within: the memory of a step is in use. No parts where the step is not here."""
        service = self._service
        with service.lock:
            snapshot = service.snapshots.by_id(request.snapshot)
            parts = list(snapshot.parts.values()) if snapshot and snapshot.complete else []
            transfer = None
            if snapshot is None or len(parts) > MAX_SLOTS:
                parts = []
            if snapshot is not None and parts:
                total = sum(one.nbytes for part in parts for one in part.volumes.values())
                reader = (request.reader[:64], "this host", "mapped", snapshot, "mapped", total)
                transfer = service.transfers.enter(*reader)
                service.transfers.mapped += 1
            if transfer is not None:
                transfer.kind, transfer.leases = "mapped", transfer.leases + 1
            self._leases += 1
            for part in parts:
                part.slot.mapped += 1
        try:
            yield parts
        finally:
            with service.lock:
                self._leases -= 1
                for part in parts:
                    part.slot.mapped -= 1
                if transfer is not None:  # it reports how it ended, or is swept
                    transfer.leases -= 1


def _send(sock: socket.socket, parts: list[Part]) -> None:
    slots = [
        LeasedSlot(slot.nbytes, {v.name: (v.start, v.nbytes) for v in volumes.values()})
        for slot, volumes in parts
    ]
    send_frame(sock, msgspec.msgpack.encode(MemoryLease(slots)))
    with ExitStack() as opened:
        fds = []
        for slot, _ in parts:  # opened again for reading alone
            path = f"/proc/self/fd/{slot.file.fileno()}"
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            opened.callback(os.close, fds[-1])
        socket.send_fds(sock, [b"m"], fds)


def _until_closed(sock: socket.socket) -> None:
    """Wait for the end of a lease: the process closes its end, or dies."""
    sock.settimeout(None)
    while sock.recv(REQUEST_BYTES):
        pass
