"""Plain Python values as records that survive MessagePack and JSON bit for bit.

JSON has no NaN, no 128-bit integer and no bytes; MessagePack has no lone surrogate. Values that
both support are written as they are, all others as a small tagged record. Types are compared
exactly: a subclass of `int` or `str` is another type and has to be registered.
"""

from __future__ import annotations

import struct

import msgspec


class Float(msgspec.Struct, tag="f", array_like=True, frozen=True):
    """A float by its 64 bits, so that NaN payloads and -0.0 stay what they are."""

    bits: int


class BigInt(msgspec.Struct, tag="i", array_like=True, frozen=True):
    """An integer past 64 bits, in hexadecimal."""

    hex: str


class Text(msgspec.Struct, tag="s", array_like=True, frozen=True):
    """A string that is not valid UTF-8 (lone surrogates), in `surrogatepass` bytes."""

    data: bytes


class Complex(msgspec.Struct, tag="c", array_like=True, frozen=True):
    real: int
    imag: int


class Bytes(msgspec.Struct, tag="b", array_like=True, frozen=True):
    data: bytes


class Typed(msgspec.Struct, tag="o", array_like=True, frozen=True):
    """A value of one of the types that `typed` lists, by name: what it is made of."""

    name: str
    items: tuple[Value, ...]


class TupleKey(msgspec.Struct, tag="t", array_like=True, frozen=True):
    """A dict key that is a tuple of keys."""

    items: tuple[Key, ...]


Key = None | bool | int | str | Float | BigInt | Text | TupleKey
Value = None | bool | int | str | Float | BigInt | Text | Complex | Bytes | Typed

PLAIN = frozenset((int, str, bool, type(None)))  # types that are their own records
MAX_NESTED = 128  # of tuples in keys, and of values in values
INT64 = range(-(1 << 63), 1 << 63)


def _bits(value: float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    if not 0 <= bits < 1 << 64:
        raise ValueError(f"{bits} is not a 64-bit pattern")
    return float(struct.unpack("<d", struct.pack("<Q", bits))[0])


def encode_value(value: object) -> Value:
    """The record for a plain value. `TypeError` for every type that is not listed here; `typed` has
    more of them."""
    kind = type(value)
    if value is None or kind is bool:
        return value  # type: ignore[return-value]
    if isinstance(value, int) and kind is int:
        return value if value in INT64 else BigInt(hex(value))
    if isinstance(value, str) and kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return Text(value.encode("utf-8", "surrogatepass"))
        return value
    if isinstance(value, float) and kind is float:
        return Float(_bits(value))
    if isinstance(value, complex) and kind is complex:
        return Complex(_bits(value.real), _bits(value.imag))
    if isinstance(value, bytes) and kind is bytes:
        return Bytes(value)
    raise TypeError(kind.__name__)


def decode_value(record: Value) -> object:
    """Undo `encode_value`. `ValueError` for a record that no value encodes to."""
    if type(record) in PLAIN:
        return record
    if isinstance(record, Float):
        return _float(record.bits)
    if isinstance(record, BigInt):
        return _big_int(record.hex)
    if isinstance(record, Text):
        return record.data.decode("utf-8", "surrogatepass")
    if isinstance(record, Complex):
        return complex(_float(record.real), _float(record.imag))
    if isinstance(record, Bytes):
        return record.data
    if isinstance(record, Typed):
        raise ValueError(f"a value of type {record.name[:40]!r}")
    return record


def encode_key(key: object, depth: int = 0) -> Key:
    """The record for a dict key: a plain scalar, or a tuple of keys. Else `TypeError`, and
    `ValueError` for tuples nested too deep."""
    if type(key) is str and key.isascii():  # nearly all keys; skips the general path
        return key
    if isinstance(key, tuple) and type(key) is tuple:
        _check_depth(depth)
        return TupleKey(tuple([encode_key(item, depth + 1) for item in key]))
    if type(key) in (complex, bytes):
        raise TypeError(type(key).__name__)
    return encode_value(key)  # type: ignore[return-value]


def decode_key(record: Key, depth: int = 0) -> object:
    """Undo `encode_key`. `ValueError` for a record that no key encodes to."""
    if isinstance(record, TupleKey):
        _check_depth(depth)
        return tuple(
            [item if type(item) in PLAIN else decode_key(item, depth + 1) for item in record.items]
        )
    return decode_value(record)


def _check_depth(depth: int) -> None:
    if depth >= MAX_NESTED:
        raise ValueError(f"tuples nested deeper than {MAX_NESTED}")


def _big_int(text: str) -> int:
    value = int(text, 16)
    if value in INT64 or hex(value) != text:
        raise ValueError(f"{text[:40]!r} is not a canonical big integer")
    return value
