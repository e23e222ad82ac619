"""The process that writes staged states: digests and I/O outside the trainer's interpreter.

`start` runs it as a program with the descriptor of a socket. Messages both ways are
MessagePack records with their length before them; an arena comes as descriptors. It imports no
torch, and ends when the trainer's end of the socket closes, however that came about.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket

import msgspec

from torchrelay.errors import CheckpointError
from torchrelay.memory.pages import address_of, side_by_side
from torchrelay.stores.locate import open_store
from torchrelay.stores.writer.child_process import trainer_at
from torchrelay.stores.writer.file_writer import FileSpec, FileWriter, Placed
from torchrelay.stores.writer.frames import receive_frame, send_frame


class Attach(msgspec.Struct, tag="attach"):
    """An arena of `nbytes` in files of `each`; their descriptors come with this message."""

    each: int
    nbytes: int


class Begin(msgspec.Struct, tag="begin"):
    """The files of a rank in a draft that exists."""

    url: str
    step: int
    token: str
    timeout: float
    files: list[FileSpec]


class Write(msgspec.Struct, tag="write"):
    """Staged bytes. Answered when they are written."""

    placed: list[Placed]


class Finish(msgspec.Struct, tag="finish"):
    pass


class Abandon(msgspec.Struct, tag="abort"):
    pass


class Finished(msgspec.Struct, tag="done"):
    digests: list[bytes] = []


class Failed(msgspec.Struct, tag="failed"):
    message: str
    phase: str | None = None
    file: str | None = None


Request = Attach | Begin | Write | Finish | Abandon
Answer = Finished | Failed

_REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class _Writer:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._arena: mmap.mmap | None = None
        self._base = 0
        self._writing: FileWriter | None = None

    def serve(self) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                request = _REQUESTS.decode(receive_frame(self._link))
                try:
                    answer = self._do(request)
                except CheckpointError as fault:
                    answer = Failed(fault.message, fault.phase, fault.file)
                except Exception as fault:
                    answer = Failed(f"{type(fault).__name__}: {fault}")
                send_frame(self._link, msgspec.msgpack.encode(answer))

    def _do(self, request: Request) -> Answer:
        if isinstance(request, Attach):
            self._attach(request.each, request.nbytes)
        elif isinstance(request, Begin):
            self._abort()
            draft = open_store(request.url, timeout=request.timeout).draft(
                request.step, request.token
            )
            self._writing = FileWriter(draft, request.files, base=self._base)
        elif isinstance(request, Write):
            assert self._writing is not None
            self._writing.write_staged(request.placed)
        elif isinstance(request, Finish):
            assert self._writing is not None
            digests = self._writing.finish()
            self._writing = None
            return Finished(digests)
        else:
            self._abort()
        return Finished()

    def _attach(self, each: int, nbytes: int) -> None:
        self._arena = None
        _, descriptors, _, _ = socket.recv_fds(self._link, 1, -(-nbytes // each))
        try:
            self._arena = side_by_side(descriptors, each, nbytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._base = address_of(self._arena)

    def _abort(self) -> None:
        if self._writing is not None:
            self._writing.abort()
            self._writing = None


def serve(link: int) -> None:
    """Answer on a socket, given by its descriptor, until its other end closes."""
    with trainer_at(link) as end:
        _Writer(end).serve()
