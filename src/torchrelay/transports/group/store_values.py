"""Values of any length in a group's store.

A `TCPStore` breaks off, for all its users and for good, where a value is longer than 8 MiB. So a
long value stands in pieces: the first, with the number of the others, under the key itself, and
that one is written last. Who sees the key finds the whole value.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from torch.distributed import DistError

PIECE_BYTES = 1 << 20
POLL = (0.0005, 0.02)  # seconds between looks at the store: first, and after long silence
_COUNT_BYTES = 4


class KeyValueStore(Protocol):
    def set(self, key: str, value: bytes) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def put(store: KeyValueStore, key: str, data: bytes) -> None:
    """Write a value. What is written of it is removed where the rest cannot be."""
    pieces = range(PIECE_BYTES, len(data), PIECE_BYTES)
    written = []
    try:
        for number, start in enumerate(pieces, 1):
            written.append(f"{key}/{number}")
            store.set(written[-1], data[start : start + PIECE_BYTES])
        store.set(key, len(pieces).to_bytes(_COUNT_BYTES, "big") + data[:PIECE_BYTES])
    except BaseException:
        with suppress(DistError):
            _delete(store, written)
        raise


def take(store: KeyValueStore, key: str) -> bytearray:
    """Read a value that is there, and remove it."""
    head, data = _read(store, key)
    _delete(store, [*_others(key, head), key])
    return data


def read(store: KeyValueStore, key: str) -> bytearray:
    """Read a value that is there and stays."""
    return _read(store, key)[1]


def _read(store: KeyValueStore, key: str) -> tuple[bytes, bytearray]:
    head = store.get(key)
    data = bytearray(head[_COUNT_BYTES:])
    for name in _others(key, head):
        data += store.get(name)
    return head, data


def drop(store: KeyValueStore, key: str) -> bool:
    """Remove a value that nobody else will take; whether it was there."""
    if not store.check([key]):
        return False
    _delete(store, [*_others(key, store.get(key)), key])
    return True


def await_keys(
    store: KeyValueStore, keys: list[str], seconds: float, look: Callable[[], None] = lambda: None
) -> bool:
    """Whether all of the keys are there in time; `look` is called now and then.

    Not by the store's own wait, which keeps every other user of the store waiting too.
    """
    end = time.monotonic() + seconds
    pause, longest = POLL
    while not store.check(keys):
        look()
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 1.3, longest)
    return True


def peek(store: KeyValueStore, key: str, otherwise: str) -> str:
    """The text under a key that may be removed at any moment: `get` would wait for it to return."""
    return store.compare_set(key, otherwise, otherwise).decode()


def _others(key: str, head: bytes) -> list[str]:
    count = int.from_bytes(head[:_COUNT_BYTES], "big")
    return [f"{key}/{number}" for number in range(1, count + 1)]


def _delete(store: KeyValueStore, keys: list[str]) -> None:
    """The key itself comes last: as long as it is there, so is the number of its pieces."""
    for key in keys:
        store.delete_key(key)
