"""The key-value store of a process group, for values of any length.

A `TCPStore` closes every connection for good when a value exceeds 8 MiB. So a long value is stored
in pieces: the key itself holds the first piece and the number of the others, and is written last.
A rank that finds the key finds the whole value.

Every value has a digest of itself and its key, and its head one of its own. A store of torch's
compares nothing: without them a bit that changes on the way to it or back would change a state.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from torchrelay.errors import CheckpointError

PIECE_BYTES = 1 << 20
POLL = (0.0005, 0.25)  # seconds between two looks at the store: first, and after a long wait
OVERDUE = 0.05  # of the time waited: how late a value may be found
MOST_REQUESTS = 20_000  # a second, of all ranks that wait: about a third of what a TCPStore serves
LOOK = 0.1  # seconds between two looks at anything else meanwhile, or longer if `POLL` is
READS = 3  # of a value that has other bytes than were written, before that is an error
_FACTS = struct.Struct(">I16s")  # the number of the other pieces, the digest of the value
_HEAD_BYTES = _FACTS.size + 8  # and the digest of both
_MISSING = "torchrelay: no such key"
_SEAL_DIGITS = 16

Result = TypeVar("Result")


class StoreLost(CheckpointError):
    """The store cannot be reached any more."""


class StoreDamaged(StoreLost):
    """A value has other bytes than were written."""


class GroupStore:
    """Keys below a prefix. `StoreLost` where the process that holds the store is gone. `ranks`: how
    many may wait in it at once."""

    def __init__(self, store: Any, prefix: str = "", ranks: int = 1) -> None:
        self._store, self._prefix, self._ranks = store, prefix, ranks

    def below(self, prefix: str) -> GroupStore:
        return GroupStore(self._store, f"{self._prefix}{prefix}/", self._ranks)

    def pause_after(self, waited: float) -> float:
        """Seconds until the next look of a rank that has waited for so long."""
        return pause_after(waited, self._ranks)

    def put(self, key: str, data: bytes) -> None:
        """Write a value. If it cannot be written whole, nothing of it stays."""
        name = self._name(key)
        pieces = range(PIECE_BYTES, len(data), PIECE_BYTES)
        written = []
        try:
            for number, start in enumerate(pieces, 1):
                written.append(f"{key}/{number}")
                self._ask("set", written[-1], data[start : start + PIECE_BYTES])
            head = _head(name, len(pieces), _digest(name, data))
            self._ask("set", key, head + data[:PIECE_BYTES])
        except BaseException:
            with suppress(StoreLost):
                for piece in written:
                    self._ask("delete_key", piece)
            raise

    def read(self, key: str) -> bytes | None:
        """A value that stays; None if it is missing. Never waits, unlike the store's own `get`.

        A value that changed on its way back is read again; `StoreDamaged` for one that stays so.
        """
        for left in reversed(range(READS)):
            try:
                return self._read(key)
            except StoreDamaged:
                if not left:
                    raise
        raise AssertionError

    def _read(self, key: str) -> bytes | None:
        found = self._first(key)
        if found is None:
            return None
        count, digest, data = found
        for name in _pieces(key, count):
            piece = self._peek(name)
            if piece is None:
                return None  # it is being removed
            data += piece
        if _digest(self._name(key), data) != digest:
            raise self._damaged(key)
        return bytes(data)

    def _first(self, key: str) -> tuple[int, bytes, bytearray] | None:
        """The number of the other pieces, the digest of the whole value, and its first piece."""
        found = self._peek(key)
        if found is None:
            return None
        facts = found[: _FACTS.size].ljust(_FACTS.size, b"\0")
        count, digest = _FACTS.unpack(facts)
        if found[:_HEAD_BYTES] != _head(self._name(key), count, digest):
            raise self._damaged(key)
        return count, digest, bytearray(found[_HEAD_BYTES:])

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode("utf-8", "surrogatepass")

    def _damaged(self, key: str) -> StoreDamaged:
        return StoreDamaged(
            f"the group's store has other bytes under {self._prefix}{key} than were written: check "
            "the network between the ranks and the host of the store"
        )

    def take(self, key: str) -> bytes | None:
        """Read a value and remove it; None if it is missing."""
        data = self.read(key)
        return data if data is not None and self.drop(key) else None

    def drop(self, key: str) -> bool:
        """Remove a value. Returns True if it existed and no one else removed it."""
        try:
            found = self._first(key)
        except StoreDamaged:  # the first piece alone is known: the call that has it fails
            found = 0, b"", bytearray()
        if found is None:
            return False
        for name in _pieces(key, found[0]):
            self._ask("delete_key", name)
        return bool(self._ask("delete_key", key))  # last: it has the number of the pieces

    def has(self, *keys: str) -> bool:
        """Whether all of the keys exist."""
        return bool(self._ask("check", [self._prefix + key for key in keys], whole=True))

    def wait_for(
        self, keys: list[str], seconds: float, look: Callable[[], object] = lambda: None
    ) -> bool:
        """Whether all of the keys exist in time. Calls `look` now and then, and ends where that
        returns something true.

        The store's own wait would block every other user of the store. One process serves the store
        to all ranks of a job, and all may wait for a slow one: the longer a rank has waited, and
        the more ranks there are, the rarer it asks.
        """
        begun = now = next_look = time.monotonic()
        end = begun + seconds
        while not self.has(*keys):
            now = time.monotonic()
            pause = self.pause_after(now - begun)
            if now >= next_look:
                next_look = now + max(LOOK, pause)
                if look():
                    return False
            if now > end:
                return False
            time.sleep(min(pause, max(end - now, POLL[0])))
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0; returns the sum."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a text if it is the expected one ("" if the key is missing); returns the text
        that the key has then."""
        name = self._name(key)
        texts = (_sealed(name, text.encode()).decode() for text in (expected, desired))
        found = bytes(self._ask("compare_set", key, *texts))
        text = found[:-_SEAL_DIGITS]
        if found != _sealed(name, text):
            raise self._damaged(key)
        return text

    def _peek(self, key: str) -> bytes | None:
        found = bytes(self._ask("compare_set", key, _MISSING, _MISSING))
        return None if found == _MISSING.encode() else found

    def _ask(self, method: str, key: Any, *values: Any, whole: bool = False) -> Any:
        try:
            name = key if whole else self._prefix + key
            return getattr(self._store, method)(name, *values)
        except dist.DistError as fault:
            raise StoreLost(
                "the store of the process group is gone, and with it the process that holds it "
                f"(usually rank 0): start the job again: {str(fault).splitlines()[0]}"
            ) from fault


def pause_after(waited: float, ranks: int = 1) -> float:
    """Seconds until the next look of a rank that has waited for so long, of so many that wait."""
    first, longest = POLL
    return max(first, ranks / MOST_REQUESTS, min(OVERDUE * waited, longest))


def _pieces(key: str, count: int) -> list[str]:
    return [f"{key}/{number}" for number in range(1, count + 1)]


def _digest(name: bytes, data: bytes | bytearray) -> bytes:
    """Of a value under its key: one that came under another key does not match."""
    digest = xxhash.xxh3_128(name + b"\0")
    digest.update(data)
    return digest.digest()


def _head(name: bytes, count: int, digest: bytes) -> bytes:
    facts = _FACTS.pack(count, digest)
    return facts + xxhash.xxh3_64_digest(name + b"\0" + facts)


def _sealed(name: bytes, text: bytes) -> bytes:
    """A text with its digest behind it; nothing for the empty text, which stands for no text."""
    digits = xxhash.xxh3_64_hexdigest(name + b"\0" + text) if text else ""
    return text + digits.encode()
