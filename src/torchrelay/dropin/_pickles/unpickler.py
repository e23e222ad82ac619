"""Pickles read into inert values, whose fields are then taken by type and within bounds: nothing is
imported, and nothing is called or set but what this module makes itself.

The standard library's unpickler in Python does the work, with a closed set of opcodes. In place of
an import it makes a `Global`, in place of an object a `PickledCall`: both are only looked at. The
small values of `_VALUES` are made at once, of checked arguments.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchrelay.pause import gc_paused

MAX_DEPTH = 200
_MAX_MARKS = 4 * MAX_DEPTH  # that are open at once: a level of a state has a few
_FEW_PARTS = 1000
MAX_DIMS = 64
MAX_NUMBER = 1 << 62
_DTYPES = {f"torch.{n}": d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}


class PickleRefusedError(Exception):
    """The pickle holds something that its reader does not take."""


def refuse(why: str) -> NoReturn:
    raise PickleRefusedError(why)


class Global:
    """A name that the pickle would import. `kind` is what it stands for, where that is known."""

    __slots__ = ("kind", "name")

    def __init__(self, name: str, kind: type | None = None) -> None:
        self.name, self.kind = name, kind


class PickledCall:
    """An object that the pickle would make: its type's name, its arguments and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None


class PickledDict(dict[Any, Any]):
    """A dict whose keys cannot make it slow: text, which has a secret hash, and records."""

    __slots__ = ()

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) is not str and type(key) is not PickledCall:
            refuse("a dict has keys other than field names and records")
        super().__setitem__(key, value)


class WorkLimit:
    """Steps for parts that each of their owners has to look at. A short pickle whose parts share
    each other could describe a vast tree."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.left = 4 * length + 10_000

    def charge(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            refuse("its parts share each other more often than its length allows")


# Checks of single values.


def typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        refuse(f"{kind.__name__} was expected, not {type(value).__name__}")
    return value


def count(value: object, cap: int = MAX_NUMBER) -> int:
    if type(value) is not int or not 0 <= value < cap:
        refuse("a number is out of bounds")
    return value


def dims(value: object) -> tuple[Any, ...]:
    """A tuple with an item for each dimension of a tensor or a mesh."""
    if len(typed(value, tuple)) > MAX_DIMS:
        refuse(f"it has more than {MAX_DIMS} dimensions")
    return value  # type: ignore[return-value]


def counts(value: object) -> tuple[int, ...]:
    return tuple([count(n) for n in dims(value)])


def named(value: object, *names: str) -> PickledCall:
    """An object of the type that has one of these names."""
    if type(value) is not PickledCall or value.name not in names:
        refuse(f"{names[0]} was expected")
    return value


def fields(value: object, name: str, *order: str) -> dict[str, Any]:
    """The fields set on a new `name`; a class with slots sets a list of them, in `order`."""
    state = named(value, name).state
    if type(state) is tuple and len(state) == 2 and state[0] is None:
        state = state[1]
    if type(state) is list:
        return dict(zip(order, state, strict=False))
    found: dict[str, Any] = typed(state, PickledDict)
    return found


# Values that are made at once.


def _size(numbers: object) -> torch.Size:
    return torch.Size(counts(numbers))


def _device(kind: object, *number: object) -> torch.device:
    return torch.device(typed(kind, str), *(count(n, 1 << 15) for n in number))


def _complex(real: object, imag: object) -> complex:
    return complex(typed(real, float), typed(imag, float))


_VALUES: dict[str, Callable[..., object]] = {
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda name: typed(name, str),
    "builtins.complex": _complex,
}


_STOCK: dict[int, Callable[[Any], None]] = pickle._Unpickler.dispatch


def _counted(act: Callable[[Any], None]) -> Callable[[Any], None]:
    """The opcode of a container: one byte that takes fifty of memory."""

    def run(self: _Unpickler) -> None:
        self.containers -= 1
        if self.containers < 0:
            refuse("it has more containers than its length allows")
        act(self)

    return run


class _Unpickler(pickle._Unpickler):
    names: frozenset[str]
    other: Callable[[str, str], type | None]
    containers: int  # how many it may still make
    kept: int  # how many values it may keep to come back to
    # Of the base class:
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    append: Callable[[object], None]
    read: Callable[[int], bytes]

    def find_class(self, module: str, name: str) -> Global | torch.dtype:
        full = f"{module}.{name}"
        if full in _DTYPES:
            return _DTYPES[full]
        if full in self.names or full in _VALUES:
            return Global(full)
        if (kind := self.other(module, name)) is None:
            refuse(f"{full!r:.200} is not in the closed list of names")
        return Global(full, kind)

    def memoize(self) -> None:
        if len(self.memo) >= self.kept:
            refuse("it keeps more values than its length allows")
        _STOCK[pickle.MEMOIZE[0]](self)

    def mark(self) -> None:
        if len(self.metastack) >= _MAX_MARKS:
            refuse(f"over {_MAX_MARKS} marks are open at once")
        _STOCK[pickle.MARK[0]](self)

    def call(self) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or type(what) is not Global:
            refuse("something other than a listed name is called")
        make = _VALUES.get(what.name)
        self.append(PickledCall(what.name, args) if make is None else make(*args))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not PickledCall or made.state is not None:
            refuse("state is set on something other than a new object")
        made.state = state

    def bytearray8(self) -> None:
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    dispatch = (
        {
            code[0]: _STOCK[code[0]]
            for code in (
                *(pickle.PROTO, pickle.FRAME, pickle.STOP),
                *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1),
                *(pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT),
                *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
                *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
                *(pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
                *(pickle.EMPTY_TUPLE, pickle.BINGET, pickle.LONG_BINGET, pickle.STACK_GLOBAL),
            )
        }
        | {
            code[0]: _counted(_STOCK[code[0]])
            for code in (
                *(pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
                pickle.EMPTY_LIST,
            )
        }
        | {
            pickle.MARK[0]: mark,
            pickle.MEMOIZE[0]: memoize,
            pickle.REDUCE[0]: call,
            pickle.NEWOBJ[0]: call,
            pickle.BUILD[0]: build,
            pickle.BYTEARRAY8[0]: bytearray8,
            pickle.EMPTY_DICT[0]: _counted(lambda self: self.append(PickledDict())),
        }
    )


class _WholeReads(io.BytesIO):
    """Gives as many bytes as it is asked for, or none."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if size is not None and len(data) < size:
            raise EOFError
        return data


def unpickled(
    data: bytes,
    names: frozenset[str],
    other: Callable[[str, str], type | None] = lambda module, name: None,
) -> Any:
    """The value that `data` pickles, inert. It may name what is in `names`, where strings are only
    compared and nothing is looked up by them, and types that `other` finds.

    `PickleRefusedError` says why it was refused; other exceptions mean that it is malformed.
    """
    file = _WholeReads(data)
    reader = _Unpickler(file)
    reader.names, reader.other = names, other
    # A pickler keeps each container that it makes, and makes each value that it keeps: that takes
    # two opcodes.
    reader.containers = reader.kept = len(data) // 2 + _FEW_PARTS
    try:
        with gc_paused():
            value = reader.load()
    except EOFError:
        refuse("its record is cut short")
    except KeyError as fault:
        (code,) = fault.args
        refuse(f"opcode {bytes([code])!r} is not one that torch's records need")
    if file.tell() != len(data):
        refuse(f"{len(data) - file.tell()} bytes follow its record")
    return value
