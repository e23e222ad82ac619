"""Moving a chunk through a data connection, and hashing it on the way.

A chunk is its index, its bytes and its digest. The index has a digest of its own: bytes that match
theirs would be another chunk's if it changed on the way. `END` in place of an index says that no
more come, so that an orderly end differs from a broken connection. A chunk is moved in pieces that
stay in a core's cache while they are hashed. After `DataSocket.cut` no memory is read or written by
this process on behalf of the connection, so bytes may go straight to where they belong.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

import xxhash

from torchrelay.geometry import DIGEST_BYTES
from torchrelay.memory.digest import RunningDigest

PIECE = 512 << 10  # bytes
SLOW_SECONDS = 0.003  # to get the interpreter's lock back: an idle one takes microseconds
OFTEN = 4  # times, until chunks are moved whole
END = 0xFFFFFFFF
_INDEX = struct.Struct("<I")
_CHECK_BYTES = 8  # XXH3-64 of an index


class DataSocket:
    """One data connection. One thread moves bytes on it, any thread may cut it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        with suppress(OSError):  # the digest behind a chunk does not wait for an acknowledgement
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._moving = threading.Lock()
        self._slow = 0
        self.moved_at = time.monotonic()

    def send_chunk(self, index: int, data: memoryview, known: bytes, *, hashes: bool) -> bytes:
        """Send a chunk; returns its digest, made on the way unless it is `known`."""
        with self._moving:
            self._send(memoryview(_checked(index)))
            running = RunningDigest() if hashes and not known else None
            for piece in self._pieces(data):
                if running is not None:
                    running.update(piece)
                self._send(piece)
            digest = known if running is None else running.digest()
            self._send(memoryview(digest or bytes(DIGEST_BYTES)))
            return digest

    def send_end(self) -> None:
        """Say that no more chunks come."""
        with self._moving:
            self._send(memoryview(_checked(END)))

    def take_index(self) -> int:
        """The index of the chunk that comes next, or `END`. `ConnectionError` for one that is not
        as it was sent."""
        with self._moving:
            frame = bytearray(_INDEX.size + _CHECK_BYTES)
            self._fill(memoryview(frame))
            found: int = _INDEX.unpack_from(frame)[0]
            if frame != _checked(found):
                raise ConnectionError("the index of a chunk has other bytes than were sent")
            return found

    def take_chunk(self, memory: memoryview, *, hashes: bool) -> tuple[bytes, bytes]:
        """Fill memory with the chunk whose index was taken; returns the digest of the bytes that
        came, if it is wanted, and the one that they were sent with."""
        with self._moving:
            running = RunningDigest() if hashes else None
            for piece in self._pieces(memory):
                self._fill(piece)
                if running is not None:
                    running.update(piece)
            sent = bytearray(DIGEST_BYTES)
            self._fill(memoryview(sent))
            return b"" if running is None else running.digest(), bytes(sent)

    def cut(self) -> None:
        """Close the connection, in the middle of a chunk if need be."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends the call of a thread that waits in it
        with self._moving:
            self._sock.close()

    def _send(self, data: memoryview) -> None:
        while data.nbytes:
            data = data[self._sock.send(data) :]
        self.moved_at = time.monotonic()

    def _fill(self, memory: memoryview) -> None:
        while memory.nbytes:
            count = self._sock.recv_into(memory, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("closed by the other side")
            memory = memory[count:]

    def _pieces(self, data: memoryview) -> list[memoryview]:
        """A chunk in pieces. A thread that keeps the interpreter's lock makes every piece wait for
        it twice: once that shows, chunks are moved whole."""
        if self._slow < OFTEN:
            begun = time.monotonic()
            time.sleep(0)  # gives the lock away and takes it again
            self._slow += time.monotonic() - begun > SLOW_SECONDS
        size = PIECE if self._slow < OFTEN else max(1, data.nbytes)
        return [data[at : at + size] for at in range(0, data.nbytes, size)]


def _checked(index: int) -> bytes:
    number = _INDEX.pack(index)
    return number + xxhash.xxh3_64_digest(number)
