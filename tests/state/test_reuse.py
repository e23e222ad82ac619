"""Planning a state, the fast ways: what is used again is right, and is not worked out twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from torchrelay.errors import ManifestError, UnsupportedLeafError
from torchrelay.geometry import chunks as plan
from torchrelay.geometry.chunks import aligned
from torchrelay.landing.destination import PreparedDestination, prepare, split
from torchrelay.landing.seam import land
from torchrelay.plan import description
from torchrelay.plan.plain import look
from torchrelay.plan.selection import Selection
from torchrelay.plan.snapshot import Snapshot, capture
from torchrelay.record import codec, compact
from torchrelay.record import manifest as m
from torchrelay.state import tensors
from torchrelay.state.matching import Matched
from torchrelay.state.tree import flatten

State = dict[Any, Any]
Mutation = Callable[[State], object]


def build() -> State:
    flat = torch.arange(40.0)
    tied = torch.arange(6.0)
    many = {f"m{n}": torch.full((3,), float(n)) for n in range(70)}
    return {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(3, 4),
        "half": torch.ones(3, 4, dtype=torch.bfloat16),
        "weight": torch.nn.Parameter(torch.ones(2, 2)),
        "column": torch.arange(12.0).reshape(3, 4)[:, 1],
        "views": [flat[:8], flat[24:], flat[8:16]],
        "tied": [tied, tied],
        "same memory": [many["m0"].view(3, 1)],
        "many": many,
        "array": np.arange(5),
        "empty": torch.empty(0, 3),
        "z": torch.ones(2, dtype=torch.complex64).conj(),
        "step": 1,
        "rate": 0.5,
        True: torch.zeros(2),
    }


def swap_key(state: State) -> None:
    value = state.pop(True, None)
    state[1] = torch.zeros(2) if value is None else value  # equal to True, and another key


def new_data(state: State) -> None:
    state["a"].data = torch.zeros(3, 4)


def other_storage(state: State) -> None:
    """The same memory in another storage, which others then do not share."""
    state["views"][0] = torch.from_numpy(state["views"][0].detach().numpy())


def one_storage(state: State) -> None:
    flat = torch.zeros(24)
    state["a"], state["b"] = flat[:12].view(3, 4), flat[12:].view(3, 4)


MUTATIONS: dict[str, Mutation] = {
    "nothing": lambda s: None,
    "value": lambda s: s.update(step=s["step"] + 1 if type(s["step"]) is int else 7),
    "bool for int": lambda s: s.update(step=True),
    "negative zero": lambda s: s.update(rate=-0.0),
    "zero": lambda s: s.update(rate=0.0),
    "bytes": lambda s: s["a"].detach().fill_(5),
    "swapped": lambda s: s.update(a=s["b"], b=s["a"]),
    "replaced": lambda s: s.update(b=torch.full((3, 4), 9.0)),
    "resized": lambda s: s["many"]["m1"].resize_(2),
    "transposed": lambda s: s["half"].t_(),
    "unsqueezed": lambda s: s["b"].unsqueeze_(0),
    "data": new_data,
    "other storage": other_storage,
    "one storage": one_storage,
    "gradient": lambda s: s["b"].requires_grad_(not s["b"].requires_grad),
    "frozen": lambda s: s["weight"].requires_grad_(not s["weight"].requires_grad),
    "parameter": lambda s: s.update(b=torch.nn.Parameter(s["b"].detach(), False)),
    "dtype": lambda s: s.update(a=s["a"].detach().view(torch.int32)),
    "negated": lambda s: s.update(a=torch._neg_view(s["a"].detach())),
    "key": lambda s: s.update(new=torch.ones(1)),
    "key of another type": swap_key,
    "reordered": lambda s: s.update(a=s.pop("a")),
    "tie": lambda s: s.update(b=s["a"]),
    "view": lambda s: s.update(b=s["a"].detach()[1:]),
    "overlap": lambda s: s["views"].append(s["views"][0].detach()[4:]),
    "view apart": lambda s: s["many"].update(m3=s["many"]["m2"].detach()[1:]),
    "array": lambda s: s["array"].__setitem__(0, 77),
    "new array": lambda s: s.update(array=np.arange(6)),
    "column written": lambda s: s["column"].fill_(3),
    "new column": lambda s: s.update(column=torch.arange(9.0).reshape(3, 3)[:, 2]),
    "tensor for value": lambda s: s.update(step=torch.ones(2)),
    "inference": lambda s: s.update(b=_inference()),
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3, 4)


def content(snapshot: Snapshot) -> bytes:
    out = b""
    for index, size in enumerate(snapshot.chunks.sizes):
        chunk = torch.full((size,), 255, dtype=torch.uint8)
        snapshot.read(index, chunk)
        out += chunk.numpy().tobytes()
    return out


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert found.manifest == wanted.manifest
    assert codec.encode(found.manifest) == codec.encode(wanted.manifest)
    assert codec.decode(found.encoded()) == wanted.manifest
    assert content(found) == content(wanted)
    assert found.changed() is None


@pytest.fixture(params=["guards", "questions"], autouse=True)
def likeness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which torch is asked whether tensors are as they were."""
    assert tensors._guards_tell()
    if request.param == "questions":
        monkeypatch.setattr(tensors, "_guards_tell", lambda: False)


class TestCapture:
    @given(st.lists(st.sampled_from(sorted(MUTATIONS)), min_size=1, max_size=5))
    @settings(max_examples=rounds(150), deadline=None)
    def test_like_gives_what_a_fresh_capture_gives(self, names: list[str]) -> None:
        state = build()
        before: Snapshot | None = None
        for step, name in enumerate(("nothing", *names)):
            try:
                MUTATIONS[name](state)
            except (KeyError, RuntimeError, AttributeError, IndexError, ValueError):
                continue  # does not go together with one before
            found = capture(state, step, like=before)
            assert_same(found, capture(state, step))
            before = found

    @pytest.mark.parametrize("name", sorted(MUTATIONS))
    def test_each_change_alone(self, name: str) -> None:
        state = build()
        before = capture(state, 1)
        MUTATIONS[name](state)
        assert_same(capture(state, 2, like=before.plan), capture(state, 2))

    def test_nothing_is_planned_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = build()
        first = capture(state, 1)

        def refuse(*args: object) -> object:
            raise AssertionError("planned again")

        monkeypatch.setattr(description, "look", refuse)
        monkeypatch.setattr(description, "lay", refuse)
        monkeypatch.setattr(plan, "cut", refuse)
        second = capture(state, 2, like=first)
        assert second.plan is first.plan
        assert second.manifest.leaves is first.manifest.leaves
        assert second.manifest.step == 2
        state["step"] = 9
        third = capture(state, 3, like=second)
        assert third.plan is not second.plan
        assert third.manifest.storages is first.manifest.storages
        assert third.chunks is first.chunks
        with pytest.raises(AssertionError, match="planned again"):
            capture(state, 3, like=second, receivers=2)

    def test_the_stream_of_host_memory_is_used_again(self) -> None:
        state = {"a": torch.ones(3), "b": np.arange(4), "n": 1}
        first = capture(state)
        assert capture(state, like=first).stream.host is first.stream.host
        state["b"] = np.arange(4)
        second = capture(state, like=first)
        assert second.stream.host is not first.stream.host
        assert_same(second, capture(state))

    def test_a_plan_keeps_no_tensor_alive(self) -> None:
        state = build()
        kept = capture(state).plan
        gone = [weakref.ref(leaf) for leaf in flatten(state).leaves if torch.is_tensor(leaf)]
        state.clear()
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone)
        assert capture({}, like=kept).manifest.leaves == ()

    def test_changes_after_a_second_capture_are_seen(self) -> None:
        state = build()
        first = capture(state)
        state["many"]["m5"].add_(1)
        second = capture(state, like=first)
        assert first.changed() == "['many']['m5']"
        assert second.changed() is None
        state["column"].add_(1)
        assert second.changed() == "['column']"

    def test_what_cannot_travel_is_named(self) -> None:
        state: State = {"a": torch.ones(2), "x": [1, {"y": 2}]}
        first = capture(state)
        state["x"][1]["y"] = object()
        with pytest.raises(UnsupportedLeafError) as caught:
            capture(state, like=first)
        assert caught.value.path == "['x'][1]['y']"

    def test_large_tensors_are_seen_where_they_lie(self) -> None:
        big = torch.arange(1 << 19, dtype=torch.int32)
        state = {"small": torch.ones(3), "big": big.repeat(4), "odd": big.repeat(4).view(2, -1).t()}
        first = capture(state)
        again = capture(state, like=first.plan)
        for snapshot in (first, again):
            views = [snapshot.view(index) for index in range(len(snapshot.chunks))]
            assert sum(view is not None for view in views) >= 4
            for index, view in enumerate(views):
                read = torch.empty(snapshot.chunks.sizes[index], dtype=torch.uint8)
                snapshot.read(index, read)
                assert view is None or torch.equal(view, read)


def by_leaf(prepared: PreparedDestination) -> dict[int, Any]:
    """What is known of each plain tensor, and its address."""
    plains = prepared.plan.plains
    sorts = map(plains.sorts.__getitem__, plains.sort_of_each.tolist())
    return dict(zip(plains.leaves, zip(sorts, plains.addresses, strict=True), strict=True))


def one_by_one(
    pairs: list[Any], manifest: m.Manifest, prepared: PreparedDestination, chunks: Any
) -> tuple[list[tuple[int, ...]], list[Any]]:
    """What `split` does in columns, leaf by leaf."""
    known = by_leaf(prepared)
    pieces: list[tuple[int, ...]] = []
    rest = []
    for pair in pairs:
        index, _, here = pair
        leaf, there = manifest.leaves[index], known.get(here)
        if there is not None and type(leaf) is m.TensorLeaf and leaf.storage >= 0:
            sort, address = there
            odd = leaf.flags & (m.CONJ | m.NEG | m.META)
            same = (leaf.strides, leaf.shape, leaf.dtype) == (None, sort.shape, sort.dtype)
            if same and not odd:
                at = chunks.starts[leaf.storage] + leaf.offset
                pieces.append((at, address, sort.nbytes, leaf.storage, here))
                continue
        rest.append(pair)
    pieces = sorted(set(pieces))
    tied = len({piece[4] for piece in pieces}) < len(pieces)
    overlap = any(after[0] < piece[0] + piece[2] for piece, after in pairwise(pieces))
    return ([], pairs) if tied or overlap else (pieces, rest)


class TestPrepare:
    def test_a_plan_keeps_no_tensor_alive(self) -> None:
        state = build()
        kept = prepare(state).plan
        gone = weakref.ref(state["many"]["m7"])
        state.clear()
        gc.collect()
        assert gone() is None and len(kept.plains)

    @given(st.lists(st.sampled_from(sorted(MUTATIONS)), max_size=3), st.booleans())
    @settings(max_examples=rounds(80), deadline=None)
    def test_columns_are_those_of_split(self, names: list[str], offer: bool) -> None:
        source, into = build(), build()
        for name in names:
            try:
                MUTATIONS[name](source if offer else into)
            except (KeyError, RuntimeError, AttributeError, IndexError, ValueError):
                continue
        snapshot, destination = capture(source), prepare(into)
        matched, _ = destination.match(snapshot.manifest.tree, Selection(), strict=False)
        pieces, rest = one_by_one(matched.pairs, snapshot.manifest, destination, snapshot.chunks)
        before = capture(build()).manifest
        for pairs, expected in product((matched, Matched(matched.pairs, [], [])), (0, 1, 2)):
            if expected:  # another state, or this very one
                destination.expect(before if expected == 1 else snapshot.manifest)
            found = split(pairs, snapshot.manifest, destination, snapshot.chunks)
            columns = [column.tolist() for column in found.pieces[:5]]
            assert list(zip(*columns, strict=True)) == pieces
            assert found.rest == rest

    def test_what_is_expected_is_not_worked_out_twice_and_holds_for_it_alone(self) -> None:
        into = build()["many"]
        destination, one, other = prepare(into), capture(into), capture(into)
        destination.expect(one.manifest)
        matched, _ = destination.match(one.manifest.tree, Selection(), strict=True)
        assert destination.expected is not None
        assert split(matched, one.manifest, destination, one.chunks) is destination.expected[1]
        for late, manifest in (([], other.manifest), ([3], one.manifest)):
            found = split(matched, manifest, destination, one.chunks, late)
            assert found is not destination.expected[1] and len(found.rest) == len(late)
        destination = prepare(into)
        destination.expect(capture({"else": torch.ones(2)}).manifest)
        assert destination.expected is None

    def test_a_landing_takes_it(self) -> None:
        source, into = build(), build()
        for leaf in into["many"].values():
            leaf.zero_()
        for _ in range(2):
            snapshot = capture(source)
            landing = land(snapshot.manifest, into=prepare(into))
            for index, size in enumerate(snapshot.chunks.sizes):
                chunk = torch.empty(size, dtype=torch.uint8)
                snapshot.read(index, chunk)
                landing.write(index, chunk)
            landing.commit()
            assert content(capture(into)) == content(snapshot)
            source["a"].add_(1)


class TestLook:
    def test_what_it_tells_of_each_is_so(self) -> None:
        leaves: list[Any] = flatten(build()).leaves
        plains = look(leaves)
        sorts = [plains.sorts[number] for number in plains.sort_of_each.tolist()]
        for leaf, sort, at in zip(plains.of(leaves), sorts, plains.addresses, strict=True):
            assert at == leaf.data_ptr() and sort.flags == tensors.flags_of(leaf)
            assert sort.shape == tuple(leaf.shape) and sort.nbytes == leaf.nbytes

    @pytest.mark.parametrize(
        "odd",
        [
            torch.ones(3).to_sparse(),
            torch.ones(3, 3).to_sparse_csr(),
            torch.empty(3, device="meta"),
            torch.ones(2, 3).t(),
            torch.ones(2, dtype=torch.complex64),
            torch._neg_view(torch.ones(3)),
            torch.empty(0),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "text",
        ],
        ids=str,
    )
    def test_odd_leaves_are_not_plain(self, odd: object) -> None:
        fine = [torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3).double()]
        assert list(look([fine[0], odd, *fine[1:]]).leaves) == [0, 2, 3]
        assert list(look([odd]).leaves) == []

    def test_memory_that_was_freed_is_not_plain(self) -> None:
        freed = torch.ones(3)
        freed.untyped_storage().resize_(0)
        assert list(look([torch.ones(3), freed]).leaves) == [0]


class TestFlatten:
    @given(st.lists(st.integers(0, 200), min_size=60, max_size=140), st.booleans())
    def test_many_tensors_are_found_once_each(self, picks: list[int], more: bool) -> None:
        pool = [torch.ones(1) for _ in range(201)]
        state = {
            "list": [pool[n] for n in picks],
            "one": pool[picks[0]],
            "dict": {str(n): pool[n] for n in range(0, 201, 2 if more else 40)},
            "last": [pool[picks[-1]], 3],
        }
        tree, leaves = flatten(state)
        assert len({id(leaf) for leaf in leaves}) == len(leaves)
        assert isinstance(tree, m.DictNode)
        there = [node for node in tree.items if isinstance(node, (m.DictNode, m.SequenceNode))]
        assert [leaves[n] for n in there[0].items] == state["list"]  # type: ignore[index]
        assert leaves[tree.items[1]] is state["one"]  # type: ignore[index]
        assert [leaves[n] for n in there[1].items] == list(state["dict"].values())  # type: ignore
        assert leaves[there[2].items[0]] is pool[picks[-1]]  # type: ignore[index]


def cut_one_by_one(sizes: list[int], chunk_bytes: int, small_bytes: int) -> tuple[int, ...]:
    chunk_bytes = aligned(chunk_bytes)
    chunks: list[int] = []
    bucket = 0
    for exact in sizes:
        size = aligned(exact)
        own = exact >= small_bytes or size > chunk_bytes
        if bucket and (own or bucket + size > chunk_bytes):
            chunks.append(bucket)
            bucket = 0
        if own:
            chunks += [chunk_bytes] * (size // chunk_bytes) + [size % chunk_bytes]
        else:
            bucket += size
    return tuple(size for size in (*chunks, bucket) if size)


@given(st.lists(st.integers(1, 400), max_size=30), st.integers(1, 200), st.integers(1, 500))
def test_a_stream_is_cut_as_if_storage_by_storage(sizes: list[int], chunk: int, small: int) -> None:
    assert plan.cut(sizes, chunk, small) == cut_one_by_one(sizes, chunk, small)


class TestStep:
    @pytest.mark.parametrize("step", [None, 0, 127, 128, 255, 256, 65536, 1 << 32, (1 << 63) - 1])
    def test_a_manifest_gets_another_step_without_being_encoded_anew(
        self, step: int | None
    ) -> None:
        snapshot = capture(build(), 5)
        wanted = msgspec.structs.replace(snapshot.manifest, step=step)
        data = codec.with_step(snapshot.encoded(), step)
        assert data == compact.encode(wanted)
        for kind in (bytes, bytearray, memoryview):
            assert codec.decode(kind(data)) == wanted

    def test_what_is_wrong_is_refused(self) -> None:
        data = capture(build(), 5).encoded()
        codec.decode(data)
        for bad in (
            codec.with_step(data, 1 << 63),
            codec.with_step(data, (1 << 64) - 1),
            data[:4],
            data[:5],
            data[:-1],
            data + b"\x00",
            b"",
            b"\x97\x92\x09\x00" + data[4:],
            data[:4] + b"\xd9\x05hello" + data[5:],
            data[:4] + b"\xff" + data[5:],
            data[:4] + b"\xcf\x00",
        ):
            with pytest.raises(ManifestError):
                codec.decode(bad)


class TestShortened:
    def test_one_that_is_known_comes_back_with_its_step(self) -> None:
        state = build()
        known = codec.Recall()
        assert known.last is None
        known.decode(capture(state, 3).encoded())
        assert known.last is not None
        rest, knows = known.last[0], codec.digest_of(known.last[0])
        for step in (None, 0, 3, 200, 70_000, 1 << 40):
            data = capture(state, step).encoded()
            short = codec.shortened(data, knows)
            assert len(short) < 64 and codec.step_of(short) == step
            assert codec.completed(short, rest) == data
            assert codec.completed(data, rest) == codec.shortened(data, b"") == data
            for other in (None, b"", rest[:-1], rest + b"0"):
                with pytest.raises(ManifestError, match="as before"):
                    codec.completed(short, other)
            with pytest.raises(ManifestError):
                codec.decode(short)

    @pytest.mark.parametrize("name", sorted(MUTATIONS))
    def test_one_that_changed_is_told_in_full(self, name: str) -> None:
        state = build()
        before = capture(state).encoded()
        known = codec.Recall()
        known.decode(before)
        assert known.last is not None
        MUTATIONS[name](state)
        after = capture(state).encoded()
        short = codec.shortened(after, codec.digest_of(known.last[0]))
        assert (short == after) == (before != after)
        assert codec.completed(short, known.last[0]) == after


class TestRecall:
    @pytest.mark.parametrize("step", [None, 0, 127, 128, 65536, (1 << 63) - 1])
    def test_the_same_manifest_is_decoded_once(
        self, step: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        snapshot = capture(build(), 5)
        recall = codec.Recall()
        first = recall.decode(snapshot.encoded())
        assert first == snapshot.manifest
        monkeypatch.setattr(codec, "decode", lambda *given: pytest.fail("decoded again"))
        wanted = msgspec.structs.replace(first, step=step)
        for data in (compact.encode(wanted), codec.with_step(snapshot.encoded(), step)):
            for kind in (bytes, bytearray, memoryview):
                found = recall.decode(kind(data))
                assert found == wanted
                assert found.leaves is first.leaves and found.tree is first.tree

    def test_another_manifest_is_another(self) -> None:
        recall = codec.Recall()
        for value in (1, True, 2, 1, True):
            manifest = capture({"a": torch.ones(2), "n": value}, 3).manifest
            found = recall.decode(codec.encode(manifest))
            assert codec.encode(found) == codec.encode(manifest)

    def test_what_is_wrong_is_refused_though_the_rest_is_known(self) -> None:
        data = capture(build(), 5).encoded()
        recall = codec.Recall()
        recall.decode(data)
        for bad in (
            codec.with_step(data, 1 << 63),
            data[:-1],
            data + b"\x00",
            data[:4] + b"\xd9\x05hello" + data[5:],
            data[:4] + b"\xcf\x00",
        ):
            with pytest.raises(ManifestError):
                recall.decode(bad)

    def test_what_it_keeps_is_bounded(self) -> None:
        offers = [codec.encode(capture({"n": n}).manifest) for n in range(6)]
        recall = codec.Recall(count=3)
        first = [recall.decode(data).leaves for data in offers]
        again = [recall.decode(offers[n]).leaves is first[n] for n in (5, 4, 3, 0)]
        assert again == [True, True, True, False]
        small = codec.Recall(limit=10)
        assert small.decode(offers[0]).leaves is not small.decode(offers[0]).leaves
        recall.clear()
        assert recall.decode(offers[5]).leaves is not first[5]


HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    "leaf",
    [
        m.TensorLeaf("float32", (4,), None, 0, HUGE),
        m.TensorLeaf("float32", (4,), None, 0, HUGE - 15),
        m.TensorLeaf("float32", (4,), None, 0, 1 << 63),
        m.TensorLeaf("float32", (4,), None, 0, -4),
        m.TensorLeaf("float32", (4,), None, 0, 2),
        m.TensorLeaf("float32", (4,), None, 1),
        m.TensorLeaf("float32", (4,), None, -2),
        m.TensorLeaf("float32", (4,), None, 1 << 64),
        m.TensorLeaf("float32", (3,), None, 0),
        m.TensorLeaf("float32", (5,), None, 0),
        m.TensorLeaf("float32", (1 << 61,), None, 0),
        m.TensorLeaf("complex128", (2, 2), (1 << 61, 1 << 61), 0),
        m.TensorLeaf("float32", (0,), None, 0),
        m.TensorLeaf("float32", (4,), None, 0, 0, m.META),
        m.TensorLeaf("float32", (4,), None, -1),
        m.TensorLeaf("float33", (4,), None, 0),
    ],
    ids=str,
)
def test_tensors_that_are_not_in_order_are_refused(leaf: m.TensorLeaf) -> None:
    fine = m.TensorLeaf("float32", (4,), None, 1)
    tree = m.SequenceNode("list", (0, 1))
    storages = (m.Storage(16), m.Storage(16))
    good = m.TensorLeaf("float32", (4,), None, 0)
    codec.decode(codec.encode(m.Manifest(m.VERSION, 1, tree, (good, fine), storages, (32,))))
    if leaf.storage == 1:
        storages = (m.Storage(16),)
    with pytest.raises(ManifestError):
        manifest = m.Manifest(m.VERSION, 1, tree, (leaf, fine), storages, (16 * len(storages),))
        codec.check(manifest)
