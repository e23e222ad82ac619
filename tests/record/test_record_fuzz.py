"""Many thousand broken records: each is refused by `ManifestError`, or is a valid one.

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

from tests.support.records import whole_record, with_volume
from tests.support.rounds import rounds
from tests.support.states import Color, Moment, Pair, Point, tensors_in
from torchrelay.describing.snapshot import capture
from torchrelay.errors import ManifestError, RelayError
from torchrelay.geometry.chunks import aligned
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.record import manifest as m
from torchrelay.record.checks.images import Mode
from torchrelay.record.checks.record import check
from torchrelay.record.dtypes import ITEM_SIZES
from torchrelay.record.encoding import decode, decode_at_rest, encode, encode_at_rest
from torchrelay.record.schema import (
    VERSION,
    BoxSharding,
    ImageKind,
    LeafKind,
    MeshSharding,
    Record,
    StateOutline,
    pack_column,
    unpack_column,
)
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


def _distributed() -> Record:
    """Parts of distributed tensors, in rows and as records."""
    part = m.TensorLeaf("float32", (2, 4), None, 3)
    inner = m.TensorLeaf("bfloat16", (3,), None, 4)
    boxes = tuple(m.Box((at, 0), (4, 4), f"rank:{at // 4}/cpu") for at in (0, 4))
    mesh = m.Mesh("cpu", (2, 2), (0, 1, 2, 3), ("dp", "tp"))
    placements = (m.Placement("shard", 0), m.Placement("partial", reduce="sum"))
    others = (
        m.DTensorLeaf(part, mesh, placements, (4, 4), (4, 1), (0, 0), m.PARAMETER),
        m.SubclassLeaf("fuzz.Tensor", ("a",), (inner,), 0, (m.SizeLeaf((1,)),), (3,), (1,)),
    )
    record = Record(
        version=VERSION,
        step=12,
        outlines=(
            StateOutline(
                m.SequenceNode("list", (0, 1, 2, 3, 4)),
                5,
                others,
                np.array([1, 4]),
                np.array([0, 1, 2]),
                np.array([0, 1, 2]),
            ),
        ),
        kinds=(
            LeafKind("float32", (4, 4), None, m.PARAMETER, 0),
            LeafKind("float32", (8, 4), None, 0, 1),
            LeafKind("float32", (1, 4), None, 0, 0),
        ),
        images=5,
        image_kinds=(
            ImageKind("float32", (4, 4), None, 1, np.array([0, 0]), np.array([2, 4])),
            ImageKind("float32", (8, 4), (1, 4), 1, np.array([0, 0]), np.array([4, 4])),
            ImageKind("float32", (1, 4), None, 1, np.array([1, 0]), np.array([0, 4])),
            ImageKind("float32", (2, 4)),
            ImageKind("bfloat16", (3,)),
        ),
        kind_of=np.arange(5),
        devices=("cpu", "cuda"),
        device_of=np.array([0, 1, 0, 0, 0]),
        meshes=(mesh,),
        shardings=(
            MeshSharding(0, (m.Placement("shard", 0), m.Placement("replicate")), (0, 0)),
            BoxSharding(boxes),
        ),
    )
    return with_volume(record)


def _streams() -> list[Record]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        states = (_plain_state(), _odd_state(), _value_state(), _many_state(), _many_state())
        found = [capture(state, step=5, chunk_bytes=64).record for state in states]
    return [*found, _distributed()]


STREAMS = _streams()
WHOLES = [whole_record()]
BASES: list[tuple[Mode, Record]] = [("stream", record) for record in STREAMS]
BASES += [("whole", record) for record in WHOLES] + [("part", record) for record in WHOLES]
PACKED = [encode(record) for _, record in BASES]


# Mutations of bytes.


def flip(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def splice(rng: random.Random, data: bytes) -> bytes:
    other = rng.choice(PACKED)
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


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    more = rng.choice(HEADS) if rng.random() < 0.5 else rng.randbytes(rng.randrange(1, 9))
    return data[:at] + more + data[at + rng.choice((0, 0, len(more))) :]


BYTES = (flip, truncate, splice, insert)


# Mutations of what the bytes say.

NUMBERS = [0, 1, -1, 2, 3, 15, 16, 17, 64, 65, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32]
NUMBERS += [1 << 40, 1 << 50, 1 << 53, 1 << 61, 1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]
NUMBERS += [-16, -(1 << 31), -(1 << 62), 4096, 1 << 20]
TEXTS = ["", "a", "\0", "é" * 300, "x" * 5000, *"tqsavzDSxdlnrficbm"]
TEXTS += ["dict", "list", "tuple", "defaultdict", "set", "eval", "__class__", "distributed"]
TEXTS += ["plain", "dtype", "device", "coo", "csr", "bsr", "meta", "cuda", "cpu", "0x", "-0x1"]
TEXTS += ["shard", "partial", "replicate", "strided", "per_channel_affine", "class", "os.system"]
TEXTS += ['"O"', '"<f8"', '"V9"', '[["a", "<f4"]]', "fuzz.Loud", "Point", "Color", *ITEM_SIZES]
Place = tuple[int | str, ...]


def positions(plain: Any, path: Place = ()) -> Iterator[Place]:
    yield path
    items = enumerate(plain) if isinstance(plain, list) else ()
    for place, item in plain.items() if isinstance(plain, dict) else items:
        yield from positions(item, (*path, place))


def at(plain: Any, path: Place) -> Any:
    for place in path:
        plain = plain[place]
    return plain


def _other(rng: random.Random, value: Any, plain: Any, paths: list[Place]) -> Any:
    roll = rng.random()
    if roll < 0.1:
        return rng.choice([None, True, 0.5, "t", 7, b"x", [], {}, [[]], {"a": 1}])
    if roll < 0.25:
        return at(plain, rng.choice(paths))
    if isinstance(value, bytes):
        return _other_column(rng, value)
    if isinstance(value, int) and not isinstance(value, bool):
        near = [value + 1, value - 1, value * 2, -value, value ^ (1 << rng.randrange(16))]
        return rng.choice(NUMBERS + near * 4)
    if isinstance(value, str):
        return rng.choice(TEXTS) if rng.random() < 0.8 else value + rng.choice(TEXTS)
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


def _other_column(rng: random.Random, data: bytes) -> Any:
    """Another column of numbers, or none."""
    try:
        numbers = unpack_column(data).tolist()
    except ValueError:
        numbers = []
    kind = rng.randrange(9)
    if kind == 0 or not numbers:
        return rng.choice([b"", None, rng.randbytes(rng.randrange(20)), [1, 2], pack([0])])
    where = rng.randrange(len(numbers))
    if kind < 4:
        old = numbers[where]
        near = [old + 1, abs(old - 1), old + 4, old * 2, len(numbers), len(numbers) - 1, numbers[0]]
        numbers[where] = rng.choice([abs(n) % (1 << 63) for n in NUMBERS] + near * 4)
    elif kind == 4:
        del numbers[where]
    elif kind == 5:
        numbers.append(rng.choice(numbers))
    elif kind == 6:
        numbers[where] = rng.choice(numbers)
    elif kind == 7:
        other = rng.randrange(len(numbers))
        numbers[where], numbers[other] = numbers[other], numbers[where]
    else:
        return (
            data[:-1] if rng.random() < 0.5 else bytes([rng.choice((0, 1, 2, 4, 8, 3))]) + data[1:]
        )
    return pack(numbers)


def pack(numbers: list[int]) -> bytes:
    return pack_column(np.array(numbers, np.int64))


def restate(rng: random.Random, data: bytes) -> bytes:
    plain = msgspec.msgpack.decode(data)
    paths = list(positions(plain))[1:]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        path = rng.choice(paths)
        try:
            parent = at(plain, path[:-1])
            if isinstance(parent, dict) and rng.random() < 0.1:
                del parent[path[-1]]
            else:
                parent[path[-1]] = _other(rng, parent[path[-1]], plain, paths)
        except (IndexError, TypeError, KeyError):
            continue  # an earlier change took this place away
    return packed(plain)


def packed(plain: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(plain)
    except (RecursionError, OverflowError, ValueError, TypeError):
        return b"\x91" * 900  # put into itself


# Mutations of columns, which know what stands where.

Plain = dict[str, Any]


def images_of(plain: Plain) -> int:
    """As many as there are; other changes may have made the number absurd."""
    return min(max(plain.get("images", 0), 0), 99)


def rows_of(outline: Plain) -> int:
    return min(max(outline["leaves"] - len(outline.get("others", ())), 0), 99)


def one_column(rng: random.Random, plain: Plain) -> None:
    """Another column, or one where there was none: often the same record in other words."""
    outline = rng.choice(plain["outlines"])
    where, name = rng.choice(
        [
            *((outline, name) for name in ("others_at", "kinds", "images", "offsets")),
            *((plain, name) for name in ("kind_of", "starts", "volume_of", "device_of")),
            (plain, "storage_of"),
        ]
    )
    count = rows_of(outline) if where is outline else images_of(plain)
    if where.get(name) is None:
        said = list(range(count)) if name == "images" else [rng.choice((0, 0, 0, 1))] * count
        where[name] = pack(said)
    elif rng.random() < 0.2:
        where[name] = None
    else:
        where[name] = _other_column(rng, where[name])


def fewer_rows(rng: random.Random, plain: Plain) -> None:
    """A row goes, from all columns; the image or the tree may miss it."""
    outline = plain["outlines"][0]
    gone = rng.randrange(max(1, rows_of(outline)))
    outline["leaves"] -= 1
    for name in ("kinds", "images", "offsets"):
        if outline.get(name):
            numbers = unpack_column(outline[name]).tolist()
            del numbers[gone : gone + 1]
            outline[name] = pack(numbers)


def another_kind(rng: random.Random, plain: Plain) -> None:
    """Another shape, dtype, stride, flag or sharding of a kind of leaves or images."""
    kinds = plain[rng.choice(("kinds", "image_kinds"))]
    kind = rng.choice(kinds)
    shapes: list[Any] = [[], [0], [1] * 65, [1 << 61, 4], [-1], [1 << 63], [3], [2, 2], None]
    shape = kind[1]
    if shape:
        shapes += [[*shape[:-1], shape[-1] + 1], [*shape[:-1], shape[-1] - 1], shape[::-1]] * 4
    changes: dict[int, list[Any]] = {
        0: TEXTS,
        1: shapes,
        2: [None, [], [0], [1], [1 << 62], [-1], [1, 2], [2, 1], [1 << 60] * 2, [4, 1], [1, 4]],
        3: [0, 1, 2, 3, 4, 8, 16, 32, 63, 64, -1, 1 << 63],
        4: [-1, 0, 1, 2, 7, None, pack([0, 0]), pack([1, 0]), pack([2, 2])],
        5: [None, pack([0, 0]), pack([4, 4]), pack([2, 4]), pack([8, 4])],
    }
    place = rng.randrange(len(kind))
    kind[place] = rng.choice(changes[place])


def of_another_kind(rng: random.Random, plain: Plain) -> None:
    """Images and leaves change their kinds: leaves do not fit, or do."""
    if rng.random() < 0.5:
        count = images_of(plain)
        plain["kind_of"] = pack([rng.randrange(len(plain["image_kinds"])) for _ in range(count)])
    else:
        outline = plain["outlines"][0]
        kinds = len(plain["kinds"])
        outline["kinds"] = pack([rng.randrange(kinds) for _ in range(rows_of(outline))])


def other_devices(rng: random.Random, plain: Plain) -> None:
    names = ["cpu", "cuda", "meta", "fake", "", "a b", "é", "x" * 5000]
    plain["devices"] = [rng.choice(names) for _ in range(rng.randrange(4))]
    if rng.random() < 0.3:
        plain["device_of"] = pack([rng.randrange(4) for _ in range(images_of(plain))])


def other_tree(rng: random.Random, plain: Plain) -> None:
    outline = plain["outlines"][0]
    another = msgspec.msgpack.decode(rng.choice(PACKED))["outlines"][0]["tree"]
    leaves = min(outline["leaves"], 99)
    some = rng.choice((leaves, leaves, leaves + 1, max(leaves - 1, 0)))
    outline["tree"] = rng.choice([another, ["l", "list", list(range(some))], 0, -1, "x", None])


def other_sizes(rng: random.Random, plain: Plain) -> None:
    """The volume, and how it is cut."""
    volume = rng.choice(plain["volumes"])
    place = rng.randrange(1, 4)
    size = volume[1] if type(volume[1]) is int else 0
    cuts = [pack([size]), pack([size // 32 * 16, size - size // 32 * 16]), pack([16, 16]), None]
    volume[place] = rng.choice([[*NUMBERS, size + 16], [*NUMBERS, 64], cuts][place - 1])


def other_numbers(rng: random.Random, plain: Plain) -> None:
    name = rng.choice(["images", "step", "version", "ranks", "shardings", "meshes", "names"])
    values: list[Any] = [*NUMBERS, None, [1], [0, 0], [[0, "x"]], []]
    plain[name] = rng.choice(values + [plain.get("images", 0) + 1] * 5)


CHANGES = [one_column, fewer_rows, another_kind, of_another_kind, other_devices, other_tree]
CHANGES += [other_sizes, other_numbers]


def recolumn(rng: random.Random, data: bytes) -> bytes:
    plain = msgspec.msgpack.decode(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            rng.choice(CHANGES)(rng, plain)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, ManifestError):
            continue  # an earlier change took this place away, or made a number of it that is none
    return packed(plain)


WAYS: tuple[Callable[[random.Random, bytes], bytes], ...] = (restate, recolumn, recolumn, *BYTES)


def mutant(index: int) -> tuple[Mode, bytes]:
    """The same bytes for the same index, always."""
    rng = random.Random(SEED * TOTAL + index)
    base = rng.randrange(len(BASES))
    way = WAYS[index % 3] if index % 3 < 2 else rng.choice(WAYS[2:])
    return BASES[base][0], way(rng, PACKED[base])


def decoded_mutant(index: int) -> tuple[Mode, Record] | None:
    mode, data = mutant(index)
    try:
        record = decode(data, mode)
    except ManifestError:
        return None
    except Exception as fault:
        pytest.fail(f"seed {SEED}, mutant {index}: {fault!r}")
    check(record, mode)
    return mode, record


def test_bases_are_valid() -> None:
    for (mode, base), data in zip(BASES, PACKED, strict=True):
        check(base, mode)
        assert encode(decode(data, mode)) == data


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_each_change_matters(change: Callable[[random.Random, Plain], None]) -> None:
    """It makes records that are refused."""
    refused = 0
    for seed in range(rounds(120, 2)):
        mode, base = BASES[seed % len(BASES)][0], PACKED[seed % len(BASES)]
        plain = msgspec.msgpack.decode(base)
        try:
            change(random.Random(seed), plain)
        except LookupError:
            continue  # there is no such thing in this one
        try:
            decode(packed(plain), mode)
        except ManifestError:
            refused += 1
    assert refused > 5


def test_valid_mutants_are_the_same_at_rest() -> None:
    seen = 0
    for index in range(0, rounds(12_000)):
        found = decoded_mutant(index)
        if found is None:
            continue
        seen += 1
        mode, record = found
        data = encode(record)
        assert encode(decode(data, mode)) == data, f"seed {SEED}, mutant {index}"
        back = decode_at_rest(encode_at_rest(record), mode)
        assert encode(back) == data, f"seed {SEED}, mutant {index}"
    assert seen > rounds(100)


@pytest.mark.parametrize("quarter", range(4))
def test_mutants_are_refused_or_valid(quarter: int) -> None:
    count = rounds(TOTAL) // 4
    print(f"seed {SEED}, mutants {quarter * count} to {(quarter + 1) * count}")
    decoded.clear()
    accepted = 0
    for index in range(quarter * count, (quarter + 1) * count):
        found = decoded_mutant(index)
        assert not decoded, f"mutant {index}: a decoder ran while a record was read"
        if found is None:
            continue
        accepted += 1
        mode, record = found
        if mode != "stream":
            _check_boxes(record, index)
            continue
        assert record.volumes[0].nbytes == sum(map(aligned, record.box_bytes.tolist()))
        assert record.nbytes <= m.MAX_STREAM_BYTES, f"mutant {index}"
        if accepted % 4 == 0 and record.nbytes <= LANDED_BYTES:
            _land(record, index)
            decoded.clear()  # types of plain values are tried before the first write
    print(f"{accepted} are valid")
    assert count // 100 < accepted < count // 2  # else the mutations are too wild or too tame


def _check_boxes(record: Record, index: int) -> None:
    """Every box lies in its volume."""
    ends = record.box_starts + record.box_bytes
    for end, volume in zip(ends.tolist(), record.box_volumes.tolist(), strict=True):
        assert end <= record.volumes[volume].nbytes, f"seed {SEED}, mutant {index}"


def _land(record: Record, index: int) -> None:
    try:
        land(record)
    except RelayError:
        pass
    except Exception as fault:
        pytest.fail(f"seed {SEED}, mutant {index}, land: {fault!r}")


def test_what_is_made_of_valid_mutants_is_bounded() -> None:
    """Bytes follow the record: all the same, or random. The state comes out, or an error."""
    made = 0
    for index in range(0, rounds(12_000)):
        found = decoded_mutant(index)
        if found is None or found[0] != "stream" or found[1].nbytes > LANDED_BYTES:
            continue
        record = found[1]
        for into in (None, _plain_state()):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    options = LandingOptions(strict=False, atomic=bool(index % 4))
                    landing = land(record, into, options)
                    for chunk, size in enumerate(landing.chunks.sizes):
                        landing.target().write(
                            chunk, torch.full((size,), index % 3, dtype=torch.uint8)
                        )
                    state = landing.commit().state
            except RelayError:
                continue
            except Exception as fault:
                pytest.fail(f"seed {SEED}, mutant {index}, commit: {fault!r}")
            made += 1
            if into is None:
                _check_memory(state, record, index)
    assert made > rounds(100)


def _check_memory(state: object, record: Record, index: int) -> None:
    held = {}
    for tensor in tensors_in(state):
        if tensor.layout is torch.strided and not tensor.is_meta and type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    total = sum(map(aligned, record.box_bytes.tolist()))
    assert sum(held.values()) <= total, f"seed {SEED}, mutant {index}"
