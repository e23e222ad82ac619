"""The process that writes staged states: digests and I/O outside the trainer's interpreter.

`start` runs it as a program with the descriptor of a socket. Messages both ways are MessagePack
with their length before them: a request has the name of a call below and its arguments, an answer
its digests or its failure. It imports no torch, and ends when the trainer's end of the socket
closes, however that came about.
"""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import suppress
from typing import Any, Literal

import msgspec

from torchrelay.errors import CheckpointError, ResourceError
from torchrelay.memory.pages import address_of, side_by_side
from torchrelay.processes.child_process import trainer_at
from torchrelay.processes.frames import receive_frame, send_frame
from torchrelay.stores.draft import CommittedFile
from torchrelay.stores.locate import open_store
from torchrelay.stores.writer.file_writer import FileSpec, FileWriter, Placed, Written

Call = Literal["attach", "open", "write", "sync", "abort"]  # phases of a save, too


class Answer(msgspec.Struct, array_like=True):
    """`failure`: message, phase and file of an error."""

    digests: list[bytes] = []
    copied: dict[str, str] = {}
    failure: tuple[str, str | None, str | None] | None = None


_requests = msgspec.msgpack.Decoder(tuple[Call, list[Any]])


class _Writer:
    """Its public methods are the calls. Each is answered when it is done."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._arena: mmap.mmap | None = None
        self._base = 0
        self._writing: FileWriter | None = None

    def serve(self) -> None:
        with suppress(EOFError, ConnectionError):
            while True:
                call, arguments = _requests.decode(receive_frame(self._link))
                answer = Answer()
                try:
                    written = getattr(self, call)(*arguments)
                    if isinstance(written, Written):
                        answer.digests, answer.copied = written
                except (CheckpointError, ResourceError) as fault:
                    file = getattr(fault, "file", None)
                    answer.failure = (fault.message, fault.phase, file)
                except Exception as fault:
                    answer.failure = (f"{type(fault).__name__}: {fault}", None, None)
                send_frame(self._link, msgspec.msgpack.encode(answer))

    def attach(self, each: int, nbytes: int) -> None:
        """An arena of `nbytes` in files of `each`; their descriptors come with this request."""
        self._arena = None
        _, descriptors, _, _ = socket.recv_fds(self._link, 1, -(-nbytes // each))
        try:
            self._arena = side_by_side(descriptors, each, nbytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._base = address_of(self._arena)

    def open(self, url: str, step: int, token: str, timeout: float, files: list[list[Any]]) -> None:
        """The files of a rank in a draft that exists."""
        self.abort()
        draft = open_store(url, timeout=timeout).draft(step, token)
        specs = [
            FileSpec(name, nbytes, chunk, digests, source and CommittedFile(*source))
            for name, nbytes, chunk, digests, source in files
        ]
        self._writing = FileWriter(draft, specs, base=self._base)

    def write(self, placed: list[Placed]) -> None:
        assert self._writing is not None
        self._writing.write_staged(placed)

    def sync(self) -> Written:
        assert self._writing is not None
        written = self._writing.finish()
        self._writing = None
        return written

    def abort(self) -> None:
        if self._writing is not None:
            self._writing.abort()
            self._writing = None


def serve(link: int) -> None:
    """Answer on a socket, given by its descriptor, until its other end closes."""
    with trainer_at(link) as end:
        _Writer(end).serve()
