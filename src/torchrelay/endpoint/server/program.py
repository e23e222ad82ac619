"""The process that serves a staged state: HTTP and digests outside the trainer's interpreter.

A trainer starts it with a socket (`processes.child_process`). It imports no torch, and ends
when the trainer's end of the socket closes, for whatever reason.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.service import Service, status
from torchrelay.endpoint.server.snapshots import digests
from torchrelay.endpoint.server.step_server import StepServer
from torchrelay.endpoint.server.two_slots import TwoSlots
from torchrelay.memory.pages import return_freed_memory
from torchrelay.processes.child_process import trainer_at
from torchrelay.processes.frames import receive_frame, send_frame

_request = msgspec.msgpack.Decoder(m.ServerRequest)


def obey(link: socket.socket, act: Callable[[bytes], object]) -> None:
    """Answer requests until the other end of a socket closes. A failure is an answer, too."""
    with suppress(EOFError, OSError):
        while True:
            request = receive_frame(link)
            try:
                answer = act(request)
            except Exception as fault:
                text = fault.strerror if isinstance(fault, OSError) else None
                answer = m.Refused(text or f"{type(fault).__name__}: {fault}")
            send_frame(link, msgspec.msgpack.encode(answer))


@dataclass
class ReceivedMemory:
    """Memory that came with a request, by its descriptor; -1 where none came."""

    fd: int = -1

    def take(self) -> int:
        """The descriptor, for who closes it from now on."""
        fd, self.fd = self.fd, -1
        return fd


@contextmanager
def memory_of(link: socket.socket, request: object) -> Iterator[ReceivedMemory]:
    """Within: the memory that follows a request. It is let go at the end, unless it was taken: a
    request that is refused leaves nothing."""
    received = ReceivedMemory()
    if isinstance(request, m.StageSlot) and request.attached:
        _, (received.fd,), _, _ = socket.recv_fds(link, 1, 1)
    try:
        yield received
    finally:
        if received.fd >= 0:
            os.close(received.fd)


def stage(
    service: Service,
    memory: ReceivedMemory,
    request: m.StageSlot,
    base: tuple[int, str] | None = None,
) -> m.SlotStaged:
    """Take the memory of a slot, if it is new, and make the digests that its volumes lack. With
    `base`, the slot and snapshot of the newest step, another thread finds what changed."""
    snapshots = service.snapshots
    if memory.fd >= 0:
        with service.lock:
            snapshots.attach(request.slot, memory.take(), request.nbytes)
    slot = snapshots.slots[request.slot]
    if snapshots.changes is not None:
        snapshots.changes.stage(request, slot.view[:], base)
    return m.SlotStaged(digests(slot, request.volumes))


class EndpointProgram:
    """Carries out what the trainer asks for."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._server: StepServer | None = None
        self._slots: TwoSlots | None = None

    def run(self) -> None:
        obey(self._link, self._do)
        if self._server is not None:
            self._server.close()

    def _do(self, data: bytes) -> m.ServerAnswer:
        request = _request.decode(data)
        with memory_of(self._link, request) as memory:
            return self._obeyed(request, memory)

    def _obeyed(self, request: m.ServerRequest, memory: ReceivedMemory) -> m.ServerAnswer:
        if isinstance(request, m.Listen):
            self._server = StepServer(request)
            self._slots = TwoSlots(self._server.service, request.hold)
            if request.history:
                # Imported for this alone: it needs numpy.
                from torchrelay.endpoint.server.changes import ChangeHistory

                self._server.service.snapshots.changes = ChangeHistory(request.history)
            return m.Listening(self._server.port)
        if self._server is None or self._slots is None:
            return m.Refused("nothing listens yet")
        service, slots = self._server.service, self._slots
        if isinstance(request, m.Reserve) and service.snapshots.changes is not None:
            service.snapshots.changes.settle()
        base: tuple[int, str] | None = None
        with service.lock:
            if isinstance(request, m.Reserve):
                return slots.reserve(request.on_device)
            if isinstance(request, m.Tell):
                return m.StatusText(msgspec.json.encode(status(service)))
            if isinstance(request, m.StageSlot):
                base = slots.take()
            elif isinstance(request, m.Show):
                slots.show(request)
            else:
                slots.finish(request)
        if isinstance(request, m.StageSlot):
            return stage(service, memory, request, base)
        return m.Obeyed()


def serve(link: int) -> None:
    """Serve, and answer on a socket, given by its descriptor, until its other end closes."""
    return_freed_memory()
    with trainer_at(link) as end:
        EndpointProgram(end).run()
