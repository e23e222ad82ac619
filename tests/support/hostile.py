"""Inputs of up to 2 MB that are made to be dear to read, and what reads each of them.

`CASES` names them. `python -m tests.support.hostile` reads each in turn, and prints what it cost,
the worst first.
"""

from __future__ import annotations

import base64
import itertools
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from torchrelay import Checkpointer
from torchrelay.dropin._pickles.state_record import loads
from torchrelay.dropin.stock_dcp import read_stock
from torchrelay.errors import RelayError
from torchrelay.inspection.step_source import contents_of
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.packed import unpack
from torchrelay.record.encoding import decode, decode_at_rest
from torchrelay.record.probing import FEW
from torchrelay.record.schema import VERSION, pack_column

LENGTH = 2_000_000
P = (1 << 61) - 1  # Python hashes whole numbers modulo this
VALUE = ["v", "plain", 0]
Build = Callable[[], bytes]


class Case(NamedTuple):
    name: str
    build: Build
    read: Callable[[bytes], object]


class Cost(NamedTuple):
    name: str
    nbytes: int
    seconds: float
    megabytes: float
    outcome: str


def measure(case: Case) -> Cost:
    """Read the input once. CPU seconds, and by how much the resident memory grew at its peak."""
    data = case.build()
    before = reset_peak()
    begun = time.process_time()
    try:
        case.read(data)
        outcome = "read"
    except RelayError as fault:
        outcome = f"{type(fault).__name__}: {str(fault)[:90]}"
    except Exception as fault:
        outcome = f"BARE {fault!r:.90}"
    seconds = time.process_time() - begun
    return Cost(case.name, len(data), seconds, (peak() - before) / 1024, outcome)


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The highest resident size since it was last reset, in KiB."""
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) for x in status.splitlines() if x.startswith("VmHWM"))


# Live records ------------------------------------------------------------------------------------


def live(tree: Any, leaves: list[Any], images: Any = ()) -> bytes:
    """The record of a live rank: leaves that are no rows, and images of so many bytes."""
    sizes = sorted(set(images))
    total = sum(-(-size // 16) * 16 for size in images)
    body = {
        "version": VERSION,
        "step": 7,
        "outlines": [
            {
                "tree": tree,
                "leaves": len(leaves),
                "others": leaves,
                "others_at": _column(range(len(leaves))),
            }
        ],
        "images": len(images),
        "image_kinds": [["uint8", [size]] for size in sizes],
        "kind_of": _column(map(sizes.index, images)),
        "volumes": [["", total, 0, _column([total] if total else []), b""]],
    }
    return msgspec.msgpack.encode(body)


def rows(tree: Any, kinds: list[Any], count: int, numbers: Any = None) -> bytes:
    """`count` empty tensors of these kinds: dtype, shape and strides."""
    body = {
        "version": VERSION,
        "step": 7,
        "outlines": [{"tree": tree, "leaves": count, "kinds": numbers}],
        "kinds": [[dtype, shape, None, 0] for dtype, shape, _ in kinds],
        "images": count,
        "image_kinds": kinds,
        "kind_of": numbers,
        "volumes": [["", 0]],
    }
    return msgspec.msgpack.encode(body)


def _column(numbers: Any) -> bytes:
    return pack_column(np.array([*numbers], np.int64))


def new(data: bytes) -> object:
    return land(decode(data)).commit().state


def into(destination: Any, strict: bool = True) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        return land(decode(data), destination(), LandingOptions(strict)).commit()

    return read


def one_dict(keys: list[Any]) -> bytes:
    return live(["d", "dict", keys, [0] * len(keys)], [VALUE])


def fitted(make: Callable[[int], bytes], count: int) -> bytes:
    """What `make` gives for so many items that it is just within the limit."""
    data = make(count)
    while len(data) > LENGTH:
        count = int(count * LENGTH / len(data) * 0.995)
        data = make(count)
    return data


def signs(count: int, width: int = 17) -> Iterator[tuple[int, ...]]:
    """Tuples of -1 and -2, which have one hash."""
    return itertools.islice(itertools.product((-1, -2), repeat=width), count)


def sign_keys() -> bytes:
    return fitted(lambda n: one_dict([["t", key] for key in signs(n)]), 1 << 17)


def big_keys() -> bytes:
    return fitted(lambda n: one_dict([["i", hex(P * (k + 9))] for k in range(n)]), 80_000)


def float_keys() -> bytes:
    """Powers of two that are 61 apart have one hash; there are few, so tuples of them."""
    bits = [int(np.float64(2.0 ** (61 * k)).view(np.uint64)) for k in range(4)]

    def make(n: int) -> bytes:
        picks = itertools.islice(itertools.product(bits, repeat=6), n)
        return one_dict([["t", [["f", b] for b in pick]] for pick in picks])

    return fitted(make, 4096)


@lru_cache(maxsize=2)
def probing_keys(count: int = 85_000, size: int = 1 << 17) -> list[int]:
    """Numbers of different hashes that all look for a place along one sequence of a dict's slots.

    A dict tries slot `5 * slot + 1 + (hash >> 5 * tries)` next. The first half of the numbers takes
    slots that follow each other so; the others come to the start of those and have to pass them.
    """
    taken = np.empty(count // 2, np.int64)
    at = 0
    for place in range(len(taken)):
        taken[place] = at
        at = (5 * at + 1) % size
    occupied = np.zeros(size, bool)
    occupied[taken] = True
    early = np.zeros(size, bool)
    early[taken[: count // 4]] = True
    keys, where = taken.copy(), taken.copy()
    for tries in (1, 2):  # each adds five bits of a key's own choice
        new = np.arange(32) << (size.bit_length() - 6 + 5 * tries)
        keys = (keys[:, None] + new).ravel()
        where = (np.repeat(where, 32) * 5 + 1 + (keys >> 5 * tries)) % size
        keys, where = keys[occupied[where]], where[occupied[where]]
    for tries in range(3, 7):
        where = (where * 5 + 1 + (keys >> 5 * tries)) % size
        keys, where = keys[occupied[where]], where[occupied[where]]
    keys = np.setdiff1d(keys[early[where]], taken)
    return [*taken.tolist(), *keys[: count - len(taken)].tolist()]


def allowed_sign_keys() -> bytes:
    """Dicts of as many keys of one hash as are not looked at."""
    keys = [["t", key] for key in signs(FEW, 8)]
    node = ["d", "dict", keys, [0] * len(keys)]
    return fitted(lambda n: live(["l", "list", [node] * n], [VALUE]), 600)


def allowed_numbers() -> bytes:
    """Dicts of numbers that all try the same slots first."""
    keys = [n << 43 for n in range(FEW + 2)]
    node = ["d", "dict", keys, [0] * len(keys)]
    return fitted(lambda n: live(["l", "list", [node] * n], [VALUE]), 2000)


def regular_numbers() -> bytes:
    return fitted(lambda n: one_dict([k << 43 for k in range(n)]), 200_000)


def chained_numbers() -> bytes:
    """Each key is pushed on by the one before it."""
    size = 1 << 17

    def make(n: int) -> bytes:
        keys, at = [], 0
        for k in range(n):
            keys.append(at + size * 32 * k)
            at = (5 * at + 1) % size
        return one_dict(keys)

    return fitted(make, 80_000)


def sets_of(members: Callable[[int], list[Any]], count: int) -> bytes:
    """A set of members that have been sorted as they have to be."""
    order = msgspec.msgpack.encode
    return fitted(
        lambda n: live(0, [["v", "object", ["o", "set", sorted(members(n), key=order)]]]),
        count,
    )


def sign_sets() -> bytes:
    return sets_of(lambda n: [["o", "tuple", key] for key in signs(n)], 60_000)


def probing_sets() -> bytes:
    return sets_of(lambda n: probing_keys(n, 1 << 17), 85_000)


def honest_sets() -> bytes:
    return sets_of(lambda n: [k * 1001 for k in range(n)], 300_000)


def many_sets() -> bytes:
    leaf = ["v", "object", ["o", "set", [*range(0, 2500, 10)]]]
    return fitted(lambda n: live(["l", "list", [*range(n)]], [leaf] * n), 3000)


def deep_objects() -> bytes:
    value: Any = 1
    for _ in range(120):
        value = ["o", "tuple", [value]]
    return fitted(lambda n: live(["l", "list", [*range(n)]], [["v", "object", value]] * n), 3000)


def fractions() -> bytes:
    one = ["o", "fractions.Fraction", [["i", hex(3**41_000)], ["i", hex(2**65_000)]]]
    return fitted(lambda n: live(["l", "list", [*range(n)]], [["v", "object", one]] * n), 100)


def decimals() -> bytes:
    digits = ["o", "decimal.Decimal", ["7" * (LENGTH // 2)]]
    return live(0, [["v", "object", ["o", "set", [digits]]]])


def zones() -> bytes:
    def make(n: int) -> bytes:
        leaves = [["v", "object", ["o", "zoneinfo.ZoneInfo", [f"No/{k}"]]] for k in range(n)]
        return live(["l", "list", [*range(n)]], leaves)

    return fitted(make, 60_000)


def chain(depth: int, bottom: Any) -> Any:
    for _ in range(depth):
        bottom = ["l", "list", [bottom]]
    return bottom


def deep_slots() -> bytes:
    return live(chain(125, ["l", "list", [0] * (LENGTH - 3000)]), [VALUE])


def deep_leaves() -> bytes:
    def make(n: int) -> bytes:
        return live(chain(125, ["l", "list", list(range(n))]), [["z", []]] * n)

    return fitted(make, 300_000)


def deep_values() -> bytes:
    def make(n: int) -> bytes:
        return live(chain(125, ["l", "list", list(range(n))]), [VALUE] * n)

    return fitted(make, 150_000)


def deep_tensors() -> bytes:
    def make(n: int) -> bytes:
        return rows(chain(125, ["l", "list", list(range(n))]), [["float32", [0], None]], n)

    return fitted(make, 250_000)


def deep_branches() -> bytes:
    def make(n: int) -> bytes:
        return live(["l", "list", [chain(120, 0) for _ in range(n)]], [VALUE])

    return fitted(make, 2000)


def many_empty() -> bytes:
    return live(["l", "list", [["l", "list", []]] * (LENGTH // 9)], [])


def long_key(length: int, count: int) -> bytes:
    tree = ["d", "dict", ["k" * length], [["l", "list", list(range(count))]]]
    return live(tree, [VALUE] * count)


def long_keys() -> bytes:
    return long_key(100_000, 20_000)


def long_key_slots() -> bytes:
    tree = ["d", "dict", ["k" * 1_000_000], [["l", "list", [0] * 900_000]]]
    return live(tree, [VALUE])


def long_key_dtypes() -> bytes:
    """Each leaf is looked at by itself, and may be refused by its path."""
    tree = ["d", "dict", ["k" * 1_000_000], [["l", "list", list(range(60_000))]]]
    return live(tree, [["v", "dtype", "int8"]] * 60_000)


def nested_long_keys() -> bytes:
    bottom: Any = ["l", "list", [0] * 700_000]
    for _ in range(120):
        bottom = ["d", "dict", ["k" * 10_000], [bottom]]
    return live(bottom, [VALUE])


def namedtuples() -> bytes:
    def make(n: int) -> bytes:
        nodes = [["n", f"N{k}", ["a"], [0], ""] for k in range(n)]
        return live(["l", "list", nodes], [VALUE])

    return make(20_000)


def namedtuple_fields() -> bytes:
    def make(n: int) -> bytes:
        nodes = [["n", "N", [f"f{k}"], [0], ""] for k in range(n)]
        return live(["l", "list", nodes], [VALUE])

    return fitted(make, 150_000)


def wide_namedtuple() -> bytes:
    def make(n: int) -> bytes:
        fields = [f"f{k}" for k in range(n)]
        return live(["n", "N", fields, [0] * n, ""], [VALUE])

    return fitted(make, 250_000)


def huge_namedtuple_names() -> bytes:
    return live(["l", "list", [["n", "N" * 1_900_000, ["a"], [0], ""]]], [VALUE])


def shapes(count: int) -> list[list[int]]:
    """Shapes of no elements, all of one hash."""
    found = itertools.product((1, 1 + P), repeat=17)
    return [[0, *shape] for shape in itertools.islice(found, count)]


def leaf_shapes() -> bytes:
    def make(n: int) -> bytes:
        leaves = [["t", "int8", shape, [0] * 18, -1] for shape in shapes(n)]
        return live(["l", "list", list(range(n))], leaves)

    return fitted(make, 16_000)


def kind_shapes() -> bytes:
    def make(n: int) -> bytes:
        kinds = [["int8", shape, [0] * 18] for shape in shapes(n)]
        return rows(["l", "list", list(range(n))], kinds, n, _column(range(n)))

    return fitted(make, 16_000)


def other_shapes() -> bytes:
    """In leaves that are not in the table of plain tensors, and each of them twice."""

    def make(n: int) -> bytes:
        part = [["t", "int8", shape, [0] * 18, -1] for shape in shapes(n)]
        leaves = [["s", "coo", [1], [one, one]] for one in part]
        return live(["l", "list", list(range(n))], leaves)

    return fitted(make, 8_000)


def wide_shapes() -> bytes:
    """Shapes of 64 dimensions, in kinds that nothing uses."""

    def make(n: int) -> bytes:
        return rows(["l", "list", []], [["int8", [0] * 64, [0] * 64]] * n, 0)

    return fitted(make, 14_000)


def odd_columns() -> bytes:
    """One kind with a stride for many tensors, so that each is looked at by itself."""

    def make(n: int) -> bytes:
        return rows(["l", "list", list(range(n))], [["int8", [0] * 64, [7] * 64]], n)

    return fitted(make, 250_000)


def array_dtypes() -> bytes:
    """numpy dtypes that are dear to make, each another."""

    def make(n: int) -> bytes:
        leaves = []
        for k in range(n):
            fields = ", ".join(f'["f{k}_{i}", "|u1"]' for i in range(400))
            leaves.append(["a", f"[{fields}]", [0], False, -1, 0])
        return live(["l", "list", list(range(n))], leaves)

    return fitted(make, 300)


def nested_dtype() -> bytes:
    text = '"|u1"'
    for _ in range(900):
        text = f'[["a", {text}]]'
    leaves = [["a", text + " " * k, [0], False, -1, 0] for k in range(120)]
    return live(["l", "list", list(range(120))], leaves)


def meshes() -> bytes:
    """Meshes of numbers that a set finds hard."""
    ranks = probing_keys()
    local = ["t", "int8", [0], None, -1]
    mesh = ["cpu", [len(ranks)], ranks, None]
    leaf = ["D", local, mesh, [["replicate"]], [0], [1], None]
    return live(0, [leaf])


def many_meshes() -> bytes:
    def make(n: int) -> bytes:
        local, placements = ["t", "int8", [0], None, -1], [["replicate"]] * 16
        meshes = [["cpu", [1] * 16, [k], None] for k in range(n)]
        leaves = [["D", local, mesh, placements, [0], [1], None] for mesh in meshes]
        return live(["l", "list", list(range(n))], leaves)

    return fitted(make, 10_000)


def sharded_boxes() -> bytes:
    def make(n: int) -> bytes:
        box = [[0] * 64, [0] * 64, None]
        leaf = ["S", [], [], [box] * n, [0] * 64, "int8"]
        return live(0, [leaf])

    return fitted(make, 15_000)


def deep_context() -> bytes:
    """Trees inside of tensor subclasses."""

    def make(n: int) -> bytes:
        leaf = ["x", "Nobody", [], [], chain(120, ["d", "dict", [], []]), [], [0], [1]]
        return live(["l", "list", list(range(n))], [leaf] * n)

    return fitted(make, 2000)


def long_number() -> bytes:
    return live(0, [["v", "plain", ["i", "0x" + "f" * 1_900_000]]])


def many_long_numbers() -> bytes:
    number = ["i", "0x" + "f" * 5_000]
    return live(["l", "list", list(range(390))], [["v", "plain", number]] * 390)


def tied_views() -> bytes:
    """Views of one small storage that each reach all of it."""

    def make(n: int) -> bytes:
        leaves = [["t", "int8", [8, 8], [0, 1], 0]] * n
        return live(["l", "list", list(range(n))], leaves, [8])

    return fitted(make, 120_000)


def record_nodes() -> bytes:
    return live(["l", "list", [chain_of_records(100) for _ in range(1500)]], [VALUE])


def chain_of_records(depth: int) -> Any:
    node: Any = 0
    for _ in range(depth):
        node = ["r", "nobody", node]
    return node


# Commit records ----------------------------------------------------------------------------------


ORIGIN = {"time": "", "torch": "", "torchrelay": ""}
DATA = ["data", 1 << 40, 1 << 40, None, "A" * 22 + "=="]


def record(**fields: Any) -> bytes:
    fields.setdefault("outlines", [outlined(["d", "dict", [], []], [])])
    body = msgspec.json.encode({"version": VERSION, "step": 7, **fields, "origin": ORIGIN})
    digest = xxhash.xxh3_128_hexdigest(body)
    return b'{"record":%b,"digest":"%b"}' % (body, digest.encode())


def load(**options: Any) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            step = Path(folder) / "step-7"
            step.mkdir()
            (step / "manifest.json").write_bytes(data)
            with Checkpointer(folder) as checkpointer:
                chosen = {key: make() for key, make in options.items()}
                return checkpointer.load(step=7, **chosen)

    return read


def listed(data: bytes) -> object:
    return contents_of(decode_at_rest(data))


def outlined(tree: Any, others: list[Any], **columns: Any) -> Any:
    """An outline of leaves none of which is a row."""
    at = list(range(len(others)))
    return {"tree": tree, "leaves": len(others), "others": others, "others_at": at, **columns}


def in_rows(count: int, tree: Any = None) -> Any:
    """An outline of as many rows of the first kind and image."""
    return {"tree": tree or ["l", "list", list(range(count))], "leaves": count}


def outline(tree: Any, leaves: list[Any]) -> bytes:
    return record(outlines=[outlined(tree, leaves)])


def _stored(shape: list[int], boxes: list[Any], images: int = 1) -> bytes:
    columns = ([n for box in boxes for n in box[at]] for at in (0, 1))
    kind = ["int8", shape, None, len(boxes), *columns]
    return record(
        images=images,
        image_kinds=[kind] * images,
        kind_of=list(range(images)),
        volumes=[DATA],
        starts=[0] * (len(boxes) * images),
    )


def staircase_shards() -> bytes:
    """Two halves of a box, of which one is cut on every dimension: each half spans 2**19 cells."""
    dims = 64
    shape = [2] * 20 + [1] * (dims - 20)
    shards: list[Any] = []
    rest_offsets, rest_sizes = [0] * dims, list(shape)
    for dim in range(20):
        offsets, sizes = list(rest_offsets), list(rest_sizes)
        offsets[dim], sizes[dim] = 1, 1
        shards.append([offsets, sizes])
        rest_sizes[dim] = 1
    shards.append([rest_offsets, rest_sizes])
    return _stored(shape, shards)


def staggered_shards() -> bytes:
    """Rows that are each cut elsewhere, so that no dimension sets few boxes beside each other."""

    def make(n: int) -> bytes:
        shards = []
        for k in range(n):
            shards.append([[k, 0], [1, k + 1]])
            shards.append([[k, k + 1], [1, n - k]])
        return _stored([n, n + 1], shards)

    return fitted(make, 40_000)


def crossing_shards() -> bytes:
    """Long thin boxes along one dimension, and as many along the other."""

    def make(n: int) -> bytes:
        shards = [[[k, 0], [1, n]] for k in range(n)]
        shards += [[[n, k], [n, 1]] for k in range(n)]
        return _stored([2 * n, n], shards)

    return fitted(make, 40_000)


def many_small_grids() -> bytes:
    grid = [[[i, j], [1, 1]] for i in range(8) for j in range(8)]
    return fitted(lambda n: _stored([8, 8], grid, n), 2_000)


def own_ranks() -> bytes:
    ranks = 20_000
    outlines = [outlined(["l", "list", list(range(20_000))], [["z", []]] * 20_000)]
    own = [[rank, [[0, ["z", []]]], []] for rank in range(ranks)]
    return record(outlines=outlines, ranks=[0] * ranks, differences=own)


def tensors(rows: Any, images: int = 1, **fields: Any) -> bytes:
    """Images of one byte, and an outline of rows of the first of them."""
    return record(
        outlines=[{**rows, "images": packed_column(np.zeros(rows["leaves"], np.int64))}],
        kinds=[["int8", [1]]],
        images=images,
        image_kinds=[["int8", [1]]],
        volumes=[DATA],
        starts=[0] * images,
        **fields,
    )


def packed_column(numbers: Any) -> str:
    return base64.b64encode(pack_column(numbers)).decode()


def own_images() -> bytes:
    """Each of many ranks has another image in one of very many rows."""
    ranks = 20_000
    own = [[rank, [], [[0, 1]]] for rank in range(ranks)]
    return tensors(in_rows(100_000), 2, ranks=[0] * ranks, differences=own)


def own_leaves_in_rows() -> bytes:
    """Each of many ranks has another leaf in place of one of very many rows."""
    ranks = 10_000
    own = [[rank, [[5, ["t", "int8", [1], None, 0]]], []] for rank in range(ranks)]
    return tensors(in_rows(100_000), ranks=[0] * ranks, differences=own)


def own_outlines() -> bytes:
    """Many outlines, and many ranks with something of their own."""
    n = 12_000
    outlines = [outlined(["l", "list", [0]], [["z", []]])] * n
    own = [[rank, [[0, ["z", [1]]]], []] for rank in range(n)]
    return record(outlines=outlines, ranks=list(range(n)), differences=own)


def outlines_of_ranks() -> bytes:
    """Many ranks of one large outline, loaded by a group of another size."""
    n = 60_000
    outlines = [
        outlined(["l", "list", list(range(n))], [["z", []]] * n),
        outlined(["l", "list", [0]], [["z", []]]),
    ]
    return record(outlines=outlines, ranks=[0, 1] * 125_000)


def record_long_names() -> bytes:
    """Tensors whose names are long, because of one key above all of them."""
    n = 60_000
    tree = ["d", "dict", ["k" * 100_000], [["l", "list", list(range(n))]]]
    return tensors(in_rows(n, tree))


def record_sign_keys() -> bytes:
    def make(n: int) -> bytes:
        keys = [["t", key] for key in signs(n)]
        return outline(["d", "dict", keys, [0] * n], [VALUE])

    return fitted(make, 50_000)


def record_big_keys() -> bytes:
    def make(n: int) -> bytes:
        keys = [["i", hex(P * (k + 9))] for k in range(n)]
        return outline(["d", "dict", keys, [0] * n], [VALUE])

    return fitted(make, 60_000)


def laid_over_keys() -> bytes:
    """Two outlines with dicts of hard keys, laid over each other."""

    def make(n: int) -> bytes:
        keys = [["t", key] for key in signs(n)]
        first = outlined(["d", "dict", keys, [0] * n], [VALUE])
        second = outlined(["d", "dict", keys[::-1], [0] * n], [VALUE])
        return record(outlines=[first, second], ranks=[0, 1])

    return fitted(make, 25_000)


def record_long_keys() -> bytes:
    tree = ["d", "dict", ["k" * 100_000], [["l", "list", list(range(60_000))]]]
    return outline(tree, [VALUE] * 60_000)


def record_deep_leaves() -> bytes:
    def make(n: int) -> bytes:
        return outline(chain(125, ["l", "list", list(range(n))]), [["z", []]] * n)

    return fitted(make, 130_000)


def record_deep_slots() -> bytes:
    return outline(chain(125, ["l", "list", [0] * 990_000]), [VALUE])


def record_namedtuples() -> bytes:
    nodes = [["n", f"N{k}", ["a"], [0], ""] for k in range(20_000)]
    return outline(["l", "list", nodes], [VALUE])


def record_packed_numbers() -> bytes:
    return outline(0, [["v", "plain", ["i", "0x" + "f" * 1_900_000]]])


# Pickles of stock peers --------------------------------------------------------------------------


class Pickle:
    """Opcodes by hand. `get` refers to what `put` named: sharing is what makes pickles dear."""

    def __init__(self, protocol: int = 4) -> None:
        self.out = bytearray(b"\x80" + bytes([protocol]))
        self.protocol = protocol
        self.memo = 0

    def put(self) -> int:
        if self.protocol >= 4:
            self.out += pickle.MEMOIZE
        else:
            self.out += pickle.LONG_BINPUT + self.memo.to_bytes(4, "little")
        self.memo += 1
        return self.memo - 1

    def get(self, number: int) -> Pickle:
        if number < 256:
            self.out += pickle.BINGET + bytes([number])
        else:
            self.out += pickle.LONG_BINGET + number.to_bytes(4, "little")
        return self

    def once(self, push: Callable[[], object]) -> Callable[[], object]:
        """What pushes the same object each time it is called."""
        known: list[int] = []

        def again() -> None:
            if known:
                self.get(known[0])
            else:
                push()
                known.append(self.put())

        return again

    def raw(self, *parts: bytes) -> Pickle:
        for part in parts:
            self.out += part
        return self

    def value(self, value: Any) -> Pickle:
        """What the pickler makes of a plain value, without header and memo."""
        if isinstance(value, str):
            data = value.encode()
            self.out += pickle.BINUNICODE + len(data).to_bytes(4, "little") + data
        elif isinstance(value, bool) or value is None:
            self.out += {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]
        elif isinstance(value, int) and 0 <= value < 256:
            self.out += pickle.BININT1 + bytes([value])
        elif isinstance(value, int):
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += pickle.LONG1 + bytes([len(data)]) + data
        elif isinstance(value, tuple):
            self.out += pickle.MARK
            for item in value:
                self.value(item)
            self.out += pickle.TUPLE
        elif isinstance(value, list):
            self.out += pickle.EMPTY_LIST + pickle.MARK
            for item in value:
                self.value(item)
            self.out += pickle.APPENDS
        else:
            raise TypeError(type(value))
        return self

    def name(self, module: str, name: str) -> Pickle:
        if self.protocol >= 4:
            return self.value(module).value(name).raw(pickle.STACK_GLOBAL)
        return self.raw(pickle.GLOBAL, f"{module}\n{name}\n".encode())

    def done(self) -> bytes:
        return bytes(self.out + pickle.STOP)


_PG = "torch.distributed.checkpoint._pg_transport"
_TREE = "torch.utils._pytree"


def _fields(p: Pickle, **fields: Callable[[], object]) -> None:
    """Set fields on what is on the stack."""
    p.raw(pickle.EMPTY_DICT, pickle.MARK)
    for name, push in fields.items():
        p.value(name)
        push()
    p.raw(pickle.SETITEMS, pickle.BUILD)


def _object(p: Pickle, module: str, name: str, **fields: Callable[[], object]) -> None:
    p.name(module, name).raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
    _fields(p, **fields)


def stock_state(
    leaves: Callable[[Pickle], int], tree: Callable[[Pickle], None] | None = None
) -> bytes:
    """A record whose leaves `leaves` pushes, between marks; it returns how many."""
    p = Pickle()
    p.name(_PG, "_StateDictMeta").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
    p.raw(pickle.EMPTY_DICT, pickle.MARK)
    p.value("non_tensor_leaves").raw(pickle.EMPTY_LIST, pickle.MARK)
    n = leaves(p)
    p.raw(pickle.APPENDS)
    p.value("paths").raw(pickle.EMPTY_LIST, pickle.MARK, pickle.EMPTY_TUPLE * n, pickle.APPENDS)
    p.value("treespec")
    if tree is not None:
        tree(p)
    else:
        p.name(_TREE, "TreeSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        p.raw(pickle.EMPTY_DICT, pickle.MARK)
        p.value("type").name("builtins", "list").value("_context").value(None)
        p.value("_children").raw(pickle.EMPTY_LIST, pickle.MARK)
        p.name(_TREE, "LeafSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        spec = p.put()
        for _ in range(n - 1):
            p.get(spec)
        p.raw(pickle.APPENDS, pickle.SETITEMS, pickle.BUILD)
    p.raw(pickle.SETITEMS, pickle.BUILD)
    return p.done()


def _size(p: Pickle, numbers: Any) -> None:
    p.name("torch", "Size").value((tuple(numbers),)).raw(pickle.REDUCE)


def _tensor_meta(p: Pickle, dims: int = 1) -> None:
    _object(
        p,
        _PG,
        "_TensorMeta",
        shape=lambda: _size(p, [0] * dims),
        dtype=lambda: p.name("torch", "int8"),
        storage_offset=lambda: p.value(0),
        stride=lambda: p.value((1,) * dims),
        nbytes=lambda: p.value(0),
    )


def _shard_metadata(p: Pickle, dims: int) -> None:
    _object(
        p,
        "torch.distributed._shard.metadata",
        "ShardMetadata",
        shard_offsets=lambda: p.value([0] * dims),
        shard_sizes=lambda: p.value([0] * dims),
        placement=lambda: p.value(None),
    )


def _sharded_metadata(p: Pickle, shards: int, dims: int) -> None:
    where = "torch.distributed._shard.sharded_tensor.metadata"

    def push_shards() -> None:
        p.raw(pickle.EMPTY_LIST, pickle.MARK)
        _shard_metadata(p, dims)
        shared = p.put()
        for _ in range(shards - 1):
            p.get(shared)
        p.raw(pickle.APPENDS)

    def push_properties() -> None:
        p.name(where, "TensorProperties").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.MARK)
        p.name("torch", "int8")
        p.name("torch.serialization", "_get_layout").value(("torch.strided",)).raw(pickle.REDUCE)
        p.value(False)
        p.name(where, "MEM_FORMAT_ENCODING").value((0,)).raw(pickle.REDUCE)
        p.value(False).raw(pickle.TUPLE, pickle.BUILD)

    _object(
        p,
        where,
        "ShardedTensorMetadata",
        shards_metadata=push_shards,
        size=lambda: _size(p, [0] * dims),
        tensor_properties=push_properties,
    )


def _sharded(p: Pickle, metadata: Callable[[], object]) -> None:
    empty = lambda: p.raw(pickle.EMPTY_LIST)  # noqa: E731
    _object(
        p,
        _PG,
        "_ShardedTensorMeta",
        local_shards_meta=empty,
        local_shards_shard_metadata=empty,
        sharded_tensor_metadata=metadata,
    )


def shared_shards() -> bytes:
    """One tensor of very many shards, which stands for very many leaves."""

    def leaves(p: Pickle) -> int:
        _sharded(p, lambda: _sharded_metadata(p, 20_000, 8))
        shared = p.put()
        for _ in range(200_000):
            p.get(shared)
        return 200_001

    return stock_state(leaves)


def shared_metadata() -> bytes:
    """Leaves of their own, each with the same record of very many shards."""

    def leaves(p: Pickle) -> int:
        shared = p.once(lambda: _sharded_metadata(p, 20_000, 8))
        count = 5_000
        for _ in range(count):
            _sharded(p, shared)
        return count

    return stock_state(leaves)


def shared_tensor() -> bytes:
    def leaves(p: Pickle) -> int:
        _tensor_meta(p, 64)
        shared = p.put()
        for _ in range(300_000):
            p.get(shared)
        return 300_001

    return stock_state(leaves)


def shared_shape() -> bytes:
    """Tensors of their own, with one shape of very many dimensions."""

    def leaves(p: Pickle) -> int:
        size = p.once(lambda: _size(p, [0] * 100_000))
        stride = p.once(lambda: p.value((0,) * 100_000))
        count = 8_000
        for _ in range(count):
            _object(
                p,
                _PG,
                "_TensorMeta",
                shape=size,
                dtype=lambda: p.name("torch", "int8"),
                storage_offset=lambda: p.value(0),
                stride=stride,
                nbytes=lambda: p.value(0),
            )
        return count

    return stock_state(leaves)


def shared_bytes() -> bytes:
    """A large buffer that each leaf would have a copy of."""

    def leaves(p: Pickle) -> int:
        data = bytes(900_000)
        head = pickle.BINBYTES + len(data).to_bytes(4, "little")
        shared = p.once(lambda: p.raw(head, data))
        kind = p.once(lambda: p.name("builtins", "bytearray"))
        count = 100_000
        for _ in range(count):
            kind()
            shared()
            p.raw(pickle.TUPLE1, pickle.REDUCE)
        return count

    return stock_state(leaves)


def shared_set() -> bytes:
    """Sets of numbers that are hard to hash."""

    def leaves(p: Pickle) -> int:
        p.raw(pickle.EMPTY_SET, pickle.MARK)
        for k in range(100_000):
            p.value(P * (k + 1))
        p.raw(pickle.ADDITEMS)
        return 1

    return stock_state(leaves)


def frozen_sets() -> bytes:
    def leaves(p: Pickle) -> int:
        p.raw(pickle.MARK)
        for key in probing_keys():
            p.value(key)
        p.raw(pickle.FROZENSET)
        return 1

    return stock_state(leaves)


def _dict_spec(p: Pickle, keys: Callable[[], object], width: int) -> None:
    p.name(_TREE, "TreeSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
    p.raw(pickle.EMPTY_DICT, pickle.MARK)
    p.value("type").name("builtins", "dict").value("_context")
    keys()
    p.value("_children").raw(pickle.EMPTY_LIST, pickle.MARK)
    p.name(_TREE, "LeafSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
    spec = p.put()
    for _ in range(width - 1):
        p.get(spec)
    p.raw(pickle.APPENDS, pickle.SETITEMS, pickle.BUILD)


def stock_dict(keys: list[Any]) -> bytes:
    def leaves(p: Pickle) -> int:
        p.raw(pickle.NONE * len(keys))
        return len(keys)

    return stock_state(leaves, lambda p: _dict_spec(p, lambda: p.value(keys), len(keys)))


def stock_sign_keys() -> bytes:
    return fitted(lambda n: stock_dict(list(signs(n))), 40_000)


def stock_big_keys() -> bytes:
    return fitted(lambda n: stock_dict([P * (k + 9) for k in range(n)]), 110_000)


def stock_probing_keys() -> bytes:
    return stock_dict(probing_keys())


def stock_wide_keys() -> bytes:
    """One tuple that is a part of every key: each is hashed whole."""

    def keys(p: Pickle, count: int) -> None:
        shared = p.once(lambda: p.value((0,) * 1000))
        p.raw(pickle.EMPTY_LIST, pickle.MARK)
        for k in range(count):
            shared()
            p.value(k).raw(pickle.TUPLE2)
        p.raw(pickle.APPENDS)

    def leaves(p: Pickle) -> int:
        p.raw(pickle.NONE * 10_000)
        return 10_000

    return stock_state(leaves, lambda p: _dict_spec(p, lambda: keys(p, 10_000), 10_000))


def stock_deep_tree() -> bytes:
    """A tree of many levels, and all leaves at its bottom: each path is long."""
    width = 190_000

    def tree(p: Pickle) -> None:
        leaf = p.once(lambda: p.name(_TREE, "LeafSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ))
        for level in range(190):
            p.name(_TREE, "TreeSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
            p.raw(pickle.EMPTY_DICT, pickle.MARK)
            p.value("type").name("builtins", "list").value("_context").value(None)
            p.value("_children").raw(pickle.EMPTY_LIST, pickle.MARK)
            if level == 189:
                for _ in range(width):
                    leaf()
        for _ in range(190):
            p.raw(pickle.APPENDS, pickle.SETITEMS, pickle.BUILD)

    def leaves(p: Pickle) -> int:
        p.raw(pickle.NONE * width)
        return width

    return stock_state(leaves, tree)


def stock_shared_tree() -> bytes:
    """Specs that hold each other many times."""

    def tree(p: Pickle, depth: int = 60) -> None:
        if not depth:
            p.name(_TREE, "LeafSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
            return
        p.name(_TREE, "TreeSpec").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ)
        p.raw(pickle.EMPTY_DICT, pickle.MARK)
        p.value("type").name("builtins", "list").value("_context").value(None)
        below = p.once(lambda: tree(p, depth - 1))
        p.value("_children").raw(pickle.EMPTY_LIST, pickle.MARK)
        below()
        below()
        p.raw(pickle.APPENDS, pickle.SETITEMS, pickle.BUILD)

    return stock_state(lambda p: len(p.raw(pickle.NONE).out) and 1, tree)


def stock_long_numbers() -> bytes:
    def leaves(p: Pickle) -> int:
        data = b"\x7f" * 1_900_000
        p.raw(pickle.LONG4 + len(data).to_bytes(4, "little") + data)
        return 1

    return stock_state(leaves)


def _read_pg(data: bytes) -> object:
    record = loads(data)
    from torchrelay.dropin._torch_wire import _parts, _target

    parts = [part for leaf in record.non_tensor_leaves for part in _parts(leaf)]
    for path, leaf in zip(record.paths, record.non_tensor_leaves, strict=True):
        _target(path, leaf, None)
    return parts


# Stock checkpoints -------------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint.metadata"


def stock_metadata(
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]
) -> bytes:
    """One tensor of these chunks."""
    p = Pickle()
    memo: dict[Any, int] = {}

    def size(numbers: tuple[int, ...]) -> None:
        known = repr(numbers)  # numbers that have one hash are slow here too
        if known in memo:
            p.get(memo[known])
            return
        _size(p, numbers)
        memo[known] = p.put()

    def name(module: str, text: str) -> None:
        if text in memo:
            p.get(memo[text])
            return
        p.name(module, text)
        memo[text] = p.put()

    def text(value: str) -> None:
        if (value, "") in memo:
            p.get(memo[value, ""])
            return
        p.value(value)
        memo[value, ""] = p.put()

    def made(module: str, kind: str, **fields: Callable[[], object]) -> None:
        name(module, kind)
        p.raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.EMPTY_DICT, pickle.MARK)
        for field, push in fields.items():
            text(field)
            push()
        p.raw(pickle.SETITEMS, pickle.BUILD)

    def push_chunks() -> None:
        p.raw(pickle.EMPTY_LIST, pickle.MARK)
        for offsets, sizes in chunks:
            made(
                _DCP,
                "ChunkStorageMetadata",
                offsets=lambda offsets=offsets: size(offsets),
                sizes=lambda sizes=sizes: size(sizes),
            )
        p.raw(pickle.APPENDS)

    def push_properties() -> None:
        p.name(_DCP, "TensorProperties").raw(pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.MARK)
        p.name("torch", "int8")
        p.name("torch.serialization", "_get_layout").value(("torch.strided",)).raw(pickle.REDUCE)
        p.value(False).value(0).value(False).raw(pickle.TUPLE, pickle.BUILD)

    def push_state() -> None:
        p.raw(pickle.EMPTY_DICT, pickle.MARK).value("x")
        made(
            _DCP,
            "TensorStorageMetadata",
            properties=push_properties,
            size=lambda: size(shape),
            chunks=push_chunks,
        )
        p.raw(pickle.SETITEMS)

    def push_stored() -> None:
        p.raw(pickle.EMPTY_DICT, pickle.MARK)
        at = 0
        for offsets, sizes in chunks:
            made(
                _DCP,
                "MetadataIndex",
                fqn=lambda: text("x"),
                offset=lambda offsets=offsets: size(offsets),
            )
            length = int(np.prod(sizes, dtype=object))
            made(
                "torch.distributed.checkpoint.filesystem",
                "_StorageInfo",
                relative_path=lambda: text("f"),
                offset=lambda at=at: p.value(at),
                length=lambda length=length: p.value(length),
            )
            at += length
        p.raw(pickle.SETITEMS)

    made(_DCP, "Metadata", state_dict_metadata=push_state, storage_data=push_stored)
    return p.done()


def staggered_chunks() -> bytes:
    def make(n: int) -> bytes:
        chunks = []
        for k in range(n):
            chunks.append(((k, 0), (1, k + 1)))
            chunks.append(((k, k + 1), (1, n - k)))
        return stock_metadata(chunks, (n, n + 1))

    return fitted(make, 9_000)


def crossing_chunks() -> bytes:
    def make(n: int) -> bytes:
        chunks = [((0, k), (n, 1)) for k in range(n)]
        chunks += [((n + k, 0), (1, n)) for k in range(n)]
        return stock_metadata(chunks, (2 * n, n))

    return fitted(make, 9_000)


def overhanging_chunks() -> bytes:
    """Each chunk is long, and beside those before it on another dimension, in 60 dimensions."""

    def make(n: int) -> bytes:
        dims = 60
        shape = (n, n, *(1,) * (dims - 2))
        chunks = [((0, k, *(0,) * (dims - 2)), (n, 1, *(1,) * (dims - 2))) for k in range(n // 2)]
        chunks += [
            ((k, n // 2, *(0,) * (dims - 2)), (1, n - n // 2, *(1,) * (dims - 2))) for k in range(n)
        ]
        return stock_metadata(chunks, shape)

    return fitted(make, 8_000)


def colliding_offsets() -> bytes:
    """Chunks of nothing, at offsets of one hash."""

    def make(n: int) -> bytes:
        picks = itertools.islice(itertools.product((0, P), repeat=16), n)
        chunks = [((*pick, 0), (0,) * 17) for pick in picks]
        return stock_metadata(chunks, (*(P,) * 16, 0))

    return fitted(make, 7_000)


def _read_metadata(data: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".metadata").write_bytes(data)
        return read_stock(folder)


def parcel_keys() -> bytes:
    body = fitted(lambda n: one_dict([["t", key] for key in signs(n)]), 1 << 16)
    return len(body).to_bytes(8, "little") + body


def small() -> Any:
    return {"a": 1}


loosely = into(small, strict=False)


CASES = [
    Case("live: keys that are tuples of -1 and -2", sign_keys, new),
    Case("live: keys that are multiples of 2**61 - 1", big_keys, new),
    Case("live: keys that are tuples of floats of one hash", float_keys, new),
    Case("live: keys along one sequence of a dict's slots", lambda: one_dict(probing_keys()), new),
    Case("live: the same keys, into=", sign_keys, loosely),
    Case("live: as many tuples of -1 and -2 as there may be", allowed_sign_keys, new),
    Case("live: dicts of numbers that try the same slots", allowed_numbers, new),
    Case("live: numbers that try the same slots", regular_numbers, new),
    Case("live: numbers that push each other on", chained_numbers, new),
    Case("live: a set of tuples of -1 and -2", sign_sets, new),
    Case("live: a set of keys along one sequence of a dict's slots", probing_sets, new),
    Case("live: a set of 200,000 numbers", honest_sets, new),
    Case("live: many sets", many_sets, new),
    Case("live: tuples in tuples, as values", deep_objects, new),
    Case("live: fractions of large numbers", fractions, new),
    Case("live: a decimal of a million digits", decimals, new),
    Case("live: time zones that are not there", zones, new),
    Case("live: shapes of one hash", leaf_shapes, new),
    Case("live: shapes of one hash, in columns", kind_shapes, new),
    Case("live: shapes of one hash, in sparse tensors", other_shapes, new),
    Case("live: shapes of 64 dimensions", wide_shapes, new),
    Case("live: strides of 64 dimensions", odd_columns, new),
    Case("live: a deep tree with many slots", deep_slots, new),
    Case("live: a deep tree with many slots, into=", deep_slots, into(small)),
    Case("live: a deep tree with many slots, strict=False", deep_slots, loosely),
    Case("live: a deep tree with many leaves", deep_leaves, new),
    Case("live: a deep tree with many values", deep_values, new),
    Case("live: a deep tree with many tensors", deep_tensors, new),
    Case("live: a deep tree with many leaves, into=", deep_leaves, into(small)),
    Case("live: many deep branches", deep_branches, new),
    Case("live: many deep branches, into=", deep_branches, loosely),
    Case("live: many empty containers", many_empty, new),
    Case("live: many empty containers, into=", many_empty, loosely),
    Case("live: a long key and many leaves", long_keys, new),
    Case("live: a long key and many leaves, into=", long_keys, into(small)),
    Case("live: a long key and many leaves, strict=False", long_keys, loosely),
    Case(
        "live: a long key and many slots, strict=False", long_key_slots, into(small, strict=False)
    ),
    Case("live: a long key and many dtypes", long_key_dtypes, new),
    Case("live: long keys in long keys, strict=False", nested_long_keys, loosely),
    Case("live: 20,000 namedtuples of distinct names", namedtuples, new),
    Case("live: namedtuples of distinct fields", namedtuple_fields, new),
    Case("live: a namedtuple of very many fields", wide_namedtuple, new),
    Case("live: a namedtuple of a long name", huge_namedtuple_names, new),
    Case("live: numpy dtypes of many fields", array_dtypes, new),
    Case("live: numpy dtypes in numpy dtypes", nested_dtype, new),
    Case("live: a mesh of hard numbers", meshes, new),
    Case("live: many meshes", many_meshes, new),
    Case("live: boxes of 64 dimensions", sharded_boxes, new),
    Case("live: trees in tensor subclasses", deep_context, new),
    Case("live: a number of 7.6 million bits", long_number, new),
    Case("live: many long numbers", many_long_numbers, new),
    Case("live: many views of one storage", tied_views, new),
    Case("live: registered types in registered types", record_nodes, new),
    Case("parcel: keys that are tuples of -1 and -2", parcel_keys, unpack),
    Case("record: keys that are tuples of -1 and -2", record_sign_keys, load()),
    Case("record: keys that are multiples of 2**61 - 1", record_big_keys, load()),
    Case("record: two outlines of hard keys", laid_over_keys, load()),
    Case("record: hard keys, into=", record_sign_keys, load(into=small)),
    Case("record: 64 dimensions and staircase shards", staircase_shards, load()),
    Case("record: staggered shards", staggered_shards, load()),
    Case("record: crossing shards", crossing_shards, load()),
    Case("record: many small grids", many_small_grids, load()),
    Case("record: differences of 20,000 ranks, many leaves", own_ranks, load()),
    Case("record: images of 20,000 ranks, many rows", own_images, load()),
    Case("record: leaves of 10,000 ranks in place of rows", own_leaves_in_rows, load()),
    Case("record: differences of as many ranks as outlines", own_outlines, load()),
    Case("record: 250,000 ranks of two outlines", outlines_of_ranks, load()),
    Case("record: long names of many tensors", record_long_names, load()),
    Case("record: long names of many tensors, into=", record_long_names, load(into=small)),
    Case("record: long names of many tensors, listed", record_long_names, listed),
    Case("record: a long key and many leaves", record_long_keys, load()),
    Case("record: a long key and many leaves, into=", record_long_keys, load(into=small)),
    Case(
        "record: a long key and many leaves, include=",
        record_long_keys,
        load(include=lambda: "x.*"),
    ),
    Case("record: a deep tree with many leaves", record_deep_leaves, load()),
    Case("record: a deep tree with many leaves, into=", record_deep_leaves, load(into=small)),
    Case("record: a deep tree with many slots", record_deep_slots, load()),
    Case(
        "record: a deep tree with many slots, include=",
        record_deep_slots,
        load(include=lambda: "x.*"),
    ),
    Case("record: 20,000 namedtuples of distinct names", record_namedtuples, load()),
    Case("record: a number of 7.6 million bits", record_packed_numbers, load()),
    Case("stock peer: one tensor of many shards as many leaves", shared_shards, _read_pg),
    Case("stock peer: many leaves share a record of shards", shared_metadata, _read_pg),
    Case("stock peer: one tensor as many leaves", shared_tensor, _read_pg),
    Case("stock peer: many tensors share a vast shape", shared_shape, _read_pg),
    Case("stock peer: many leaves share a buffer", shared_bytes, _read_pg),
    Case("stock peer: a set of hard numbers", shared_set, _read_pg),
    Case("stock peer: a frozenset along one sequence of slots", frozen_sets, _read_pg),
    Case("stock peer: keys that are tuples of -1 and -2", stock_sign_keys, _read_pg),
    Case("stock peer: keys that are multiples of 2**61 - 1", stock_big_keys, _read_pg),
    Case("stock peer: keys along one sequence of slots", stock_probing_keys, _read_pg),
    Case("stock peer: keys that share a long tuple", stock_wide_keys, _read_pg),
    Case("stock peer: a deep tree with many leaves", stock_deep_tree, _read_pg),
    Case("stock peer: a tree whose parts are shared", stock_shared_tree, _read_pg),
    Case("stock peer: a number of 15 million bits", stock_long_numbers, _read_pg),
    Case(".metadata: staggered chunks", staggered_chunks, _read_metadata),
    Case(".metadata: crossing chunks", crossing_chunks, _read_metadata),
    Case(".metadata: crossing chunks of 60 dimensions", overhanging_chunks, _read_metadata),
    Case(".metadata: offsets of one hash", colliding_offsets, _read_metadata),
]

# One of each kind, so that all together take few seconds.
SOON = frozenset(
    (
        "live: keys that are tuples of -1 and -2",
        "live: keys that are multiples of 2**61 - 1",
        "live: shapes of one hash",
        "live: a deep tree with many slots, into=",
        "live: a long key and many leaves, into=",
        "live: a long key and many leaves, strict=False",
        "live: 20,000 namedtuples of distinct names",
        "live: many meshes",
        "record: 64 dimensions and staircase shards",
        "record: `own` for 20,000 ranks, many leaves",
        "record: `own` for 20,000 ranks, many names",
        "record: 20,000 namedtuples of distinct names",
        "record: a long key and many leaves, into=",
        "record: a long key and many leaves, include=",
        "record: a deep tree with many slots, include=",
        "stock peer: many leaves share a record of shards",
        "stock peer: a set of hard numbers",
        ".metadata: offsets of one hash",
    )
)


def main(chosen: list[str]) -> None:
    costs = [measure(case) for case in CASES if all(word in case.name for word in chosen)]
    for cost in sorted(costs, key=lambda one: (-one.seconds, one.name)):
        size = f"{cost.nbytes:,} | {cost.seconds:.2f} | {cost.megabytes:.0f}"
        print(f"| {cost.name} | {size} | {cost.outcome.partition(':')[0]} |")


if __name__ == "__main__":
    main(sys.argv[1:])
