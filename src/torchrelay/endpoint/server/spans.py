"""Ranges of an arena's file on their way to a reader, by `sendfile`: the kernel sends the pages
themselves.

A large range has a thread, which waits in the kernel until the connection takes more. The event
loop would be woken for every few packets, on one core, and would answer nobody else meanwhile.
There are as many threads as connections that are sent to: one that is slow holds up no other.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, NamedTuple

from torchrelay.memory import threads

PIECE_BYTES = 2 << 20  # for which a reader has a limited time
LOOP_BYTES = 1 << 18  # sent by the event loop: they are not worth a thread


class Span(NamedTuple):
    """Bytes of an arena's file, to be sent from where they lie."""

    file: BinaryIO
    offset: int
    nbytes: int

    def parts(self, size: int) -> tuple[Span, Span]:
        """Its first bytes, and the rest."""
        first = min(self.nbytes, size)
        rest = Span(self.file, self.offset + first, self.nbytes - first)
        return Span(self.file, self.offset, first), rest


async def send_span(
    transport: asyncio.Transport, span: Span, moved: Callable[[int], None], stall: float
) -> None:
    """Send a span; `moved` hears of bytes that went, from any thread. `TimeoutError` of asyncio
    where a piece takes longer than `stall` seconds, `ConnectionError` where the reader is gone.

    Nothing is read from the arena after it returned or was cancelled.
    """
    if span.nbytes <= LOOP_BYTES or transport.get_write_buffer_size():
        # The event loop waits until headers are out that the connection did not take at once.
        first, span = span.parts(LOOP_BYTES)
        await _sent_by_loop(transport, first, stall)
        moved(first.nbytes)
    if not span.nbytes:
        return
    if transport.is_closing():
        raise ConnectionResetError("the reader went away")
    reading = transport.is_reading()
    if reading:  # the thread alone has to do with the connection
        transport.pause_reading()
    try:
        # A descriptor of its own: that of a transport which is closed may become another's.
        with transport.get_extra_info("socket").dup() as line:
            await _SendingThread(line, span, moved, stall).run()
    finally:
        if reading and not transport.is_closing():
            transport.resume_reading()


async def _sent_by_loop(transport: asyncio.Transport, span: Span, stall: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait_for(loop.sendfile(transport, *span), stall)
    except RuntimeError as fault:  # asyncio's word for a transport that was closed
        raise ConnectionResetError("the reader went away") from fault


class _SendingThread:
    """A span that a thread sends over a connection which does not block."""

    def __init__(
        self, line: socket.socket, span: Span, moved: Callable[[int], None], stall: float
    ) -> None:
        self._line, self._span, self._moved, self._stall = line, span, moved, stall
        self._stopped = False
        self._fault: BaseException | None = None

    async def run(self) -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            try:
                self._send()
            except BaseException as fault:
                self._fault = fault
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(over.set)

        threads.run(work, "send")
        try:
            await over.wait()
        except BaseException:
            self._stopped = True
            with suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)  # wakes the thread
            await over.wait()
            raise
        if isinstance(self._fault, TimeoutError):
            raise asyncio.TimeoutError from self._fault
        if self._fault is not None:
            raise ConnectionResetError("the reader went away") from self._fault

    def _send(self) -> None:
        ready = select.poll()
        ready.register(self._line, select.POLLOUT)
        file, start, nbytes = self._span
        for at in range(start, start + nbytes, PIECE_BYTES):
            upto = min(at + PIECE_BYTES, start + nbytes)
            self._send_piece(ready, file, at, upto)
            self._moved(upto - at)

    def _send_piece(self, ready: select.poll, file: BinaryIO, at: int, upto: int) -> None:
        end = time.monotonic() + self._stall
        while at < upto:
            if self._stopped:
                raise ConnectionResetError("the transfer was cut")
            try:
                done = os.sendfile(self._line.fileno(), file.fileno(), at, upto - at)
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0 or not ready.poll(1000 * left):
                    raise TimeoutError("the reader takes nothing") from None
                continue
            if not done:
                raise ConnectionResetError("the arena has ended")
            at += done
