"""Manifests in columns say exactly what they say in records, on the wire and to a landing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrelay as tr
from tests.docs import test_docs as docs
from tests.support.rounds import rounds
from tests.support.states import Destination, assert_same, destinations, states, tensors_in
from tests.support.trips import chunk_of, trip
from tests.support.ways import by, every_way
from torchrelay.errors import ManifestError
from torchrelay.geometry.chunks import aligned
from torchrelay.landing.destination import prepare
from torchrelay.landing.seam import land
from torchrelay.plan.plain import Plains, look
from torchrelay.plan.snapshot import Snapshot, capture
from torchrelay.record import codec, columns, compact
from torchrelay.record import manifest as m
from torchrelay.record.columns import Kind, Leaves, Storages, Table, others_of, table_of
from torchrelay.record.compact import KnownTree
from torchrelay.state import tensors
from torchrelay.transports.protocol import wire

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
        "grad": torch.ones(3, requires_grad=True),
        "frozen": frozen,
        "same memory": frozen.data,
        "odd": [torch._neg_view(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()],
    }


def _no_bytes() -> list[Any]:
    empty, meta = torch.empty(0, 3), torch.empty(2, 2, device="meta")
    return [empty, meta, meta.t(), torch.nn.Parameter(torch.empty(0)), torch.empty(0, 3).t()]


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
    "dtypes": lambda: [torch.ones(2).to(dtype) for dtype in (torch.half, torch.int8, torch.bool)],
    "sparse and values": lambda: [1, torch.eye(3).to_sparse(), "x", torch.ones(1)],
    "first and last are none": lambda: [1, torch.ones(2), torch.ones(2), 2],
    "many": _many,
}
each_state = pytest.mark.parametrize("make", STATES.values(), ids=STATES)


def known_of(manifest: m.Manifest) -> KnownTree:
    tree = msgspec.msgpack.encode(manifest.tree)
    return KnownTree(tree, msgspec.msgpack.decode(tree, type=m.Node), len(manifest.leaves))


def in_records(snapshot: Snapshot) -> m.Manifest:
    found = codec.decode(codec.encode(snapshot.manifest))
    assert type(found.leaves) is tuple and type(found.storages) is tuple
    return found


def in_columns(snapshot: Snapshot, known: KnownTree | None = None) -> m.Manifest:
    found = codec.decode(snapshot.encoded(), known)
    assert isinstance(found.leaves, Leaves) and isinstance(found.storages, Storages)
    return found


def fields_of(data: bytes) -> list[Any]:
    fields = msgspec.msgpack.decode(data)
    assert isinstance(fields, list)
    return fields


# Both forms


def check_forms(snapshot: Snapshot) -> None:
    manifest = snapshot.manifest
    records, found = in_records(snapshot), in_columns(snapshot)
    assert records == manifest == found == records
    assert codec.decode(compact.encode(records)) == records
    assert snapshot.encoded() == compact.encode(manifest)
    # What is kept at rest is the same, whichever form it came in.
    assert codec.encode(found) == codec.encode(records) == codec.encode(manifest)
    check_tuples(found.leaves, records.leaves)
    check_tuples(found.storages, records.storages)
    check_tables(found.leaves, records.leaves)
    check_tables(manifest.leaves, records.leaves)
    sizes = [columns.sizes_of(one.storages).tolist() for one in (found, records)]
    assert sizes[0] == sizes[1]
    assert columns.devices_of(found.storages) == columns.devices_of(records.storages)
    named = [columns.by_device(one.storages, str.upper) for one in (found, records)]
    assert named[0] == named[1]


def check_tuples(found: Sequence[Any], wanted: tuple[Any, ...]) -> None:
    """It does what a tuple does."""
    count = len(wanted)
    assert len(found) == count and bool(found) == bool(wanted)
    assert tuple(found) == wanted and list(reversed(found)) == list(reversed(wanted))
    assert found == wanted and wanted == found and not (found != wanted)  # noqa: SIM202
    assert found != wanted[1:] or not count
    assert found != [*wanted] and found != None  # noqa: E711
    assert hash(found) == hash(wanted)
    for at in {0, 1, count // 2, count - 1, -1, -count} if count else ():
        if -count <= at < count:
            assert found[at] == wanted[at] and type(found[at]) is type(wanted[at])
            assert found[at] in found
    for at in (count, -count - 1, 1 << 40):
        with pytest.raises(IndexError):
            found[at]
    for some in (slice(None), slice(1, -1), slice(None, None, -2), slice(5, 2), slice(-3, None)):
        assert found[some] == wanted[some]


def check_tables(found: Sequence[m.Leaf], wanted: tuple[m.Leaf, ...]) -> None:
    """Kinds may be numbered otherwise; all else is the same."""
    one, two = table_of(found), table_of(wanted)
    assert one.rows.tolist() == two.rows.tolist()
    assert one.records() == two.records() == [x for x in wanted if isinstance(x, m.TensorLeaf)]
    assert [one.record(at) for at in range(0, len(one.rows), 97)] == two.records()[::97]
    assert dict(others_of(found)) == dict(others_of(wanted))
    assert all(
        column.dtype == np.int64 for table in (one, two) for column in (*table[:1], *table[2:])
    )


@each_state
def test_both_forms_say_the_same(make: Callable[[], Any]) -> None:
    check_forms(capture(make(), step=3))


@given(states(), st.sampled_from([16, 48, None]))
@thorough
def test_both_forms_say_the_same_of_any_state(state: object, chunk_bytes: int | None) -> None:
    check_forms(capture(state, 3, chunk_bytes=chunk_bytes))


@pytest.mark.parametrize("step", [None, 0, 127, 128, 1 << 16, 1 << 32, (1 << 63) - 1])
def test_every_step(step: int | None) -> None:
    snapshot = capture(_tied(), step)
    assert in_columns(snapshot).step == step == codec.step_of(snapshot.encoded())


KINDS = st.builds(
    m.TensorLeaf,
    st.sampled_from(["float32", "float8_e5m2", "bfloat16"]),
    st.lists(st.integers(1, 3), max_size=2).map(tuple),
    st.none(),
    st.just(0),
    st.just(0),
    st.integers(0, 3),
)


@given(
    st.lists(st.tuples(KINDS, st.sampled_from(["cpu", "cuda", "meta", "fake"]), st.booleans())),
    st.lists(st.integers(0, 9), max_size=3),
)
@thorough
def test_hand_made_manifests(
    drawn: list[tuple[m.TensorLeaf, str, bool]], values: list[int]
) -> None:
    """Devices that this machine has not, and leaves in any order."""
    leaves: list[m.Leaf] = []
    storages: list[m.Storage] = []
    for leaf, device, again in drawn:
        size = int(np.prod(leaf.shape, dtype=int)) * tensors.DTYPES[leaf.dtype].itemsize
        storages.append(m.Storage(16 + size if again else size, device))
        one = msgspec.structs.replace(leaf, storage=len(storages) - 1, offset=16 * again)
        leaves += [one, msgspec.structs.replace(one, offset=0)] if again else [one]
    for place, value in enumerate(values):
        leaves.insert(place * 2, m.ValueLeaf("plain", value))
    manifest = m.Manifest(
        m.VERSION,
        4,
        m.SequenceNode("list", tuple(range(len(leaves)))),
        tuple(leaves),
        tuple(storages),
        tuple(aligned(storage.nbytes) for storage in storages),
    )
    records = codec.decode(codec.encode(manifest))
    found = codec.decode(compact.encode(manifest))
    assert found == manifest == records
    check_tuples(found.leaves, manifest.leaves)
    check_tuples(found.storages, manifest.storages)
    check_tables(found.leaves, manifest.leaves)
    devices = {storage.device for storage in storages}
    assert columns.devices_of(found.storages) == columns.devices_of(storages) == devices
    for one in (records, found):
        landing = land(one, device=torch.device("cpu"))
        for chunk, size in enumerate(one.chunks):
            landing.write(chunk, torch.zeros(size, dtype=torch.uint8))
        state = landing.commit().state
        assert [type(leaf) for leaf in state] == [  # type: ignore[attr-defined]
            int if isinstance(leaf, m.ValueLeaf) else _type_of(leaf) for leaf in leaves
        ]


def _type_of(leaf: Any) -> type:
    return torch.nn.Parameter if leaf.flags & m.PARAMETER else torch.Tensor


def test_tensors_among_the_others_join_the_table() -> None:
    one = m.TensorLeaf("int8", (2,), None, 0)
    two = m.TensorLeaf("int8", (2,), None, 1)
    value = m.ValueLeaf("plain", 1)
    rows = np.array([1], np.int64)
    zeros = np.zeros(1, np.int64)
    table = Table(rows, [Kind("int8", (2,), None, 0)], zeros, zeros, zeros)
    leaves = Leaves.of(table, {3: two, 0: value, 2: two})
    assert leaves == (value, one, two, two)
    assert leaves.table.rows.tolist() == [1, 2, 3] and dict(leaves.others) == {0: value}
    check_tables(leaves, (value, one, two, two))


# Encoded


def test_columns_are_left_out_where_they_say_nothing() -> None:
    fields = fields_of(capture([torch.ones(2), torch.ones(2)]).encoded())
    assert [fields[at] for at in (5, 7, 9, 12)] == [b"", b"", b"", b""]
    spelt = [*fields]
    spelt[7], spelt[9], spelt[12] = bytes(8), bytes(16), bytes(8)
    plain, found = (codec.decode(msgspec.msgpack.encode(one)) for one in (fields, spelt))
    assert plain == found


def test_other_encoders_and_later_versions_are_read() -> None:
    """Any MessagePack with these values, and fields that a later minor version adds."""
    manifest = capture(_tied(), 3).manifest
    fields = fields_of(compact.encode(manifest))
    parts = [msgspec.msgpack.encode(field) for field in fields]
    head, rest = b"\x9e" + parts[0], b"".join(parts[3:])
    texts = (b"\xd9\x07columns", b"\xda\x00\x07columns", b"\xdb\x00\x00\x00\x07columns")
    steps = (b"\x03", b"\xd0\x03", b"\xd3" + bytes(7) + b"\x03", b"\xcf" + bytes(7) + b"\x03")
    for data in (
        *(head + step + text + rest for step in steps for text in (*texts, parts[2])),
        b"\xdc\x00\x0e" + b"".join(parts),
        b"\xdd\x00\x00\x00\x0e" + b"".join(parts),
        *(msgspec.msgpack.encode([*fields, *[None] * more]) for more in (1, 2, 9)),
        msgspec.msgpack.encode([[1, 200], *fields[1:], "more", {}]),
    ):
        found = codec.decode(data)
        assert msgspec.structs.replace(found, version=m.VERSION) == manifest


def test_another_major_version_is_named() -> None:
    """Also where its columns are not what they are here."""
    fields = fields_of(compact.encode(capture(_tied(), 3).manifest))
    fields[0] = [2, 0]
    for change in (None, (8, b"odd"), (5, b"\0" * 4), (6, []), (8, None)):
        if change is not None:
            fields[change[0]] = change[1]
        with pytest.raises(ManifestError, match=r"version 2\.0, this library reads 1\.x"):
            codec.decode(msgspec.msgpack.encode(fields))


def test_too_many_leaves_are_refused_before_anything_is_made_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = fields_of(capture([torch.ones(2), torch.ones(2), 1]).encoded())
    data = msgspec.msgpack.encode(fields)
    monkeypatch.setattr(compact, "unpack", lambda *args: pytest.fail("unpacked"))
    monkeypatch.setattr(m, "MAX_LEAVES", 2)
    with pytest.raises(ManifestError, match="the cap"):
        codec.decode(data)


# Trees that are known


@each_state
def test_a_known_tree_is_taken_as_it_is(make: Callable[[], Any]) -> None:
    snapshot = capture(make(), 1)
    known = known_of(snapshot.manifest)
    assert known == prepare(make()).plan.known_tree
    found = in_columns(snapshot, known)
    assert found == snapshot.manifest
    assert found.tree is known.tree
    assert codec.decode(snapshot.encoded(), known).tree is known.tree
    alone = isinstance(known.tree, int)
    assert alone or codec.decode(codec.encode(snapshot.manifest), known).tree is not known.tree


def test_another_tree_is_not() -> None:
    snapshot = capture({"a": torch.ones(2), 1: 5}, 1)
    known = known_of(snapshot.manifest)
    other: list[Any] = [{"b": torch.ones(2), 1: 5}, {"a": torch.ones(2), True: 5}, [1, 2], {}]
    for state in other:
        found = in_columns(snapshot, known_of(capture(state).manifest))
        assert found == snapshot.manifest
        assert list(found.tree.keys) == list(known.tree.keys)  # type: ignore[union-attr]
    # The same bytes, for another number of leaves: they do not make the tree valid.
    for leaves in (known.leaves - 1, known.leaves + 1):
        found = in_columns(snapshot, known._replace(leaves=leaves))
        assert found == snapshot.manifest and found.tree is not known.tree


def test_a_known_tree_does_not_vouch_for_leaves() -> None:
    snapshot = capture([torch.ones(2), torch.ones(2), 1], 1)
    known = known_of(snapshot.manifest)
    fields = fields_of(snapshot.encoded())
    lost = [*fields]
    lost[4] = []  # the value
    lost[5] = b""
    for bad in (lost, [*fields[:4], [*fields[4], *fields[4]], *fields[5:]]):
        for tree in (None, known):
            with pytest.raises(ManifestError, match=r"leaf |leaves"):
                codec.decode(msgspec.msgpack.encode(bad), tree)


# Landing


def fill(manifest: m.Manifest, snapshot: Snapshot, **how: Any) -> Any:
    landing = land(manifest, **how)
    for index in range(len(snapshot.chunks)):
        landing.write(index, chunk_of(snapshot, index))
    return landing.commit().state


def check_fresh(state: object, chunk_bytes: int | None = None) -> None:
    snapshot = capture(state, 1, chunk_bytes=chunk_bytes)
    records, found = (fill(form(snapshot), snapshot) for form in (in_records, in_columns))
    assert_same(state, records)
    assert_same(state, found)
    assert_same(records, found)
    for one, two in zip(tensors_in(records), tensors_in(found), strict=True):
        assert type(one) is type(two)


@each_state
def test_fresh(make: Callable[[], Any]) -> None:
    check_fresh(make())


@given(states(), st.sampled_from([16, 48, None]))
@thorough
def test_fresh_of_any_state(state: object, chunk_bytes: int | None) -> None:
    check_fresh(state, chunk_bytes)


@each_state
@pytest.mark.parametrize("atomic", [True, False])
def test_in_place(make: Callable[[], Any], atomic: bool) -> None:
    state = make()
    snapshot = capture(state, 1)
    twins = []
    for form in (in_records, in_columns):
        twin = make()
        for tensor in tensors_in(twin):
            if not tensor.is_meta and tensor.layout is torch.strided:
                tensor.untyped_storage().fill_(0)
        kept = list(tensors_in(twin))
        into = prepare(twin)
        manifest = form(snapshot)
        if form is in_columns:
            manifest = form(snapshot, into.plan.known_tree)
            assert manifest.tree is into.flat.tree
        # What is no container and no tensor comes back; a container is the caller's.
        got = fill(manifest, snapshot, into=into, atomic=atomic)
        for before, after in zip(kept, tensors_in(got), strict=True):
            assert before is after
        assert_same(state, got)
        twins.append(got)
    assert_same(*twins)


@given(st.data(), st.sampled_from([16, 48, None]), st.booleans())
@thorough
def test_in_place_of_any_state(data: st.DataObject, chunk_bytes: int | None, atomic: bool) -> None:
    state = data.draw(states(in_place=True))
    made: Destination = data.draw(destinations(state))
    snapshot = capture(state, 1, chunk_bytes=chunk_bytes)
    into = prepare(made.into)
    manifest = in_columns(snapshot, into.plan.known_tree)
    assert_same(state, fill(manifest, snapshot, into=into, atomic=atomic), in_place=True)
    made.check()
    # And into what has the sender's own ties and overlaps.
    twins = [trip(state).state for _ in range(2)]
    for form, twin in zip((in_records, in_columns), twins, strict=True):
        assert_same(state, fill(form(snapshot), snapshot, into=twin, atomic=atomic))
    assert_same(*twins)


def test_a_destination_of_another_make() -> None:
    """Other dtype, shape or path: refused in the same words, and nothing written."""
    source: dict[str, Any] = {f"t{n}": torch.ones(3) for n in range(600)}
    for change in ({"t300": torch.zeros(4)}, {"t300": torch.zeros(3).half()}, {"x": torch.ones(1)}):
        into = {name: torch.zeros(3) for name in source} | change
        snapshot = capture(source, 1)
        said = []
        for form in (in_records, in_columns):
            with pytest.raises(tr.MismatchError) as caught:
                land(form(snapshot), into=into)
            said.append(str(caught.value))
        assert said[0] == said[1]
        assert not any(into[name].any() for name in source)


@pytest.mark.parametrize("encode", [codec.encode, compact.encode], ids=["records", "columns"])
def test_flags_that_torch_has_no_tensors_of(encode: Callable[[m.Manifest], bytes]) -> None:
    """Found out at the offer; torch would refuse midway, with a part of the tensors written."""

    def offered(dtype: str, flags: int, *, overlapping: bool) -> m.Manifest:
        size = tensors.DTYPES[dtype].itemsize
        leaf = m.TensorLeaf(dtype, (3, 2), (1, 1) if overlapping else None, 0, 0, flags)
        nbytes = size * (4 if overlapping else 6)
        storages, chunks = (m.Storage(nbytes),), (aligned(nbytes),)
        return m.Manifest(m.VERSION, 1, 0, (leaf,), storages, chunks)

    for overlapping in (True, False):
        for dtype, flags in (("int32", 1), ("bool", 3), ("qint8", 1), ("bool", 8), ("uint64", 12)):
            with pytest.raises(ManifestError, match=r"a (gradient|negation) of dtype"):
                codec.decode(encode(offered(dtype, flags, overlapping=overlapping)))
        for dtype, flags in (("float32", 9), ("int32", 8), ("bool", 2), ("complex64", 13)):
            manifest = codec.decode(encode(offered(dtype, flags, overlapping=overlapping)))
            for into in (None, torch.zeros(3, 2, dtype=tensors.DTYPES[dtype])):
                landing = land(manifest, into=into)
                landing.write(0, torch.zeros(manifest.chunks[0], dtype=torch.uint8))
                landing.commit()


# Over the wire


def transfer(rank: int, group: Any) -> list[str]:
    """The forms in which manifests came."""
    forms: list[str] = []
    with pytest.MonkeyPatch.context() as patch, tr.Relay(group, timeout=20) as relay:
        if rank == 0:
            for step in range(3):
                relay.send({**_tied(), "step": step}, 1, step=step)
            return forms
        decode = codec.decode

        def seen(data: bytes, *rest: Any) -> m.Manifest:
            forms.append("columns" if fields_of(bytes(data))[2] == compact.FORM else "records")
            return decode(data, *rest)

        patch.setattr(codec, "decode", seen)
        into = _tied()
        for tensor in tensors_in(into):
            tensor.untyped_storage().fill_(0)
        assert_same({**_tied(), "step": 0}, relay.recv(0, step=0).state)
        into["step"] = None
        for step in (1, 2):
            got = relay.recv(0, into=into, step=step).state
            assert got is into
            assert_same({**_tied(), "step": step}, got)
    return forms


@every_way
def test_manifests_travel_in_columns(pool2: Any, way: str) -> None:
    assert pool2.run(by, way, transfer, timeout=60)[1] == ["columns"] * 3


def of_another_version(rank: int, group: Any) -> str:
    with pytest.MonkeyPatch.context() as patch, tr.Relay(group, timeout=20) as relay:
        if rank == 0:
            patch.setattr(wire, "MINOR", wire.MINOR - 1)
        with pytest.raises(tr.RelayError) as fault:
            if rank == 0:
                relay.send({"w": torch.zeros(3)}, 1)
            else:
                relay.recv(0)
    return str(fault.value)


def test_a_peer_of_another_version_is_refused_with_both_named(pool2: Any) -> None:
    ours = f"{wire.MAJOR}.{wire.MINOR}"
    older = f"{wire.MAJOR}.{wire.MINOR - 1}"
    for said in pool2.run(of_another_version, fresh_group=True, timeout=60):
        assert ours in said and older in said and "same version" in said, said


# Looking at many tensors


@pytest.fixture(params=["guards", "questions"])
def likeness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which torch is asked what tensors are like."""
    assert tensors._guards_tell()
    if request.param == "questions":
        monkeypatch.setattr(tensors, "_guards_tell", lambda: False)


def told(plains: Plains) -> list[tuple[object, ...]]:
    sorts = [plains.sorts[number] for number in plains.sort_of_each.tolist()]
    return list(zip(plains.leaves, sorts, plains.addresses, plains.offsets, strict=True))


def check_look(leaves: list[Any]) -> None:
    """The result is that of looking at each by itself."""
    versions: list[int] = []
    plains = look(leaves, versions)
    wanted = []
    for place, leaf in enumerate(leaves):
        wanted += [(place, *rest) for _, *rest in told(look([leaf]))]
    assert told(plains) == wanted
    assert plains.count == len(leaves)
    assert versions in ([], tensors.versions_of(plains.of(leaves)))
    assert plains.hold(leaves)
    assert [x.data_ptr() for x in plains.of(leaves)] == plains.addresses


def _slice() -> torch.Tensor:
    return torch.ones(8)[2:5]


ODD: dict[str, Callable[[], Any]] = {
    "dtype": lambda: torch.ones(3, dtype=torch.float64),
    "dtype of the same size": lambda: torch.ones(3, dtype=torch.int32),
    "shape": lambda: torch.ones(4),
    "dimensions": lambda: torch.ones(3, 1),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "step": lambda: torch.ones(6)[::2],
    "slice": _slice,
    "expanded": lambda: torch.ones(1).expand(3),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(0),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "value": lambda: 3,
    "array": lambda: np.ones(3),
}
COUNT = 1300
# Not the first, middle or last of a block, nor one in sixteen; one in sixteen; all of those.
PLACES = [700, 704, 0, 256, 511, 512, 1299]


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("odd", ODD)
def test_one_odd_among_many(odd: str) -> None:
    first = list(ODD).index(odd)
    for place in [PLACES[(first + n) % len(PLACES)] for n in range(rounds(len(PLACES)))]:
        leaves: list[Any] = [torch.ones(3) for _ in range(COUNT)]
        leaves[place] = ODD[odd]()
        check_look(leaves)


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("odd", ["negated", "dtype", "requires grad", "transposed", "parameter"])
def test_one_odd_among_matrices_of_several_sorts(odd: str) -> None:
    """Blocks of several sorts take another way than blocks of one."""
    make = {**ODD, "transposed": lambda: torch.ones(3, 3).t()}[odd]
    for place in (189, 700, 1290):
        leaves: list[Any] = [torch.ones([3] * (n % 3)) for n in range(COUNT)]
        leaves[place] = make()
        check_look(leaves)


@pytest.mark.usefixtures("likeness")
@given(
    st.lists(st.sampled_from(sorted(ODD)), min_size=1, max_size=4),
    st.integers(1, COUNT),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mixtures(sorts: list[str], count: int, rng: Any, runs: bool) -> None:
    """In runs, as layers have them, or at random."""
    if runs:
        leaves = [ODD[sorts[n * len(sorts) // count]]() for n in range(count)]
    else:
        leaves = [ODD[rng.choice(sorts)]() for _ in range(count)]
    check_look(leaves)


@pytest.mark.usefixtures("likeness")
def test_what_was_seen_does_not_hold_for_another() -> None:
    leaves: list[Any] = [torch.ones(3) for _ in range(COUNT)]
    plains = look(leaves)
    assert not plains.hold(leaves[1:]) and not plains.hold([*leaves, torch.ones(3)])
    for odd in ODD.values():
        changed = [*leaves]
        changed[700] = odd()
        assert not plains.hold(changed)
    leaves[700].requires_grad_()
    assert not plains.hold(leaves)


def test_a_nested_tensor_does_not_end_the_process() -> None:
    """torch's guards abort on one: nobody may ask them about it, at first or again."""
    state: dict[str, Any] = {str(n): torch.ones(3) for n in range(40)}
    before = capture(state)
    prepare(state)
    state["7"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for like in (None, before):
        with pytest.raises(tr.UnsupportedLeafError) as caught:
            capture(state, like=like)
        assert caught.value.path == "['7']"
    assert 7 not in prepare(state).plan


# What is written down


def test_the_form_is_as_described() -> None:
    fields = docs.rows_under("### Columns")
    struct = compact._Compact
    assert [int(row[0]) for row in fields] == list(range(len(fields)))
    assert [row[1].strip("`") for row in fields] == list(struct.__struct_fields__)
    kinds = {"rows": "u4", "numbers": "u4", "storages": "i4", "offsets": "u8", "sizes": "u8"}
    said = {row[1].strip("`"): row[2] for row in fields}
    assert {name: said[name] for name in kinds} == kinds and said["on"] == "u4"
    assert (compact._NUMBER, compact._LONG, compact._SIGNED) == ("<u4", "<u8", "<i4")
    docs.check_record(Kind, docs.WIRE)


def test_the_example_is_as_described() -> None:
    snapshot = capture({"w": torch.tensor([1.0, -2.0]), "lr": 0.5}, step=7)
    data = docs.hex_of("columns")
    assert data == snapshot.encoded()
    assert codec.decode(data) == snapshot.manifest
    assert f"The same in columns, {len(data)} bytes" in docs.WIRE


def test_a_landing_that_is_given_up_keeps_no_memory() -> None:
    manifest = capture({f"t{n}": torch.ones(4) for n in range(5000)}).manifest
    landing: Any = land(manifest)
    parts = landing.places().parts()
    next(parts)
    assert 0 < len(landing._homes) < 5000  # some are made, others are to come
    made, gone = weakref.ref(landing._homes[0]), weakref.ref(landing)
    gc.disable()
    try:
        del parts, landing
        assert gone() is None and made() is None
    finally:
        gc.enable()
