"""Looks through the pickle of a `torch.save` file before torch reads it.

`torch.load(weights_only=True)` runs nothing from outside, but it makes whatever the pickle asks
for: a `bytearray` of any size, a dict whose keys collide, a key whose hash takes years. Here the
same opcodes are carried out on inert objects, and what would cost far more than the file is
refused. What torch does not know is left to torch, which refuses it by name.
"""

from __future__ import annotations

import mmap
import pickle
from typing import Any

from torchrelay.dropin._pickles.machine import BYTE, OPCODES, WORD, Machine, Name, PickledCall
from torchrelay.errors import ManifestError
from torchrelay.record.keys import KeyTable

_MANY_STEPS = 3 << 18  # and one for each 5 bytes: torch takes a microsecond for each
_TABLES = ("builtins.set", "collections.Counter", "collections.OrderedDict")
_TORCH_OPCODES = frozenset(
    code[0]
    for code in (
        *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.BINFLOAT, pickle.LONG1),
        *(pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.EMPTY_LIST, pickle.BINGET),
        *(pickle.LONG_BINGET, pickle.REDUCE, pickle.NEWOBJ),
    )
)


class _Tuple(tuple[Any, ...]):
    """A tuple, and how many items it has with those of the tuples in it."""

    weight: int


class _Dict:
    """A dict of the pickle, of which the keys are looked at."""

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table: KeyTable | None = None


class Scanner(Machine):
    """The machine for the opcodes that torch takes. `at` is where the pickle ends."""

    def __init__(self, data: bytes | mmap.mmap, at: int = 0) -> None:
        super().__init__(data, ())
        self.at = at
        self.puts: list[Any] = []
        self.steps = 0
        self.left = 4 * len(data) + 10_000  # items of keys that may be hashed
        self.storages: dict[str, int] = {}  # bytes of each

    def scan(self) -> bool:
        """Whether it came to the end; if not, torch will stop where this stopped."""
        data, end = self.data, len(self.data)
        most = _MANY_STEPS + end // 5
        try:
            while self.at < end:
                code = data[self.at]
                self.at += 1
                self.steps += 1
                if self.steps > most:
                    raise ManifestError(
                        f"its pickle has over {most} small values and steps, one by one: keep them "
                        "in a tensor"
                    )
                if code == pickle.STOP[0]:
                    return True
                if code == pickle.NONE[0]:
                    self.stack.append(None)
                elif code in _STEPS:
                    _STEPS[code](self)
                else:
                    return False
        except ManifestError:
            raise
        except Exception:  # malformed in one of many ways: torch comes to the same place
            return False
        return False

    def tuple_of(self, items: list[Any]) -> None:
        made = _Tuple(items)
        made.weight = len(items) + sum(x.weight for x in items if isinstance(x, _Tuple))
        self.stack.append(made)

    def last(self, count: int) -> None:
        items = self.stack[-count:]
        del self.stack[-count:]
        self.tuple_of(items)

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text: str = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def named(self) -> None:
        module = self.line()
        self.stack.append(Name(f"{module}.{self.line()}"))

    def put(self, number: int) -> None:
        # Picklers count from 0 on. Other numbers would be keys that collide.
        if number > len(self.puts):
            raise ManifestError("its pickle numbers its parts in no order")
        self.puts[number : number + 1] = [self.stack[-1]]

    def call(self) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        name = what.name if isinstance(what, Name) else ""
        if name == "builtins.bytearray" and args and not _is_bytes(args[0]):
            raise ManifestError("its pickle asks for a bytearray of a size, not of bytes")
        if name == "_codecs.encode" and not isinstance(args[0], str):
            raise ManifestError("its pickle encodes something other than text")
        if name.endswith("Tensor") and any(isinstance(arg, int) for arg in args):
            raise ManifestError("its pickle asks for a tensor of a size, not of a storage")
        made = PickledCall(name, tuple(args))
        if name in _TABLES:
            made.state = table = KeyTable(set if name == "builtins.set" else dict)
            for arg in args:
                pairs = name == "collections.OrderedDict" and isinstance(arg, list)
                self.hash(table, [pair[0] for pair in arg] if pairs else list(arg))
        self.stack.append(made)

    def build(self) -> None:
        self.stack.pop()

    def hash(self, table: KeyTable, keys: list[Any]) -> None:
        weight = sum(key.weight for key in keys if isinstance(key, _Tuple))
        self.left -= weight
        if self.left < 0:
            raise ManifestError("the keys of its dicts are too large")
        table.put(keys, weight)

    def items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, _Dict):
            target.table = target.table or KeyTable()
        table = target.table if isinstance(target, _Dict) else target.state
        if isinstance(table, KeyTable):
            self.hash(table, items[::2])

    def extend(self, items: list[Any]) -> None:
        if isinstance(self.stack[-1], list):
            self.stack[-1].extend(items)

    def storage(self) -> None:
        known = self.stack.pop()
        _, kind, key, _, count, *_ = known
        self.storages[str(key)] = int(count) * _ITEM_SIZES.get(kind.name, 1)
        self.stack.append(known)


def _is_bytes(value: object) -> bool:
    return isinstance(value, (bytes, str)) or (
        isinstance(value, PickledCall) and value.name == "_codecs.encode"
    )


def _set_item(m: Scanner) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.items([key, value])


_ITEM_SIZES = {
    f"torch.{name}Storage": size
    for size, names in (
        (2, ("Half", "BFloat16", "Short")),
        (4, ("Float", "Int", "QInt32")),
        (8, ("Double", "Long", "ComplexFloat")),
        (16, ("ComplexDouble",)),
    )
    for name in names
}

_STEPS: dict[int, Any] = {
    **{code: OPCODES[code] for code in _TORCH_OPCODES if code in OPCODES},
    pickle.REDUCE[0]: Scanner.call,
    pickle.NEWOBJ[0]: Scanner.call,
    pickle.BUILD[0]: Scanner.build,
    pickle.GLOBAL[0]: Scanner.named,
    pickle.TUPLE[0]: lambda m: m.tuple_of(m.since_mark()),
    pickle.TUPLE1[0]: lambda m: m.last(1),
    pickle.TUPLE2[0]: lambda m: m.last(2),
    pickle.TUPLE3[0]: lambda m: m.last(3),
    pickle.APPEND[0]: lambda m: m.extend([m.stack.pop()]),
    pickle.APPENDS[0]: lambda m: m.extend(m.since_mark()),
    pickle.EMPTY_DICT[0]: lambda m: m.stack.append(_Dict()),
    pickle.EMPTY_SET[0]: lambda m: m.stack.append(m.new_set()),
    pickle.SETITEM[0]: _set_item,
    pickle.SETITEMS[0]: lambda m: m.items(m.since_mark()),
    pickle.SHORT_BINSTRING[0]: lambda m: m.stack.append(m.take(m.number(BYTE))),
    pickle.BINPUT[0]: lambda m: m.put(m.number(BYTE)),
    pickle.LONG_BINPUT[0]: lambda m: m.put(m.number(WORD)),
    pickle.BINGET[0]: lambda m: m.stack.append(m.puts[m.number(BYTE)]),
    pickle.LONG_BINGET[0]: lambda m: m.stack.append(m.puts[m.number(WORD)]),
    pickle.BINPERSID[0]: Scanner.storage,
}


def check_archive(pickled: bytes, nbytes: int) -> None:
    """Raise `ManifestError` if torch would take far more than `nbytes`, the length of the file, to
    make what this pickle describes."""
    scanner = Scanner(pickled)
    scanner.scan()
    _check_storages(scanner, nbytes)


def check_legacy(data: bytes | mmap.mmap) -> None:
    """The same for a file from before torch 1.6: four pickles, then what they describe."""
    at = 0
    for _ in range(5):
        scanner = Scanner(data, at)
        if not scanner.scan():
            return
        _check_storages(scanner, len(data))
        at = scanner.at


def _check_storages(scanner: Scanner, nbytes: int) -> None:
    wanted = sum(scanner.storages.values())
    if wanted > nbytes:
        raise ManifestError(f"its storages need {wanted} bytes, and the file has {nbytes}")
