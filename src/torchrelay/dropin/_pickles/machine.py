"""A pickle reader that makes nothing: no import, no call, no `__setstate__`.

`Machine` carries out a closed list of opcodes. What a pickle wants to make or call becomes an inert
`PickledCall` of a name from a closed list. Python's own unpickler would not do under `find_class`:
its memo is an array of the size of any index that the bytes name, its extension codes pass by
`find_class`, and `BUILD` sets attributes on whatever is on the stack, functions and classes too.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable, Container
from typing import Any, NoReturn

from torchrelay.errors import RemoteProtocolError
from torchrelay.record.keys import KeyTable

_MANY_SETS = 1000
BYTE, SHORT, WORD, LONG = map(struct.Struct, ("<B", "<H", "<I", "<Q"))
SIGNED, DOUBLE = struct.Struct("<i"), struct.Struct(">d")
SCALARS = (type(None), bool, int, float, str, bytes)


def refuse(why: str) -> NoReturn:
    raise RemoteProtocolError(f"a torch PGTransport peer was refused: {why}")


class Name:
    """A global that the pickle names. It is not the thing."""

    __slots__ = ("name", "namedtuple")

    def __init__(self, name: str, namedtuple: type | None = None) -> None:
        self.name = name
        self.namedtuple = namedtuple


class PickledCall:
    """What the pickle wants made: a name, its arguments and the state to set. Nothing is called."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


def _loaded_namedtuple(module: str, name: str) -> type | None:
    """A namedtuple that this process has already imported; modules are looked at, not run."""
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if (
        isinstance(found, type)
        and found.__bases__ == (tuple,)
        # The constructor that `namedtuple` generates, and no other: it only packs its arguments.
        and getattr(found.__new__, "__module__", None) == f"namedtuple_{found.__name__}"
        and isinstance(vars(found).get("_fields"), tuple)
    ):
        return found
    return None


class Machine:
    """The stack machine of pickle protocols 4 and 5, less all that can import, call or set."""

    def __init__(self, data: Any, names: Container[str]) -> None:
        self.data = data
        self.names = names
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.sets = 0

    def run(self) -> object:
        data, end = self.data, len(self.data)
        while self.at < end:
            code = data[self.at]
            self.at += 1
            if code == pickle.STOP[0]:
                break
            step = OPCODES.get(code)
            if step is None:
                refuse(f"opcode {bytes([code])!r} is not one that torch's records need")
            step(self)
        else:
            refuse("its record is cut short")
        if self.at != end:
            refuse(f"{end - self.at} bytes follow its record")
        (value,) = self.stack
        return value

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            refuse("its record is cut short")
        self.at += size
        taken: bytes = self.data[self.at - size : self.at]
        return taken

    def number(self, layout: struct.Struct) -> Any:
        at = self.at
        self.at = at + layout.size
        if self.at > len(self.data):
            refuse("its record is cut short")
        return layout.unpack_from(self.data, at)[0]

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def protocol(self) -> None:
        if self.number(BYTE) > 5:
            refuse("its pickle protocol is newer than 5")

    def frame(self) -> None:
        # A frame is a hint for buffering; here all bytes are at hand.
        if self.number(LONG) > len(self.data) - self.at:
            refuse("its record is cut short")

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            refuse("a global is named by something other than two strings")
        full = f"{module}.{name}"
        if full in self.names:
            self.stack.append(Name(full))
        elif (found := _loaded_namedtuple(module, name)) is not None:
            self.stack.append(Name(full, found))
        else:
            refuse(f"{full!r:.200} is not in the closed list of names")

    def call(self) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or type(what) is not Name:
            refuse("something other than a listed name is called")
        self.stack.append(PickledCall(what.name, args))

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not PickledCall or target.state is not None:
            refuse("state is set on something other than a new object")
        target.state = state

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            refuse("items are appended to something other than a list")
        target.extend(items)

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # Fields of records have plain names; other keys could make hashing take forever.
        if type(target) is not dict or not all(type(key) is str for key in items[::2]):
            refuse("a dict has keys other than field names")
        target.update(zip(items[::2], items[1::2], strict=True))

    def scalars(self) -> list[Any]:
        items = self.since_mark()
        if not all(type(item) in SCALARS for item in items):
            refuse("a set holds something other than plain values")
        KeyTable(set).put(items)
        return items

    def new_set(self) -> set[Any]:
        # One byte of a pickle asks for one, which takes over 200.
        self.sets += 1
        if self.sets > _MANY_SETS + len(self.data) // 16:
            refuse("it makes more sets than its length allows")
        return set()

    def add(self) -> None:
        items = self.scalars()
        if type(self.stack[-1]) is not set or self.stack[-1]:
            refuse("items are added to something other than a new set")
        self.stack[-1].update(items)


def _push(make: Callable[[Machine], object]) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(make(m))


def _last(count: int) -> Callable[[Machine], tuple[Any, ...]]:
    def take(m: Machine) -> tuple[Any, ...]:
        items = tuple(m.stack[-count:])
        if len(items) != count:
            refuse("its record takes more from the stack than is there")
        del m.stack[-count:]
        return items

    return take


def _counted(layout: struct.Struct, decode: Callable[[bytes], object]) -> Callable[[Machine], None]:
    return _push(lambda m: decode(m.take(m.number(layout))))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


OPCODES: dict[int, Callable[[Machine], None]] = {
    code[0]: step
    for code, step in (
        (pickle.PROTO, Machine.protocol),
        (pickle.FRAME, Machine.frame),
        (pickle.MARK, lambda m: m.marks.append(len(m.stack))),
        (pickle.NONE, _push(lambda m: None)),
        (pickle.NEWTRUE, _push(lambda m: True)),
        (pickle.NEWFALSE, _push(lambda m: False)),
        (pickle.BININT, _push(lambda m: m.number(SIGNED))),
        (pickle.BININT1, _push(lambda m: m.number(BYTE))),
        (pickle.BININT2, _push(lambda m: m.number(SHORT))),
        (pickle.BINFLOAT, _push(lambda m: m.number(DOUBLE))),
        (pickle.LONG1, _counted(BYTE, _long)),
        (pickle.LONG4, _counted(WORD, _long)),
        (pickle.SHORT_BINUNICODE, _counted(BYTE, _text)),
        (pickle.BINUNICODE, _counted(WORD, _text)),
        (pickle.BINUNICODE8, _counted(LONG, _text)),
        (pickle.SHORT_BINBYTES, _counted(BYTE, bytes)),
        (pickle.BINBYTES, _counted(WORD, bytes)),
        (pickle.BINBYTES8, _counted(LONG, bytes)),
        (pickle.BYTEARRAY8, _counted(LONG, bytearray)),
        (pickle.EMPTY_TUPLE, _push(lambda m: ())),
        (pickle.TUPLE1, _push(_last(1))),
        (pickle.TUPLE2, _push(_last(2))),
        (pickle.TUPLE3, _push(_last(3))),
        (pickle.TUPLE, _push(lambda m: tuple(m.since_mark()))),
        (pickle.EMPTY_LIST, _push(lambda m: [])),
        (pickle.APPEND, lambda m: m.extend([m.stack.pop()])),
        (pickle.APPENDS, lambda m: m.extend(m.since_mark())),
        (pickle.EMPTY_DICT, _push(lambda m: {})),
        (pickle.SETITEM, lambda m: m.update(list(_last(2)(m)))),
        (pickle.SETITEMS, lambda m: m.update(m.since_mark())),
        (pickle.EMPTY_SET, _push(Machine.new_set)),
        (pickle.ADDITEMS, Machine.add),
        (pickle.FROZENSET, _push(lambda m: frozenset(m.scalars()))),
        (pickle.MEMOIZE, lambda m: m.memo.append(m.stack[-1])),
        (pickle.BINGET, _push(lambda m: m.memo[m.number(BYTE)])),
        (pickle.LONG_BINGET, _push(lambda m: m.memo[m.number(WORD)])),
        (pickle.STACK_GLOBAL, Machine.name),
        (pickle.REDUCE, Machine.call),
        (pickle.NEWOBJ, Machine.call),
        (pickle.BUILD, Machine.set_state),
    )
}
