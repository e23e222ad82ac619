"""Many thousand broken manifests, in records and in columns: each is refused by
`ManifestError`, or is a valid one.

A valid one may still describe something odd. What is made of it is bounded by what it says, and
nothing of it is executed before its bytes have arrived and hold.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support.rounds import rounds
from tests.support.states import Color, Moment, Pair, Point, tensors_in
from torchrelay.errors import ManifestError, RelayError
from torchrelay.geometry.chunks import aligned
from torchrelay.landing.seam import land
from torchrelay.plan.snapshot import capture
from torchrelay.record import codec, compact
from torchrelay.record import manifest as m
from torchrelay.record.compact import KnownTree
from torchrelay.record.dtypes import ITEM_SIZES
from torchrelay.record.validation import check
from torchrelay.state.registry import register

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SEED = 20240229
TOTAL = 150_000
LANDED_BYTES = 1 << 20  # larger claims are legal, and not worth the memory of a test

decoded: list[object] = []


class Loud:
    """Its decoder tells when it runs."""


def _decode_loudly(value: object) -> Loud:
    decoded.append(value)
    return Loud()


register(Loud, name="fuzz.Loud", encode=lambda value: {"x": 1}, decode=_decode_loudly)


def _plain_state() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32)
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    return {
        "w": weight,
        "tied": weight,
        "views": [base[::2], base[4:9], base.view(4, 6).t(), base[:4].view(torch.int32)],
        "conj": torch.zeros(3, dtype=torch.complex64).conj(),
        "none": torch.empty(0, 3),
        "meta": torch.empty(2, device="meta"),
        "wide": torch.zeros(2, 2, dtype=torch.complex128).t(),
    }


def _odd_state() -> dict[Any, Any]:
    return {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "q": torch.quantize_per_tensor(torch.zeros(2, 3), 0.1, 3, torch.qint8),
        "qc": torch.quantize_per_channel(
            torch.zeros(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, torch.quint8
        ),
        "q4": torch.quantize_per_tensor(torch.zeros(3, 5), 0.1, 3, torch.quint4x2),
        "array": np.arange(6, dtype=">f4").reshape(2, 3).T,
        "record": np.zeros(2, [("a", "<i4"), ("b", "S2", (2,))]),
        "scalar": np.datetime64("2024-01-01"),
    }


def _value_state() -> dict[Any, Any]:
    return {
        "values": [None, True, -1, 1 << 70, 0.5, 1j, "text", "\ud800", b"bytes"],
        "kinds": (torch.float8_e5m2, torch.device("cuda", 1), torch.Size([1, 2])),
        "made": [Pair(1, [2]), Moment(3), Point(4, Color.RED), Loud()],
        1: 1,
        2.5: 2,
        None: 3,
        ("a", (1, -0.0)): 4,
        1 << 80: 5,
    }


def _many_state() -> dict[str, Any]:
    """Small tensors of few kinds: what columns are for."""
    flat = torch.zeros(96)
    return {
        "same": [torch.full((3,), float(n)) for n in range(12)],
        "mixed": {str(n): torch.ones(2, dtype=[torch.int32, torch.half][n % 2]) for n in range(9)},
        "views": [flat[n : n + 8] for n in range(0, 96, 16)],
        "model": [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(4)],
        "step": 3,
    }


def _distributed() -> m.Manifest:
    part = m.TensorLeaf("float32", (2, 4), None, 0)
    shard = m.TensorLeaf("float32", (4, 4), None, 1)
    inner = m.TensorLeaf("bfloat16", (3,), None, 2)
    boxes = tuple(m.Box((at, 0), (4, 4), f"rank:{at // 4}/cpu") for at in (0, 4))
    mesh = m.Mesh("cpu", (2, 2), (0, 1, 2, 3), ("dp", "tp"))
    placements = (m.Placement("shard", 0), m.Placement("partial", reduce="sum"))
    return m.Manifest(
        version=m.VERSION,
        step=12,
        tree=m.SequenceNode("list", (0, 1, 2)),
        leaves=(
            m.DTensorLeaf(part, mesh, placements, (4, 4), (4, 1), (0, 0), m.PARAMETER),
            m.ShardedLeaf((shard,), boxes[:1], boxes, (8, 4), "float32"),
            m.SubclassLeaf("fuzz.Tensor", ("a",), (inner,), 0, (m.SizeLeaf((1,)),), (3,), (1,)),
        ),
        storages=(m.Storage(32), m.Storage(64, "cuda"), m.Storage(6)),
        chunks=(48, 64),
        digests=(b"d" * 16, b"e" * 16),
    )


def _bases() -> list[m.Manifest]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = (_plain_state(), _odd_state(), _value_state())
    found = [capture(state, step=5, chunk_bytes=64).manifest for state in states]
    return [*found, _distributed()]


def _column_bases() -> list[m.Manifest]:
    many = capture(_many_state(), step=5, chunk_bytes=64).manifest
    return [*(msgspec.structs.replace(base, digests=None) for base in BASES), many, many]


BASES = _bases()
PACKED = [codec.encode(base) for base in BASES]
COLUMN_BASES = _column_bases()
COLUMNS = [compact.encode(base) for base in COLUMN_BASES]
KNOWN = [
    KnownTree(msgspec.msgpack.encode(base.tree), base.tree, len(base.leaves))
    for base in COLUMN_BASES
]


# Mutations of bytes.


def flip(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def truncate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


HEADS = [
    b"\x91" * 5000,  # arrays in arrays
    b"[" * 5000,
    b"\xdd\xff\xff\xff\xff",  # an array of four billion
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xc1",
    b"99999999999999999999999999999999",
    b"1e999",
    b"\x00",
]


def insert(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    more = rng.choice(HEADS) if rng.random() < 0.5 else rng.randbytes(rng.randrange(1, 9))
    return data[:at] + more + data[at + rng.choice((0, 0, len(more))) :]


# Mutations of what the bytes say.

NUMBERS = [0, 1, -1, 2, 3, 15, 16, 17, 64, 65, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32]
NUMBERS += [1 << 40, 1 << 50, 1 << 53, 1 << 61, 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]
NUMBERS += [-16, -(1 << 31), -(1 << 62), 4096, 1 << 20]
TEXTS = [
    "",
    "a",
    "\0",
    "é" * 300,
    "x" * 5000,
    "t",
    "q",
    "s",
    "a",
    "v",
    "z",
    "D",
    "S",
    "x",
    "d",
    "l",
]
TEXTS += [
    "n",
    "r",
    "f",
    "i",
    "c",
    "b",
    "dict",
    "list",
    "tuple",
    "defaultdict",
    "set",
    "eval",
    "__class__",
]
TEXTS += [
    "plain",
    "dtype",
    "device",
    "coo",
    "csr",
    "bsr",
    "meta",
    "cuda",
    "cpu",
    "distributed",
    "0x",
    "-0x1",
]
TEXTS += ["shard", "partial", "replicate", "strided", "per_channel_affine", "class", "os.system"]
TEXTS += ['"O"', '"<f8"', '"V9"', '[["a", "<f4"]]', "fuzz.Loud", "Point", "Color", *ITEM_SIZES]


def positions(plain: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    yield path
    if isinstance(plain, list):
        for place, item in enumerate(plain):
            yield from positions(item, (*path, place))


def at(plain: Any, path: tuple[int, ...]) -> Any:
    for place in path:
        plain = plain[place]
    return plain


PATHS = [list(positions(msgspec.msgpack.decode(data)))[1:] for data in PACKED]


def _other(rng: random.Random, value: Any, plain: Any, paths: list[tuple[int, ...]]) -> Any:
    roll = rng.random()
    if roll < 0.1:
        return rng.choice([None, True, 0.5, "t", 7, b"x", [], {}, [[]], {"a": 1}])
    if roll < 0.25:
        return at(plain, rng.choice(paths))
    if isinstance(value, int) and not isinstance(value, bool):
        near = [value + 1, value - 1, value * 2, -value, value ^ (1 << rng.randrange(16))]
        return rng.choice(NUMBERS + near * 4)
    if isinstance(value, str):
        return rng.choice(TEXTS) if rng.random() < 0.8 else value + rng.choice(TEXTS)
    if isinstance(value, bytes):
        return rng.randbytes(rng.randrange(20))
    if isinstance(value, list):
        return _other_list(rng, list(value))
    return rng.choice(NUMBERS)


def _other_list(rng: random.Random, items: list[Any]) -> list[Any]:
    kind = rng.randrange(6)
    if kind == 0 or not items:
        items.insert(rng.randrange(len(items) + 1), rng.choice([*NUMBERS, *TEXTS, None, []]))
    elif kind == 1:
        del items[rng.randrange(len(items))]
    elif kind == 2:
        items.append(rng.choice(items))
    elif kind == 3:
        rng.shuffle(items)
    elif kind == 4:
        items = items * rng.choice((2, 3, 70))
    else:
        for _ in range(rng.choice((1, 5, 130, 400))):
            items = [items]
    return items


def restate(rng: random.Random, base: int, encode: Callable[[Any], bytes]) -> bytes:
    plain = msgspec.msgpack.decode(PACKED[base])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        path = rng.choice(PATHS[base])
        try:
            parent = at(plain, path[:-1])
            parent[path[-1]] = _other(rng, parent[path[-1]], plain, PATHS[base])
        except (IndexError, TypeError, KeyError):
            continue  # an earlier change took this place away
    try:
        return encode(plain)
    except (RecursionError, OverflowError, ValueError, TypeError):
        return b"\x91" * 900  # put into itself


# Mutations of columns, which know what stands where.

Plain = list[Any]
STEP, TREE, OTHERS, ROWS, KINDS, OFFSETS, SIZES, DEVICES, CHUNKS = 1, 3, 4, 5, 6, 9, 10, 11, 13
NUMBERED = {ROWS: "<u4", 7: "<u4", 8: "<i4", OFFSETS: "<u8", SIZES: "<u8", 12: "<u4"}
TENSORS = (ROWS, 7, 8, OFFSETS)  # columns with a number for each tensor, unless left out


def column(plain: Plain, field: int) -> list[int]:
    if type(plain[field]) is not bytes:
        return []  # an earlier change put something else there
    size = int(NUMBERED[field][2])
    whole = len(plain[field]) // size * size
    numbers: list[int] = np.frombuffer(plain[field][:whole], NUMBERED[field]).tolist()
    return numbers


def packed(numbers: list[int], field: int) -> bytes:
    size, sign = int(NUMBERED[field][2]), NUMBERED[field][1] == "i"
    whole = 1 << 8 * size
    wrapped = [n % whole - (whole if sign and n % whole >= whole >> 1 else 0) for n in numbers]
    return np.array(wrapped, NUMBERED[field]).tobytes()


def one_number(rng: random.Random, plain: Plain) -> None:
    field = rng.choice(list(NUMBERED))
    numbers = column(plain, field)
    if numbers:
        where = rng.randrange(len(numbers))
        old = numbers[where]
        near = [old + 1, old - 1, old + 4, old * 2, len(numbers), len(numbers) - 1, numbers[0]]
        numbers[where] = rng.choice(NUMBERS + near * 4)
        plain[field] = packed(numbers, field)


def another_order(rng: random.Random, plain: Plain) -> None:
    field = rng.choice([*NUMBERED, ROWS, ROWS])
    numbers = column(plain, field)
    if len(numbers) > 1:
        one, two = rng.sample(range(len(numbers)), 2)
        if rng.random() < 0.5:
            numbers[one] = numbers[two]
        else:
            numbers[one], numbers[two] = numbers[two], numbers[one]
        plain[field] = packed(numbers, field)


def another_length(rng: random.Random, plain: Plain) -> None:
    field = rng.choice(list(NUMBERED))
    data = plain[field]
    if type(data) is bytes:
        numbers = column(plain, field)
        lengths = [b"", data[:-1], data + b"\0", data * 2, data[: len(data) // 2 & -8], data[8:]]
        lengths += [packed([0], field), packed([*numbers, *numbers[-1:]], field), rng.randbytes(16)]
        plain[field] = rng.choice(lengths)


def left_out_or_spelt_out(rng: random.Random, plain: Plain) -> None:
    """Often the same manifest: a column that says what is meant where there is none."""
    field = rng.choice([ROWS, 7, OFFSETS, 12])
    count = len(column(plain, SIZES if field == 12 else 8))
    said = list(range(count)) if field == ROWS else [0] * count
    plain[field] = b"" if plain[field] else packed(said, field)


def fewer_tensors(rng: random.Random, plain: Plain) -> None:
    """A row goes, from all columns; the storage or the tree may miss it."""
    count = len(column(plain, 8))
    if count:
        gone = rng.randrange(count)
        for field in TENSORS:
            numbers = column(plain, field)
            del numbers[gone : gone + 1]
            plain[field] = packed(numbers, field)


def out_of_the_table(rng: random.Random, plain: Plain) -> None:
    """A tensor stands among the other leaves: the same manifest, in another way."""
    columns = {field: column(plain, field) for field in TENSORS}
    count = len(columns[8])
    if not count or type(plain[OTHERS]) is not list or type(plain[KINDS]) is not list:
        return
    rows = columns[ROWS] if plain[OTHERS] else list(range(count))
    gone = rng.randrange(count)
    number = columns[7][gone] if gone < len(columns[7]) else 0
    offset = columns[OFFSETS][gone] if gone < len(columns[OFFSETS]) else 0
    if number >= len(plain[KINDS]) or gone >= len(rows):
        return
    kind = plain[KINDS][number]
    leaf = ["t", *kind[:3], columns[8][gone], offset, *kind[3:]]
    others = sorted(set(range(count + len(plain[OTHERS]))) - set(rows))
    place = sum(index < rows[gone] for index in others)
    plain[OTHERS].insert(place + rng.choice((0, 0, 0, 1)), leaf)
    columns[ROWS] = rows
    for field, numbers in columns.items():
        del numbers[gone : gone + 1]
        plain[field] = packed(numbers, field)


def absurd_kind(rng: random.Random, plain: Plain) -> None:
    kinds = plain[KINDS]
    if type(kinds) is not list or not kinds:
        return
    if rng.random() < 0.3:
        plain[KINDS] = _other_list(rng, kinds)
        return
    where = rng.randrange(len(kinds))
    shape: Any = rng.choice([[], [0], [1] * 65, [1 << 61, 4], [-1], [1 << 63], [3], [2, 2], None])
    changes = {
        0: rng.choice(TEXTS),
        1: shape,
        2: rng.choice([None, [], [0], [1], [1 << 62], [-1], [1, 2], [2, 1], [1 << 60] * 2]),
        3: rng.choice([0, 1, 2, 3, 4, 8, 16, 32, 63, 64, -1, 1 << 63]),
    }
    if type(kinds[where]) is list and len(kinds[where]) == 4:
        place = rng.randrange(4)
        kinds[where][place] = changes[place]


def other_devices(rng: random.Random, plain: Plain) -> None:
    names = ["cpu", "cuda", "meta", "fake", "", "a b", "é", "x" * 5000]
    plain[DEVICES] = [rng.choice(names) for _ in range(rng.randrange(4))]
    if rng.random() < 0.3:
        count = len(column(plain, SIZES))
        plain[12] = packed([rng.randrange(4) for _ in range(count)], 12)


def other_tree(rng: random.Random, plain: Plain) -> None:
    another = rng.choice(COLUMN_BASES).tree
    leaves = len(column(plain, 8)) + len(plain[OTHERS] or ())
    some = rng.choice((leaves, leaves, leaves + 1, max(leaves - 1, 0)))
    plain[TREE] = rng.choice([another, ["l", "list", list(range(some))], 0, -1, "columns", None])


def larger(rng: random.Random, plain: Plain) -> None:
    """Storages and chunks that agree with each other; leaves may not."""
    sizes = column(plain, SIZES)
    if sizes:
        where = rng.randrange(len(sizes))
        sizes[where] = rng.choice([*NUMBERS, sizes[where] + 4])
        plain[SIZES] = packed(sizes, SIZES)
        plain[CHUNKS] = [aligned(size % (1 << 62)) for size in sizes]


def other_step(rng: random.Random, plain: Plain) -> None:
    plain[STEP] = rng.choice([*NUMBERS, None, "columns", [1]])


def anything(rng: random.Random, plain: Plain) -> None:
    paths = list(positions(plain))[1:]
    path = rng.choice(paths)
    parent = at(plain, path[:-1])
    parent[path[-1]] = _other(rng, parent[path[-1]], plain, paths)


CHANGES = [one_number, another_order, another_length, left_out_or_spelt_out, fewer_tensors]
CHANGES += [out_of_the_table, absurd_kind, other_devices, other_tree, larger, other_step, anything]


def recolumn(rng: random.Random, base: int) -> bytes:
    plain = msgspec.msgpack.decode(COLUMNS[base])
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            rng.choice(CHANGES)(rng, plain)
        except (IndexError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # an earlier change took this place away, or put it into itself
    try:
        return msgspec.msgpack.encode(plain)
    except (RecursionError, OverflowError, ValueError, TypeError):
        return b"\x91" * 900


BYTES = (flip, truncate, splice, insert)


def in_columns(index: int) -> bool:
    return index % 3 == 2


def mutant(index: int) -> bytes:
    """The same bytes for the same index, always."""
    rng = random.Random(SEED * TOTAL + index)
    if in_columns(index):
        base = rng.randrange(len(COLUMNS))
        if index % 2:
            return rng.choice(BYTES)(rng, COLUMNS[base], [*COLUMNS, *PACKED])
        return recolumn(rng, base)
    base = rng.randrange(len(BASES))
    if index % 2:
        return rng.choice(BYTES)(rng, PACKED[base], PACKED)
    return restate(rng, base, msgspec.msgpack.encode)


def decode(index: int) -> m.Manifest | None:
    data = mutant(index)
    known = KNOWN[index % len(KNOWN)] if in_columns(index) else None
    try:
        manifest = codec.decode(data, known)
    except ManifestError:
        return None
    except Exception as fault:
        pytest.fail(f"seed {SEED}, mutant {index}: {fault!r}")
    check(manifest)
    return manifest


def test_bases_are_valid() -> None:
    for base in BASES:
        check(base)
    for base, data in zip(COLUMN_BASES, COLUMNS, strict=True):
        assert codec.decode(data) == base


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_change_of_columns_matters(change: Callable[[random.Random, Plain], None]) -> None:
    """It makes manifests that are refused, or other ways to say the same."""
    outcomes = set()
    for seed in range(rounds(120, 2)):
        base = COLUMNS[seed % len(COLUMNS)]
        plain = msgspec.msgpack.decode(base)
        change(random.Random(seed), plain)
        data = msgspec.msgpack.encode(plain)
        try:
            if codec.decode(data) == COLUMN_BASES[seed % len(COLUMNS)] and data != base:
                outcomes.add("the same")
        except ManifestError:
            outcomes.add("refused")
    benign = change in (out_of_the_table, left_out_or_spelt_out)
    assert ("the same" if benign else "refused") in outcomes


def test_a_known_tree_changes_no_outcome() -> None:
    """Of what is refused without it nothing is taken, of what is taken nothing is another."""
    used = 0
    for index in range(2, rounds(12_000), 3):
        data = mutant(index)
        for known in {KNOWN[index % len(KNOWN)], KNOWN[-1]}:
            found = [_outcome(data, each) for each in (None, known)]
            assert found[0] == found[1], f"seed {SEED}, mutant {index}"
            used += found[1] is not None and found[1].tree is known.tree
    assert used > rounds(50)


def _outcome(data: bytes, known: KnownTree | None) -> m.Manifest | None:
    try:
        return codec.decode(data, known)
    except ManifestError:
        return None


def test_valid_mutants_are_the_same_in_both_forms() -> None:
    seen = 0
    for index in range(2, rounds(12_000), 3):
        manifest = decode(index)
        if manifest is None:
            continue
        seen += 1
        for data in (codec.encode(manifest), compact.encode(manifest)):
            assert codec.decode(data) == manifest, f"seed {SEED}, mutant {index}"
    assert seen > rounds(100)


@pytest.mark.parametrize("quarter", range(4))
def test_mutants_are_refused_or_valid(quarter: int) -> None:
    count = rounds(TOTAL) // 4
    print(f"seed {SEED}, mutants {quarter * count} to {(quarter + 1) * count}")
    decoded.clear()
    accepted = columns = 0
    for index in range(quarter * count, (quarter + 1) * count):
        manifest = decode(index)
        assert not decoded, f"mutant {index}: a decoder ran while a manifest was read"
        if manifest is None:
            continue
        accepted += 1
        columns += in_columns(index)
        stated = manifest.nbytes
        assert sum(manifest.chunks) == sum(aligned(s.nbytes) for s in manifest.storages)
        assert stated <= m.MAX_STREAM_BYTES, f"mutant {index}"
        if accepted % 4 == 0 and stated <= LANDED_BYTES:
            _land(manifest, index)
            decoded.clear()  # types of plain values are tried before the first write
    print(f"{accepted} are valid, {columns} of them in columns")
    for valid, tried in ((columns, count // 3), (accepted - columns, count - count // 3)):
        assert tried // 100 < valid < tried // 2  # else the mutations are too wild or too tame


def _land(manifest: m.Manifest, index: int) -> None:
    try:
        land(manifest)
    except RelayError:
        pass
    except Exception as fault:
        pytest.fail(f"seed {SEED}, mutant {index}, land: {fault!r}")


def test_what_is_made_of_valid_mutants_is_bounded() -> None:
    """Bytes follow the manifest: all the same, or random. The state comes out, or an error."""
    made = 0
    for index in range(0, rounds(12_000), 2):
        manifest = decode(index)
        if manifest is None or manifest.nbytes > LANDED_BYTES:
            continue
        for into in (None, _plain_state()):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    landing = land(manifest, into=into, atomic=bool(index % 4), strict=False)
                    for chunk, size in enumerate(manifest.chunks):
                        landing.write(chunk, torch.full((size,), index % 3, dtype=torch.uint8))
                    state = landing.commit().state
            except RelayError:
                continue
            except Exception as fault:
                pytest.fail(f"seed {SEED}, mutant {index}, commit: {fault!r}")
            made += 1
            if into is None:
                _check_memory(state, manifest, index)
    assert made > rounds(100)


def _check_memory(state: object, manifest: m.Manifest, index: int) -> None:
    held = {}
    for tensor in tensors_in(state):
        if tensor.layout is torch.strided and not tensor.is_meta and type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    assert sum(held.values()) <= manifest.nbytes, f"seed {SEED}, mutant {index}"
