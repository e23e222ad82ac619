"""A hundred thousand broken manifests: each is refused by `ManifestError`, or is a valid one.

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

from tests.support.states import Color, Moment, Pair, Point, tensors_in
from torchrelay.errors import ManifestError, RelayError
from torchrelay.state import codec
from torchrelay.state import manifest as m
from torchrelay.state.landing import land
from torchrelay.state.registry import register
from torchrelay.state.snapshot import capture
from torchrelay.state.validation import ITEM_SIZES, check

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SEED = 20240229
TOTAL = 100_000
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


BASES = _bases()
PACKED = [codec.encode(base) for base in BASES]
JSON = [codec.encode_json(base) for base in BASES]


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


BYTES = (flip, truncate, splice, insert)


def mutant(index: int) -> tuple[bool, bytes]:
    """Whether it is JSON, and the bytes. The same for the same index, always."""
    rng = random.Random(SEED * TOTAL + index)
    base = rng.randrange(len(BASES))
    json = index % 10 == 9
    if index % 2:
        pool = JSON if json else PACKED
        return json, rng.choice(BYTES)(rng, pool[base], pool)
    return False, restate(rng, base, msgspec.msgpack.encode)


def decode(index: int) -> m.Manifest | None:
    json, data = mutant(index)
    try:
        manifest = codec.decode_json(data) if json else codec.decode(data)
    except ManifestError:
        return None
    except Exception as fault:
        pytest.fail(f"seed {SEED}, mutant {index}: {fault!r}")
    check(manifest)
    return manifest


def test_bases_are_valid() -> None:
    for base in BASES:
        check(base)


@pytest.mark.parametrize("quarter", range(4))
def test_mutants_are_refused_or_valid(quarter: int) -> None:
    count = TOTAL // 4
    print(f"seed {SEED}, mutants {quarter * count} to {(quarter + 1) * count}")
    decoded.clear()
    accepted = 0
    for index in range(quarter * count, (quarter + 1) * count):
        manifest = decode(index)
        if manifest is None:
            continue
        accepted += 1
        stated = manifest.nbytes
        assert sum(manifest.chunks) == sum(m.aligned(s.nbytes) for s in manifest.storages)
        assert stated <= m.MAX_STREAM_BYTES, f"mutant {index}"
        if accepted % 4 == 0 and stated <= LANDED_BYTES:
            _land(manifest, index)
    assert not decoded, "a decoder ran before commit"
    print(f"{accepted} are valid")
    assert count // 100 < accepted < count // 2  # else the mutations are too wild or too tame


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
    for index in range(0, 12_000, 2):
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
    assert made > 100


def _check_memory(state: object, manifest: m.Manifest, index: int) -> None:
    held = {}
    for tensor in tensors_in(state):
        if tensor.layout is torch.strided and not tensor.is_meta and type(tensor) is torch.Tensor:
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    assert sum(held.values()) <= manifest.nbytes, f"seed {SEED}, mutant {index}"
