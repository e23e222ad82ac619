"""Keys that a peer chose.

Python hashes numbers, and tuples of them, alike in every process. A peer that chooses the keys of a
dict can choose them so that each new one is compared with all others. So a state may have a limited
number of keys that are not text. Text and bytes are hashed with a secret of the process: a table
that only this library looks at has its keys spelled in those.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torchrelay.errors import ManifestError
from torchrelay.record.values import BigInt, Key, Text, TupleKey, decode_key

# So many keys take a second, or two, if all of them collide.
MAX_NUMBER_KEYS = 1 << 15
MAX_OTHER_KEYS = 1 << 12
MAX_KEY_ITEMS = 1 << 16  # of tuples, those in them included


def identity(key: Key) -> str | bytes:
    """The same for keys that a dict takes for one (1 and True and 1.0), else another.

    NaNs of the same bits have one identity, though a dict may hold several.
    """
    value = key if type(key) in (str, int) else decode_key(key)
    return value if isinstance(value, str) else _spelled(value)


def _spelled(value: object) -> bytes:
    if type(value) is int:  # most keys that are not text
        return b"i%x:" % value
    if isinstance(value, tuple):
        return b"(%d:%b" % (len(value), b"".join(map(_spelled, value)))
    if isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        return b"s%d:%b" % (len(text), text)
    if isinstance(value, float) and not value.is_integer():  # neither is NaN, nor infinity
        return b"f" + struct.pack("<d", value)
    return b"i%x:" % int(value) if isinstance(value, (int, float)) else b"none"


def identities(keys: Iterable[Key]) -> list[str | bytes]:
    """The identity of each key of one dict. NaNs with one identity count one by one."""
    found = [identity(key) for key in keys]
    if len(set(found)) == len(found):
        return found
    counts: dict[str | bytes, int] = {}
    for place, one in enumerate(found):
        count = counts[one] = counts.get(one, -1) + 1
        if count:
            text = one if isinstance(one, bytes) else one.encode("utf-8", "surrogatepass")
            found[place] = b"again%d:%b" % (count, text)
    return found


class KeyLimits:
    """How many keys a state may have that are not text, in all of its dicts.

    The numbers 0, 1, 2, ... in order do not count: their hashes are known to be different.
    """

    def __init__(self) -> None:
        self._numbers, self._others, self._items = MAX_NUMBER_KEYS, MAX_OTHER_KEYS, MAX_KEY_ITEMS

    def problem(self, keys: Sequence[Key]) -> str | None:
        """Count the keys of one more dict; says what there are too many of."""
        if _are_text(keys) or keys == tuple(range(len(keys))):
            return None
        for key in keys:
            kind = type(key)
            if kind is int:
                self._numbers -= 1
            elif kind is not str and kind is not Text:
                self._others -= 1
                self._items -= _items(key)
        if self._numbers < 0:
            return f"more than {MAX_NUMBER_KEYS} keys that are numbers, and not 0, 1, 2, ..."
        if self._others < 0:
            return f"more than {MAX_OTHER_KEYS} keys that are neither text nor 64-bit numbers"
        if self._items < 0:
            return f"keys with more than {MAX_KEY_ITEMS} items in all"
        return None

    def check(self, keys: Sequence[Key]) -> None:
        """Raise `ManifestError` unless these can be the keys of one more dict."""
        different: Collection[object] = keys
        if not _are_text(keys):
            if (found := self.problem(keys)) is not None:
                raise ManifestError(found)
            # Each NaN is a key of its own. Decoding raises for what no key encodes to.
            different = [
                identity(key) for key in keys if type(key) is int or not _has_nan(decode_key(key))
            ]
        if len(set(different)) != len(different):
            raise ManifestError("a dict has one key twice")


def _are_text(keys: Sequence[Any]) -> bool:
    try:
        "".join(keys)  # the fastest way to look at the types of all
    except TypeError:
        return False
    return True


def _has_nan(value: object) -> bool:
    return any(map(_has_nan, value)) if isinstance(value, tuple) else value != value


def _items(key: Key) -> int:
    if isinstance(key, TupleKey):
        return 1 + sum(map(_items, key.items))
    return 1 + len(key.hex) // 16 if isinstance(key, BigInt) else 1
