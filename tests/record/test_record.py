"""Records of states, as bytes and back, and what a landing makes of them."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.records import stream_record, whole_record, with_volume
from tests.support.rounds import rounds
from tests.support.states import Destination, assert_same, destinations, states, tensors_in
from tests.support.trips import chunk_of, trip
from torchrelay.describing.snapshot import Snapshot, capture
from torchrelay.errors import FormatError, ManifestError
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.planning import destination
from torchrelay.record import encoding
from torchrelay.record import manifest as m
from torchrelay.record.encoding import decode, decode_at_rest, encode, encode_at_rest
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import (
    VERSION,
    ImageKind,
    LeafKind,
    Record,
    StateOutline,
    pack_column,
    unpack_column,
)
from torchrelay.state import tensors
from torchrelay.transports.wire import handshake

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

thorough = settings(
    max_examples=rounds(60, 3),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MANY = 7_000  # several parts and blocks, the last of them not full; bytes beyond 16 bits


def _tied() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    base = torch.arange(24.0)
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    return {
        "tied": [weight, weight],
        "views": [base[::2], base[4:9], base.view(4, 6).t(), base[:4].view(torch.int32)],
        "expanded": torch.ones(3, 1).expand(3, 4),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "turned twice": [torch.arange(4.0).view(2, 2).t()] * 2,
        "grad": torch.ones(3, requires_grad=True),
        "frozen": frozen,
        "same memory": frozen.data,
        "odd": [torch._neg_view(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()],
    }


def _no_bytes() -> list[Any]:
    empty, meta = torch.empty(0, 3), torch.empty(2, 2, device="meta")
    return [empty, meta, meta.t(), torch.nn.Parameter(torch.empty(0)), torch.empty(0, 3).t()]


def _slices() -> dict[str, Any]:
    """Storages that several tensors have parts of."""
    flat, other = torch.arange(40.0), torch.arange(9, dtype=torch.int16)
    return {
        "flat": [flat[:10], flat[12:20], flat[20:]],
        "other": [other[5:], other[:2]],
        "alone": torch.ones(3),
        "overlapping": [flat.new_ones(6)[2:], torch.ones(2)],
    }


def _many() -> dict[str, Any]:
    kinds = [torch.float32, torch.float16, torch.int64]
    found: dict[str, Any] = {
        f"t{n}": torch.full((n % 4 + 1,), n % 100, dtype=kinds[n % 3]) for n in range(MANY)
    }
    return {"a": {**found}, "step": 5}


STATES: dict[str, Callable[[], Any]] = {
    "nothing": dict,
    "a value": lambda: 7,
    "a tensor": lambda: torch.ones(2),
    "values alone": lambda: {"a": 1, "b": [None, "text", 0.5, torch.Size([2])], 3: b"x"},
    "arrays alone": lambda: [np.arange(3), np.float32(1), np.zeros((0, 2))],
    "tied": _tied,
    "no bytes": _no_bytes,
    "no bytes, and some": lambda: [*_no_bytes(), torch.ones(2), 1],
    "slices": _slices,
    "dtypes": lambda: [torch.ones(2).to(dtype) for dtype in (torch.half, torch.int8, torch.bool)],
    "sparse and values": lambda: [1, torch.eye(3).to_sparse(), "x", torch.ones(1)],
    "first and last are none": lambda: [1, torch.ones(2), torch.ones(2), 2],
    "many": _many,
}
each_state = pytest.mark.parametrize("make", STATES.values(), ids=STATES)


# As bytes


def check_forms(snapshot: Snapshot) -> None:
    """Both encodings say the same, and so do rows all at once and one by one."""
    data = snapshot.encoded()
    found = decode(data)
    assert encode(found) == data
    rest = encode_at_rest(found)
    assert encode(decode_at_rest(rest, "stream")) == data
    rows = LeafRows(found)
    leaves = list(rows)
    assert len(leaves) == len(rows) == found.outlines[0].leaves
    for index, leaf in enumerate(leaves):
        assert rows[index] == leaf and rows[index - len(rows)] == leaf
    assert rows[1:3] == leaves[1:3]
    for index in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError):
            rows[index]


@each_state
def test_both_encodings_say_the_same(make: Callable[[], Any]) -> None:
    check_forms(capture(make(), step=3))


@given(states(), st.sampled_from([16, 48, None]))
@thorough
def test_both_encodings_say_the_same_of_any_state(state: object, chunk_bytes: int | None) -> None:
    check_forms(capture(state, 3, chunk_bytes=chunk_bytes))


@pytest.mark.parametrize("step", [None, 0, 127, 128, 1 << 16, 1 << 32, (1 << 63) - 1])
def test_every_step(step: int | None) -> None:
    data = capture(_tied(), step).encoded()
    assert decode(data).step == step
    for kind in (bytearray, memoryview):
        assert decode(kind(data)).step == step


def test_a_step_at_rest_keeps_what_it_has() -> None:
    record = whole_record()
    rest = encode_at_rest(record)
    back = decode_at_rest(rest)
    assert encode_at_rest(back) == rest and encode(back) == encode(record)
    body = json.loads(rest)["record"]
    assert body["starts"] == record.box_starts.tolist()  # numbers that people can read


def test_long_columns_at_rest_are_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    record = whole_record()
    monkeypatch.setattr(encoding, "READABLE", 8)
    rest = encode_at_rest(record)
    body = json.loads(rest)["record"]
    assert isinstance(body["starts"], str) and isinstance(body["kind_of"], list)
    assert encode(decode_at_rest(rest)) == encode(record)


@pytest.mark.parametrize("numbers", [[], [0], [255], [256, 3], [1 << 16], [1 << 32, 0, 1]])
def test_columns_take_as_few_bytes_as_their_numbers_need(numbers: list[int]) -> None:
    data = pack_column(np.array(numbers, np.int64))
    width = max((max(numbers, default=0).bit_length() + 7) // 8, 1)
    width = {1: 1, 2: 2, 3: 4, 4: 4}.get(width, 8)
    assert len(data) == 1 + width * len(numbers) and data[0] == width
    assert unpack_column(data).tolist() == numbers


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x03abc", b"\x02a", b"\x08" + b"\xff" * 8, b"\x09" + bytes(9)]
)
def test_bytes_that_are_no_column(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"column|63 bits"):
        unpack_column(data)


def test_other_encoders_and_later_versions_are_read() -> None:
    """Any MessagePack with these values, columns that say what is meant where there is none, and
    fields that a later minor version adds."""
    data = capture([torch.ones(2), torch.ones(2)], 3).encoded()
    fields = msgspec.msgpack.decode(data)
    outline = fields["outlines"][0]
    assert not {"kinds", "images", "offsets", "others_at"} & outline.keys()
    zeros = pack_column(np.zeros(2, np.int64))
    outline.update(kinds=zeros, offsets=zeros, images=pack_column(np.arange(2)), new=[1])
    fields.update(kind_of=[0, 0], device_of=zeros, later={"a": 1}, version=[VERSION[0], 200])
    found = decode(msgspec.msgpack.encode(fields))
    assert list(LeafRows(found)) == list(LeafRows(decode(data)))


def test_another_major_version_is_named() -> None:
    """Also where its fields are not what they are here."""
    fields = msgspec.msgpack.decode(capture(_tied(), 3).encoded())
    fields["version"] = [5, 0]
    for change in ({}, {"outlines": 7}, {"kinds": None}, {"images": "many"}):
        with pytest.raises(ManifestError, match=r"version 5\.0, this library reads 4\.x"):
            decode(msgspec.msgpack.encode(fields | change))
    body = json.loads(encode_at_rest(whole_record()))["record"]
    for version in ([5, 0], [3, 0], [3, 1]):
        sealed = msgspec.json.encode(body | {"version": version})
        with pytest.raises(FormatError, match="read it with the torchrelay that wrote it"):
            decode_at_rest(_sealed(sealed))


def test_a_later_minor_version_at_rest_that_cannot_be_read_is_of_another_format() -> None:
    body = json.loads(encode_at_rest(whole_record()))["record"]
    later = body | {"version": [VERSION[0], VERSION[1] + 1]}
    decode_at_rest(_sealed(msgspec.json.encode(later)))
    later["outlines"][0]["others"].append(["new", 1])
    with pytest.raises(FormatError):
        decode_at_rest(_sealed(msgspec.json.encode(later)))
    later["version"] = list(VERSION)
    with pytest.raises(ManifestError):
        decode_at_rest(_sealed(msgspec.json.encode(later)))


def _sealed(body: bytes) -> bytes:
    digest = encoding.xxhash.xxh3_128_hexdigest(body)
    return b'{"record":' + body + b',"digest":"' + digest.encode() + b'"}'


def test_a_changed_byte_at_rest_is_seen() -> None:
    rest = encode_at_rest(whole_record())
    for offset in range(0, len(rest), 7):
        changed = bytearray(rest)
        changed[offset] ^= 1
        with pytest.raises((ManifestError, FormatError)):
            decode_at_rest(bytes(changed))
    with pytest.raises(ManifestError, match="not written by torchrelay"):
        decode_at_rest(b" " + rest)


def test_too_many_images_are_refused_before_anything_is_made_of_them() -> None:
    fields = msgspec.msgpack.decode(capture([torch.ones(2), torch.ones(2), 1]).encoded())
    for count in (4, 1 << 40):
        with pytest.raises(ManifestError, match="images"):
            decode(msgspec.msgpack.encode(fields | {"images": count}))


# Landing


def fill(record: Record, snapshot: Snapshot, into: object = None, **options: Any) -> Any:
    landing = land(record, into, LandingOptions(**options))
    for index in range(len(snapshot.chunks)):
        landing.target().write(index, chunk_of(snapshot, index))
    return landing.commit().state


@each_state
def test_fresh(make: Callable[[], Any]) -> None:
    state = make()
    snapshot = capture(state, 1)
    assert_same(state, fill(decode(snapshot.encoded()), snapshot))


def test_tensors_of_one_storage_have_one_again_and_others_do_not() -> None:
    state = _slices()
    snapshot = capture(state)
    got = fill(decode(snapshot.encoded()), snapshot)
    origins = [[x.untyped_storage().data_ptr() for x in got[name]] for name in ("flat", "other")]
    assert [len(set(found)) for found in origins] == [1, 1]
    everything = [x.untyped_storage().data_ptr() for x in tensors_in(got)]
    assert len(set(everything)) == 5


@each_state
@pytest.mark.parametrize("atomic", [True, False])
def test_in_place(make: Callable[[], Any], atomic: bool) -> None:
    state = make()
    snapshot = capture(state, 1)
    twin = make()
    for tensor in tensors_in(twin):
        if not tensor.is_meta and tensor.layout is torch.strided:
            tensor.untyped_storage().fill_(0)
    kept = list(tensors_in(twin))
    # What is no container and no tensor comes back; a container is the caller's.
    got = fill(decode(snapshot.encoded()), snapshot, destination.Destination(twin), atomic=atomic)
    for before, after in zip(kept, tensors_in(got), strict=True):
        assert before is after
    assert_same(state, got, in_place=True)


@given(st.data(), st.sampled_from([16, 48, None]), st.booleans())
@thorough
def test_in_place_of_any_state(data: st.DataObject, chunk_bytes: int | None, atomic: bool) -> None:
    state = data.draw(states(in_place=True))
    made: Destination = data.draw(destinations(state))
    snapshot = capture(state, 1, chunk_bytes=chunk_bytes)
    record = decode(snapshot.encoded())
    got = fill(record, snapshot, destination.Destination(made.into), atomic=atomic)
    assert_same(state, got, in_place=True)
    made.check()
    # And into what has the sender's own ties and overlaps.
    twin = trip(state).state
    assert_same(state, fill(record, snapshot, twin, atomic=atomic))


def test_a_destination_of_another_make() -> None:
    """Other dtype, shape or path: refused, and nothing written."""
    source: dict[str, Any] = {f"t{n}": torch.ones(3) for n in range(600)}
    for change in ({"t300": torch.zeros(4)}, {"t300": torch.zeros(3).half()}, {"x": torch.ones(1)}):
        into = {name: torch.zeros(3) for name in source} | change
        with pytest.raises(tr.errors.MismatchError) as caught:
            land(capture(source, 1).record, into)
        assert caught.value.path == f"['{next(iter(change))}']"
        assert not any(into[name].any() for name in source)


def test_flags_that_torch_has_no_tensors_of() -> None:
    """Found out at the offer; torch would refuse midway, with a part of the tensors written."""

    def offered(dtype: str, flags: int, *, overlapping: bool) -> Record:
        kind = LeafKind(dtype, (3, 2), (1, 1) if overlapping else None, flags)
        size = tensors.DTYPES[dtype].itemsize
        image = ImageKind("uint8", (4 * size,)) if overlapping else ImageKind(dtype, (3, 2))
        outline = StateOutline(0, 1)
        record = Record(
            version=VERSION, outlines=(outline,), kinds=(kind,), images=1, image_kinds=(image,)
        )
        return with_volume(record)

    for overlapping in (True, False):
        for dtype, flags in (("int32", 1), ("bool", 3)):
            with pytest.raises(ManifestError, match="a gradient of dtype"):
                decode(encode(offered(dtype, flags, overlapping=overlapping)))
        for dtype, flags in (("float32", 1), ("bool", 2), ("complex64", 3)):
            record = decode(encode(offered(dtype, flags, overlapping=overlapping)))
            for into in (None, torch.zeros(3, 2, dtype=tensors.DTYPES[dtype])):
                landing = land(record, into)
                landing.target().write(0, torch.zeros(landing.chunks.sizes[0], dtype=torch.uint8))
                landing.commit()


def test_a_leaf_that_leaves_a_hole_before_it() -> None:
    """Memory is made for the whole image, not for what the leaf takes of it."""
    leaf = m.TensorLeaf("float32", (4,), None, 0, 1 << 16)
    landing = land(decode(encode(stream_record(0, [leaf], [(1 << 16) + 16]))))
    landing.target().write(0, torch.ones((1 << 16) + 16, dtype=torch.uint8))
    got: Any = landing.commit().state
    assert torch.equal(got.view(torch.uint8), torch.ones(16, dtype=torch.uint8))


def test_a_landing_that_is_given_up_keeps_no_memory() -> None:
    landing: Any = land(capture({f"t{n}": torch.ones(4) for n in range(5000)}).record)
    made, gone = weakref.ref(landing.memory.memory[0]), weakref.ref(landing)
    gc.disable()
    try:
        del landing
        assert gone() is None and made() is None
    finally:
        gc.enable()


# Over the wire


def of_another_version(rank: int, group: Any, older: int) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == older:
            patch.setattr(handshake, "VERSION", handshake.VERSION - 1)
        with tr.Relay(group, timeout=20) as relay, pytest.raises(tr.errors.RelayError) as fault:
            if rank == 0:
                relay.send({"w": torch.zeros(3)}, 1, timeout=0.3)  # nobody will come
            else:
                relay.recv(0)
    return type(fault.value).__name__, str(fault.value)


@pytest.mark.parametrize("older", [0, 1])
def test_a_peer_of_another_version_is_refused_with_both_named(pool2: Any, older: int) -> None:
    ours, (error, said) = pool2.run(of_another_version, older, fresh_group=True, timeout=60)
    versions = str(handshake.VERSION), str(handshake.VERSION - 1)
    assert error == "RemoteProtocolError" and "same version" in said
    assert all(version in said for version in versions), said
    assert ours[0] == "TransferTimeoutError"  # nobody came
