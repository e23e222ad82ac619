"""Values of types of the standard library as records: sets, times, paths, exact numbers.

A `Typed` record has the name of one of the types below and the values that an instance is made of;
nothing is looked up by import path. Each value has one record: members of a set are in the order of
their encodings, whatever order the set has, so that ranks with equal sets have equal records.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from operator import lt
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchrelay.record.probing import FEW, check_set
from torchrelay.record.values import (
    INT64,
    MAX_NESTED,
    PLAIN,
    Typed,
    Value,
    decode_value,
    encode_value,
)

MAX_FRACTION_BITS = 1 << 16  # of each of its numbers: reducing them takes the square of that
_TIMES = ("datetime.time", "datetime.datetime")
_SHOWN = 64  # members of a set, to people
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_ENCODER = msgspec.msgpack.Encoder()


class MissingZoneError(LookupError):
    """A valid record names a time zone that this machine does not have."""


class PartError(TypeError):
    """A value contains something of a type that has no record."""

    def __init__(self, part: object) -> None:
        super().__init__(type(part).__name__)
        self.part = part


def encode_typed(value: object) -> Value:
    """The record of a plain value or of one of the types below.

    `PartError` for any other type in it, `ValueError` for one that cannot be kept exactly.
    """
    return _encode(value, 0)


def decode_typed(record: Value, *, zones: bool = True) -> object:
    """Undo `encode_typed`. `ValueError` for a record that no value encodes to, and
    `MissingZoneError` for a time zone that this machine lacks; for all of them unless `zones`, as
    each that is looked up takes files to be read."""
    if not isinstance(record, Typed):
        return decode_value(record)
    try:
        return _decode(record, 0, zones)
    except (ArithmeticError, TypeError) as fault:
        raise ValueError(f"not a value of type {record.name[:40]!r}: {fault}") from None


def spelled(record: Value) -> str:
    """A value as text for people, without anything looked up."""
    if isinstance(record, Typed):
        try:
            return _spelled(record)
        except MissingZoneError:
            *items, zone = record.items
            if record.name in _TIMES and isinstance(zone, Typed):
                where = zone.items[0] if zone.name == "zoneinfo.ZoneInfo" else spelled(zone)
                return f"{_spelled(Typed(record.name, (*items, None)))} in {where}"
            return f"{record.name}({', '.join(map(spelled, record.items))})"
    return repr(decode_value(record))


def _spelled(record: Typed) -> str:
    if record.name in ("set", "frozenset") and record.items:
        some = [*map(spelled, record.items[:_SHOWN])]
        some += ["..."] if len(record.items) > _SHOWN else []
        text = f"{{{', '.join(some)}}}"
        return text if record.name == "set" else f"frozenset({text})"
    return repr(decode_typed(record, zones=False))


class _Kind(NamedTuple):
    """A type: what an instance is made of, and an instance made of that."""

    type: type
    items: Callable[[Any], Sequence[object]]
    make: Callable[..., object]


def _encode(value: object, depth: int) -> Value:
    kind = _BY_TYPE.get(type(value))
    if kind is None:
        try:
            return encode_value(value)
        except TypeError:
            raise PartError(value) from None
    if depth >= MAX_NESTED:
        raise ValueError(f"values nested deeper than {MAX_NESTED}")
    items = [
        item if type(item) is int and item in INT64 else _encode(item, depth + 1)
        for item in kind.items(value)
    ]
    if isinstance(value, (set, frozenset)):
        items.sort(key=_ENCODER.encode)
    return Typed(_NAMES[kind.type], tuple(items))


def _decode(record: Typed, depth: int, zones: bool) -> Any:
    kind = _BY_NAME.get(record.name)
    if kind is None:
        raise ValueError(f"a value of type {record.name[:40]!r}")
    if depth >= MAX_NESTED:
        raise ValueError(f"values nested deeper than {MAX_NESTED}")
    if kind.type is zoneinfo.ZoneInfo and not zones:
        raise MissingZoneError("not looked up")
    items = [
        item
        if type(item) in PLAIN
        else _decode(item, depth + 1, zones)
        if isinstance(item, Typed)
        else decode_value(item)
        for item in record.items
    ]
    if kind.type in (set, frozenset):
        return kind.make(_members(items, record.items))
    value = kind.make(*items)
    # One value, one record: also of numbers that the type takes modulo something, or normalises.
    again = kind.items(value)
    if len(again) != len(items) or not all(map(_is_same, again, items)):
        raise ValueError(f"a value of type {record.name[:40]!r} in another spelling")
    return value


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _members(members: Sequence[Any], records: Sequence[Value]) -> Collection[object]:
    """The members of a set. `ValueError` where two are equal, or out of order."""
    spellings = [*map(_ENCODER.encode, records)]
    if not all(map(lt, spellings, spellings[1:])):
        raise ValueError("members of a set out of order")
    if len(members) > FEW:
        hashes = np.fromiter(map(hash, members), np.int64, len(members)).astype(np.uint64)
        check_set(hashes, [1 + len(one) // 8 for one in spellings])
    found = dict.fromkeys(members)
    if len(found) < len(members):
        raise ValueError("a set has one member twice")
    return found


def _whole(*numbers: object) -> tuple[Any, ...]:
    if not all(type(number) is int for number in numbers):
        raise ValueError("a number that is not whole")
    return numbers


# Of each type.


def _of_time(value: datetime.time | datetime.datetime) -> tuple[object, ...]:
    zone = value.tzinfo
    return (value.hour, value.minute, value.second, value.microsecond, value.fold, zone)


def _time(
    hour: Any, minute: Any, second: Any, microsecond: Any, fold: Any, zone: Any
) -> datetime.time:
    _whole(hour, minute, second, microsecond)
    return datetime.time(hour, minute, second, microsecond, zone, fold=fold)


def _datetime(
    year: Any,
    month: Any,
    day: Any,
    hour: Any,
    minute: Any,
    second: Any,
    microsecond: Any,
    fold: Any,
    zone: Any,
) -> datetime.datetime:
    _whole(year, month, day, hour, minute, second, microsecond)
    return datetime.datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _timezone_items(zone: datetime.timezone) -> tuple[object, ...]:
    offset, name = zone.utcoffset(None), zone.tzname(None)
    bare = datetime.timezone(offset)
    return (offset,) if bare.tzname(None) == name and repr(bare) == repr(zone) else (offset, name)


def _zone_items(zone: zoneinfo.ZoneInfo) -> tuple[object, ...]:
    if zone.key is None:
        raise ValueError("a time zone without a key")
    return (zone.key,)


@lru_cache(maxsize=1024)
def _zone(key: object) -> zoneinfo.ZoneInfo:
    if not isinstance(key, str) or len(key) > 255 or _ZONE.fullmatch(key) is None:
        raise ValueError("a time zone has a name such as Europe/Vienna")
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as fault:
        raise MissingZoneError(
            f"this machine has no time zone {key!r}: install the tzdata package"
        ) from fault


def _uuid_items(value: uuid.UUID) -> tuple[object, ...]:
    safe = value.is_safe.value
    return (value.int,) if safe is None else (value.int, safe)


def _uuid(number: Any, safe: Any = None) -> uuid.UUID:
    return uuid.UUID(int=_whole(number)[0], is_safe=uuid.SafeUUID(safe))


def _fraction_items(value: fractions.Fraction) -> tuple[object, ...]:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError(f"a Fraction of numbers of more than {MAX_FRACTION_BITS} bits")
    return value.numerator, value.denominator


def _fraction(*numbers: Any) -> fractions.Fraction:
    if any(number.bit_length() > MAX_FRACTION_BITS for number in _whole(*numbers)):
        raise ValueError(f"a Fraction of numbers of more than {MAX_FRACTION_BITS} bits")
    return fractions.Fraction(*numbers)


def _text(value: object) -> tuple[str]:
    return (str(value),)


def _decimal_text(value: decimal.Decimal) -> tuple[str]:
    """Its text, whatever the caller's decimal context says about text."""
    return (decimal.Context(capitals=1).to_sci_string(value),)


def _of_text(kind: Callable[[str], object]) -> Callable[[object], object]:
    def make(text: object) -> object:
        if not isinstance(text, str):
            raise ValueError("text was expected")
        return kind(text)

    return make


def _ends(value: range | slice) -> tuple[object, ...]:
    return value.start, value.stop, value.step


_KINDS = {
    "tuple": _Kind(tuple, tuple, lambda *items: items),
    "set": _Kind(set, tuple, set),
    "frozenset": _Kind(frozenset, tuple, frozenset),
    "range": _Kind(range, _ends, lambda *ends: range(*_whole(*ends))),
    "slice": _Kind(slice, _ends, slice),
    "datetime.date": _Kind(
        datetime.date,
        lambda day: (day.year, day.month, day.day),
        lambda *numbers: datetime.date(*_whole(*numbers)),
    ),
    "datetime.time": _Kind(datetime.time, _of_time, _time),
    "datetime.datetime": _Kind(
        datetime.datetime,
        lambda value: (value.year, value.month, value.day, *_of_time(value)),
        _datetime,
    ),
    "datetime.timedelta": _Kind(
        datetime.timedelta,
        lambda value: (value.days, value.seconds, value.microseconds),
        lambda *numbers: datetime.timedelta(*_whole(*numbers)),
    ),
    "datetime.timezone": _Kind(datetime.timezone, _timezone_items, datetime.timezone),
    "zoneinfo.ZoneInfo": _Kind(zoneinfo.ZoneInfo, _zone_items, _zone),
    "uuid.UUID": _Kind(uuid.UUID, _uuid_items, _uuid),
    "decimal.Decimal": _Kind(decimal.Decimal, _decimal_text, _of_text(decimal.Decimal)),
    "fractions.Fraction": _Kind(fractions.Fraction, _fraction_items, _fraction),
    "pathlib.PurePosixPath": _Kind(pathlib.PurePosixPath, _text, _of_text(pathlib.PurePosixPath)),
    "pathlib.PureWindowsPath": _Kind(
        pathlib.PureWindowsPath, _text, _of_text(pathlib.PureWindowsPath)
    ),
    "pathlib.Path": _Kind(type(pathlib.Path()), _text, _of_text(pathlib.Path)),
}
_BY_NAME = _KINDS
_NAMES = {kind.type: name for name, kind in _KINDS.items()}
_BY_TYPE = {kind.type: kind for kind in _KINDS.values()}
