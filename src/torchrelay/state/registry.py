"""Types a user adds. Nothing is ever looked up by import path: a name on the wire means the type
that was registered under it in this process, or nothing.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import pathlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from torchrelay.errors import UsageError


class Codec(NamedTuple):
    """How a registered type turns into a state and back."""

    name: str
    type: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


_by_type: dict[type, Codec] = {}
_by_name: dict[str, Codec] = {}
_subclasses: dict[str, type] = {}


def register(
    type_: type,
    *,
    name: str | None = None,
    encode: Callable[[Any], object] | None = None,
    decode: Callable[[Any], object] | None = None,
) -> type:
    """Let instances of `type_` travel in a state; usable as a class decorator.

    A dataclass, an enum and a tensor subclass with `__tensor_flatten__` need nothing more. Any
    other type needs `encode` (instance to a supported state) and `decode` (that state to an
    instance). `name` identifies the type in records, by default it is the class's qualified name;
    both sides register the same one. Registering the same type again replaces its codec.
    """
    if not isinstance(type_, type):
        raise UsageError(f"register takes a type, not {type_!r}")
    name = name or type_.__qualname__
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the name {name!r} cannot be written: pass another") from None
    owner = _by_name.get(name)
    if (owner is not None and owner.type is not type_) or _subclasses.get(name, type_) is not type_:
        raise UsageError(f"the name {name!r} is registered for another type: pass name=")
    if encode is None and decode is None and hasattr(type_, "__tensor_flatten__"):
        _subclasses[name] = type_
        return type_
    if (encode is None) != (decode is None):
        raise UsageError("encode and decode go together: pass both")
    if encode is None or decode is None:
        encode, decode = _derived(type_)
    codec = Codec(name, type_, encode, decode)
    _by_type[type_] = codec
    _by_name[name] = codec
    return type_


# Lookups of registered types, by type or by name; None for those that are not registered.
codec_of = _by_type.get
codec_named = _by_name.get
subclass_named = _subclasses.get


def subclass_name(type_: type) -> str:
    return next((n for n, known in _subclasses.items() if known is type_), type_.__qualname__)


def _derived(type_: type) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    if dataclasses.is_dataclass(type_):
        names = [field.name for field in dataclasses.fields(type_)]

        def rebuild(values: dict[str, object]) -> object:
            # Not __init__: fields without init=, and __post_init__, must not change what was sent.
            instance = object.__new__(type_)
            if set(values) != set(names):
                raise ValueError(f"fields {sorted(values)} are not those of {type_.__name__}")
            for name in names:
                object.__setattr__(instance, name, values[name])
            return instance

        return lambda value: {name: getattr(value, name) for name in names}, rebuild
    if issubclass(type_, enum.Enum):
        return lambda member: member.name, lambda name: type_[name]
    raise UsageError(f"{type_.__name__} is not a dataclass or enum: pass encode= and decode=")


# Types of the standard library that need no registration.


def _buffer(values: dict[str, Any]) -> io.BytesIO:
    buffer = io.BytesIO(values["data"])
    buffer.seek(values["position"])
    return buffer


def _attributes(type_: type) -> Callable[[dict[str, Any]], object]:
    """Makes an instance with these attributes, whatever their names: without calling it."""

    def make(values: dict[str, Any]) -> object:
        if type(values) is not dict or not all(type(name) is str for name in values):
            raise ValueError(f"the attributes of a {type_.__name__} have names")
        instance = type_()
        vars(instance).update(values)
        return instance

    return make


for _plain in (argparse.Namespace, types.SimpleNamespace):
    register(
        _plain,
        name=f"{_plain.__module__}.{_plain.__name__}",
        encode=lambda value: dict(vars(value)),
        decode=_attributes(_plain),
    )
for _path in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath):
    _pure = _path.__name__.startswith("Pure")
    register(_path, name=f"pathlib.{_path.__name__ if _pure else 'Path'}", encode=str, decode=_path)
register(collections.Counter, name="collections.Counter", encode=dict, decode=collections.Counter)
register(
    collections.deque,
    name="collections.deque",
    encode=lambda queue: {"maxlen": queue.maxlen, "items": list(queue)},
    decode=lambda values: collections.deque(values["items"], values["maxlen"]),
)
register(
    io.BytesIO,
    name="io.BytesIO",
    encode=lambda buffer: {"data": buffer.getvalue(), "position": buffer.tell()},
    decode=_buffer,
)
