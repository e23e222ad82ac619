"""Memory of a step handed to a process of the same user on this host, to be mapped there.

A process asks over a Unix socket whose name it was told by the endpoint, and gets the descriptor of
the arena. While it keeps that connection open, the arena is not written to again: the trainer takes
new memory for its next step instead, and what was handed out ends with those who have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import selectors
import socket
import threading

import msgspec

from torchrelay.endpoint.admission import user_of
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import Slot
from torchrelay.endpoint.server.transfers import Transfer
from torchrelay.sources.lease import MemoryLease, Wish
from torchrelay.stores.writer.frames import receive_frame, send_frame

ASK_SECONDS = 2.0
MAX_LEASES = 256


_wish = msgspec.msgpack.Decoder(Wish)


class LocalMemory:
    """Hands out arenas on a thread of its own."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self._service, self._loop = service, loop
        self.name = f"torchrelay-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")  # of no file system, and gone with the process
        self._listener.listen(16)
        self._leases: dict[socket.socket, tuple[Slot, Transfer | None]] = {}
        threading.Thread(target=self._run, name="torchrelay-map", daemon=True).start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in waiting.select():
                    if key.fileobj is self._listener:
                        line, _ = self._listener.accept()
                        if self._lend(line):
                            waiting.register(line, selectors.EVENT_READ)
                        else:
                            line.close()
                    else:  # it says nothing: it has closed its end
                        waiting.unregister(key.fileobj)
                        self._give_back(key.fileobj)  # type: ignore[arg-type]

    def _lend(self, line: socket.socket) -> bool:
        """Answer a connection; whether it has memory from here on."""
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            line.settimeout(ASK_SECONDS)
            user = user_of(line)
            if user != os.getuid() or len(self._leases) >= MAX_LEASES:
                why = "it belongs to another user" if user != os.getuid() else "too many have it"
                send_frame(line, msgspec.msgpack.encode(MemoryLease(0, {}, why)))
                return False
            wish = _wish.decode(receive_frame(line))
            act = asyncio.run_coroutine_threadsafe(self._take(wish), self._loop)
            slot, lease, transfer = act.result()
            send_frame(line, msgspec.msgpack.encode(lease))
            if slot is None:
                return False
            self._leases[line] = slot, transfer
            # Opened anew for reading alone: nobody writes to it by this descriptor.
            fd = os.open(f"/proc/self/fd/{slot.file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(line, [b"m"], [fd])
            finally:
                os.close(fd)
            return True
        if line in self._leases:
            self._give_back(line)
        return False

    async def _take(self, wish: Wish) -> tuple[Slot | None, MemoryLease, Transfer | None]:
        """On the event loop, where steps come and go."""
        service = self._service
        snapshot = service.snapshots.by_id(wish.snapshot)
        if snapshot is None:
            return None, MemoryLease(0, {}, "the step is gone"), None
        parts = list(snapshot.parts.values())
        if not 0 <= wish.part < len(parts):
            return None, MemoryLease(0, {}, "the step has no such part"), None
        slot, held = parts[wish.part]
        volumes = {name: (volume.start, volume.nbytes) for name, volume in held.items()}
        slot.mapped += 1
        service.ledger.mapped += 1
        total = sum(nbytes for _, nbytes in volumes.values())
        transfer = service.ledger.of(
            wish.reader[:64], "this host", "mapped", snapshot, "mapped", total
        )
        if transfer is not None:
            transfer.kind = "mapped"  # it asked for the record by HTTP
            transfer.moved(total)
        return slot, MemoryLease(slot.nbytes, volumes, parts=len(parts)), transfer

    def _give_back(self, line: socket.socket) -> None:
        slot, transfer = self._leases.pop(line)
        line.close()

        async def end() -> None:
            slot.mapped -= 1
            if transfer is not None:
                self._service.ledger.end(transfer, "done")

        asyncio.run_coroutine_threadsafe(end(), self._loop)
