"""Keys that a peer chose.

Python hashes numbers, and tuples of them, alike in every process. A peer that chooses the keys of a
dict can choose them so that each new one is compared with all others. So keys other than text are
checked before a dict is made of them. Text and bytes are hashed with a secret of the process: a
table that only this library looks at has its keys spelled in those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.record.probing import FEW, MoreTries, check_dict, hashes_of
from torchrelay.record.values import PLAIN, BigInt, Key, TupleKey, decode_key

_TWICE = "a dict has one key twice"


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
    for number, one in enumerate(found):
        count = counts[one] = counts.get(one, -1) + 1
        if count:
            text = one if isinstance(one, bytes) else one.encode("utf-8", "surrogatepass")
            found[number] = b"again%d:%b" % (count, text)
    return found


def check_keys(keys: Sequence[Key], more: MoreTries | None = None) -> None:
    """Raise `ManifestError` unless these can be the keys of one dict, in time linear in their size.
    `more`: what the dicts of one record share.

    Text is hashed with a secret, and the numbers 0, 1, 2, ... in order have different hashes.
    """
    if _are_text(keys):
        if len(set(keys)) != len(keys):
            raise ManifestError(_TWICE)
        return
    if keys == tuple(range(len(keys))):
        return
    numbers = _numbers(keys)
    if numbers is not None:
        ordered = np.sort(numbers)
        if (ordered[1:] == ordered[:-1]).any():
            raise ManifestError(_TWICE)
        check_dict(hashes_of(numbers), None, more)
        return
    # Decoding raises for what no key encodes to. Each NaN is a key of its own.
    values = [key if type(key) in PLAIN else decode_key(key) for key in keys]
    if len(keys) > FEW:
        hashes = np.fromiter(map(hash, values), np.int64, len(values)).astype(np.uint64)
        check_dict(hashes, [*map(_items, keys)], more)
    different = [
        value if isinstance(value, str) else _spelled(value)
        for value in values
        if type(value) in PLAIN or not _has_nan(value)
    ]
    if len(set(different)) != len(different):
        raise ManifestError(_TWICE)


def _numbers(keys: Sequence[Key]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """The keys, if all of them are whole numbers of 64 bits."""
    if [*map(type, keys)].count(int) < len(keys):
        return None
    return np.array(keys, np.int64)


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
