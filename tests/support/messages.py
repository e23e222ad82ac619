"""Messages that nobody should send: every field of every kind, with what it may not be."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec import inspect

from tests.support.ways import patched
from torchrelay.transports.meeting.connection import Connection
from torchrelay.transports.meeting.directory import Identity
from torchrelay.transports.routes.cuda.handles import Export
from torchrelay.transports.routes.group import GroupFacts
from torchrelay.transports.routes.host.facts import MemoryFacts, MemoryTable
from torchrelay.transports.routes.host.ring import Fill, Ring
from torchrelay.transports.routes.tcp import TcpAnswer, TcpGo
from torchrelay.transports.wire import messages

KINDS: tuple[Any, ...] = messages.MESSAGES


def read_as(kind: Any, data: bytes) -> Any:
    """A message of one kind, as a peer reads it."""
    return messages.reader(kind)(data)


ROUTE_KINDS: tuple[Any, ...] = (
    *(MemoryFacts, MemoryTable, Ring, Fill),
    *(Export, GroupFacts, TcpAnswer, TcpGo),
)
"""What the ends of routes send to each other, within messages."""
OTHER_KINDS: tuple[Any, ...] = (Identity,)
"""What else a peer writes."""
SUSPECTS = (-(1 << 63), -5, -1, 1 << 31, 1 << 60, 1 << 63, (1 << 64) - 1)


class Field(NamedTuple):
    """One field of a message, however deep in it: where it stands, and what it is declared as."""

    kind: type
    name: str
    path: tuple[int | str, ...]
    type: Any

    @property
    def id(self) -> str:
        return f"{self.kind.__name__}.{self.name}"


def fields_of(kind: type) -> list[Field]:
    return list(_walk(kind, inspect.type_info(kind), "", ()))


def _walk(kind: type, found: Any, name: str, path: tuple[int | str, ...]) -> Iterator[Field]:
    if isinstance(found, inspect.UnionType):
        for one in found.types:
            yield from _walk(kind, one, name, path)
    elif isinstance(found, inspect.StructType):
        first = 0 if found.tag is None else 1
        for index, field in enumerate(found.fields, first):
            yield from _walk(kind, field.type, f"{name}.{field.name}".strip("."), (*path, index))
    elif isinstance(found, inspect.Metadata):
        yield from _walk(kind, found.type, name, path)
    else:
        yield Field(kind, name, path, found)
        if isinstance(found, inspect.VarTupleType):
            yield from _walk(kind, found.item_type, f"{name}[]", (*path, 0))
        elif isinstance(found, inspect.TupleType):
            for index, item in enumerate(found.item_types):
                yield from _walk(kind, item, f"{name}.{index}", (*path, index))
        elif isinstance(found, inspect.DictType):
            yield from _walk(kind, found.value_type, f"{name}{{}}", (*path, "name"))


def sample(found: Any) -> Any:
    """A value that a type takes, in the form in which it travels, with nothing left out."""
    if isinstance(found, type):
        found = inspect.type_info(found)
    if isinstance(found, inspect.Metadata):
        return sample(found.type)
    if isinstance(found, inspect.UnionType):
        return sample(next(one for one in found.types if not isinstance(one, inspect.NoneType)))
    if isinstance(found, inspect.StructType):
        values = [sample(field.type) for field in found.fields]
        return values if found.tag is None else [found.tag, *values]
    if isinstance(found, inspect.VarTupleType):
        return [sample(found.item_type)]
    if isinstance(found, inspect.TupleType):
        return [sample(item) for item in found.item_types]
    if isinstance(found, inspect.DictType):
        return {"name": sample(found.value_type)}
    if isinstance(found, inspect.IntType):
        return max(found.ge or 0, 0)
    if isinstance(found, inspect.BytesType):
        return bytes(found.min_length or 0)
    plain = {inspect.FloatType: 0.0, inspect.StrType: ""}
    return plain.get(type(found), False)


def wrong_values(found: Any) -> list[Any]:
    """What a field of this type may not be."""
    if isinstance(found, inspect.IntType | inspect.FloatType):
        low, high = found.ge, found.le
        values = [v for v in SUSPECTS if low is None or high is None or not low <= v <= high]
        near = [] if low is None or high is None else [low - 1, high + 1]
        strange: list[Any] = ["5", b"5", [5], {"a": 5}, True]
        if isinstance(found, inspect.IntType):
            return [*values, *near, *strange, 0.5, 5.0]
        return [*values, *strange, float("nan"), float("inf"), float("-inf")]
    if isinstance(found, inspect.BoolType):
        return [0, 1, None, "yes", []]
    if isinstance(found, inspect.StrType):
        return [0, b"\xff", [], "x" * min((found.max_length or 0) + 1, 1 << 16)]
    if isinstance(found, inspect.BytesType):
        short = [bytes(found.min_length - 1)] if found.min_length else []
        most = found.max_length or 0
        return [5, "x", [], *short, *([bytes(most + 1)] if most < 1 << 16 else [])]
    return [5, "x", -1.0]


def forged(field: Field, value: Any) -> bytes:
    """A message that is as it should be but for one field."""
    message = sample(field.kind)
    at = message
    for step in field.path[:-1]:
        at = at[step]
    at[field.path[-1]] = value
    return msgspec.msgpack.encode(message)


def frame(kind: type, body: bytes) -> bytes:
    """The frame of a message, whatever its body is."""
    return frame_with(messages._TYPES[kind], len(body), body=body) + body  # type: ignore[index]


def frame_with(
    kind: int,
    length: int,
    *,
    magic: int = messages._MAGIC,
    version: int = messages.VERSION,
    body: bytes = b"",
) -> bytes:
    """The head of a frame, as a peer would make it."""
    digest = xxhash.xxh3_128_digest(body)
    facts = messages._FACTS.pack(magic, version, kind, length, digest)
    return facts + xxhash.xxh3_64_digest(facts)


def send_bytes(connection: Connection, data: bytes) -> None:
    """Send what `Connection.send` would not."""
    left = memoryview(data)
    while left:
        try:
            left = left[connection._sock.send(left) :]
        except BlockingIOError:
            select.select([], [connection._sock], [], 10)


def altering(alter: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Within: this process sends what `alter` makes of each message: another one, several in a
    list, or nothing."""
    original = Connection.send

    def send(self: Connection, message: messages.Message) -> None:
        altered = alter(message)
        for one in altered if isinstance(altered, list) else [altered]:
            if isinstance(one, bytes):
                send_bytes(self, one)
            elif one is not None:
                original(self, one)

    return patched(Connection, send=send)
