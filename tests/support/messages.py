"""Messages that nobody should send: every field of every kind, with what it may not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import inspect

from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes.cuda_ipc import DeviceMemory, DeviceTables
from torchrelay.transports.routes.host import Memory
from torchrelay.transports.routes.nearby.ring import Fill, Ring
from torchrelay.transports.routes.sockets.channels import Channel

KINDS: tuple[Any, ...] = wire.Message.__args__  # type: ignore[attr-defined]
ROUTE_KINDS: tuple[Any, ...] = (Memory, DeviceMemory, DeviceTables, Ring, Fill, Channel)
"""What the ends of routes say to each other, within messages."""
_under_way: list[Any] = []  # memory that the backend still reads
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
    plain = {inspect.FloatType: 0.0, inspect.StrType: "", inspect.BytesType: b""}
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
    return [5, "x", -1.0]


def forged(field: Field, value: Any) -> bytes:
    """A message that is as it should be but for one field."""
    message = sample(field.kind)
    at = message
    for step in field.path[:-1]:
        at = at[step]
    at[field.path[-1]] = value
    return msgspec.msgpack.encode(message)


def send_payload(line: ControlLine, payload: bytes) -> None:
    """Say something that `ControlLine.send` would not."""
    head = wire._HEAD.pack(wire._MAGIC, wire.MAJOR, wire.MINOR, len(payload))
    size, line._frame_out = line._frame_out, wire.FRAME_BYTES
    inline = len(head) + len(payload) <= size
    frames = [(head + (payload if inline else b"")).ljust(size, b"\0")]
    for data in [*frames, *([] if inline else [payload])]:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        _under_way.append((line.group.send([buffer], line.peer, line._tag), buffer))
