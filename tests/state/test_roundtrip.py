"""Every state arrives as it left: fresh, in place at once, in place as the bytes come in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from tests.support.states import (
    ALL_DTYPES,
    QUANTIZED,
    STRIDED_DTYPES,
    Destination,
    arrays,
    assert_same,
    destinations,
    numpy_scalars,
    plain_values,
    states,
    storage_of,
    strided,
    tensors_in,
)
from tests.support.trips import chunk_of, trip
from torchrelay.describing.snapshot import capture
from torchrelay.landing.land import land
from torchrelay.record.encoding import decode, decode_at_rest, encode, encode_at_rest

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CHUNKS = st.sampled_from([16, 32, 48, 256, None])
SEEDS = st.integers(0, 1 << 16)
settings_ = settings(
    max_examples=rounds(400),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@given(states(), CHUNKS, SEEDS)
@settings_
def test_fresh(state: object, chunk_bytes: int | None, seed: int) -> None:
    assert_same(state, trip(state, chunk_bytes=chunk_bytes, seed=seed).state)


@given(st.data(), CHUNKS, st.booleans(), SEEDS)
@settings_
def test_in_place(data: st.DataObject, chunk_bytes: int | None, atomic: bool, seed: int) -> None:
    state = data.draw(states(in_place=True))
    made: Destination = data.draw(destinations(state))
    kept = list(tensors_in(made.into))
    got = trip(state, into=made.into, chunk_bytes=chunk_bytes, atomic=atomic, seed=seed)
    assert got.state is made.into
    assert_same(state, got.state, in_place=True)
    made.check()
    for before, after in zip(kept, tensors_in(got.state), strict=True):
        assert before is after


@given(states(in_place=True), CHUNKS, st.booleans(), SEEDS)
@settings_
def test_into_a_state_of_the_same_make(
    state: object, chunk_bytes: int | None, atomic: bool, seed: int
) -> None:
    """The destination has the sender's own ties and overlaps, and keeps them."""
    twin = trip(state).state
    for tensor in tensors_in(twin):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype is not torch.bool:
            storage = tensor.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_xor_(1)
    got = trip(state, into=twin, chunk_bytes=chunk_bytes, atomic=atomic, seed=seed)
    assert_same(state, got.state)


@given(st.data(), CHUNKS)
@settings(settings_, max_examples=rounds(100))
def test_atomic_writes_nothing_before_commit(data: st.DataObject, chunk_bytes: int | None) -> None:
    state = data.draw(states(in_place=True))
    made: Destination = data.draw(destinations(state))
    snapshot = capture(state, chunk_bytes=chunk_bytes)
    landing = land(snapshot.record, made.into)
    for index in range(len(snapshot.chunks)):
        landing.target().write(index, chunk_of(snapshot, index))
    assert made.unchanged()
    assert not landing.torn
    landing.commit()
    assert_same(state, made.into, in_place=True)


@given(states())
@settings(settings_, max_examples=rounds(100))
def test_both_encodings_hold_the_same(state: object) -> None:
    data = capture(state, step=3).encoded()
    record = decode(data)
    assert encode(record) == data
    assert encode(decode_at_rest(encode_at_rest(record), "stream")) == data


@given(st.one_of(plain_values(), numpy_scalars(), arrays()))
def test_a_leaf_alone_is_a_state(leaf: object) -> None:
    assert_same(leaf, trip(leaf).state)


def test_every_dtype_is_covered() -> None:
    assert set(STRIDED_DTYPES) | set(QUANTIZED) == set(ALL_DTYPES)


@pytest.mark.parametrize("dtype", STRIDED_DTYPES, ids=str)
@pytest.mark.parametrize("atomic", [True, False])
def test_each_dtype(dtype: torch.dtype, atomic: bool) -> None:
    storage = storage_of(24 * dtype.itemsize, 1)
    state = {
        "dense": strided(storage_of(24 * dtype.itemsize, 2), dtype, 0, (2, 3, 4), (12, 4, 1)),
        "turned": strided(storage, dtype, 0, (4, 6), (1, 4)),
        "stepped": strided(storage, dtype, 1, (5,), (3,)),
        "parameter": torch.nn.Parameter(
            strided(storage_of(64, 3), dtype, 1, (2,), (1,)), requires_grad=False
        ),
        "none": strided(storage_of(16, 4), dtype, 0, (0, 3), (3, 1)),
    }
    got = trip(state, chunk_bytes=16).state
    assert_same(state, got)
    again = {key: torch.empty(v.shape, dtype=dtype) for key, v in state.items()}
    assert_same(state, trip(state, into=again, chunk_bytes=16, atomic=atomic).state, in_place=True)


def test_arrays_that_share_memory_with_each_other_and_with_tensors() -> None:
    base = np.arange(12, dtype=np.float32)
    state = {
        "base": base,
        "again": base,
        "part": base[2:5],
        "tensor": torch.from_numpy(base),
        "head": torch.from_numpy(base[:3]),
        "tail": torch.from_numpy(base)[7:],
        "field": np.zeros(3, dtype=[("a", "i1"), ("b", "f8")])["b"],
    }
    got = trip(state, chunk_bytes=16).state
    for key, value in state.items():
        assert bytes(np.asarray(got[key])) == bytes(np.ascontiguousarray(value)), key


def test_views_of_different_item_sizes_stay_aligned() -> None:
    base = torch.arange(32, dtype=torch.uint8)
    state = {
        "bytes": base[1:9],
        "words": base.view(torch.float32)[1:3],
        "wide": base.view(torch.complex128)[1:],
        "odd": base[15:31:3],
    }
    assert_same(state, trip(state, chunk_bytes=16).state)


def test_gaps_between_views_do_not_travel() -> None:
    secret = torch.full((64,), 0x5A, dtype=torch.uint8)
    views = {"a": secret[0:40:8], "b": secret[4:44:8], "c": secret[0:20:4]}
    for value in views.values():
        value.zero_()
    snapshot = capture(views)
    for index in range(len(snapshot.chunks)):
        assert chunk_of(snapshot, index).count_nonzero() == 0


def test_unaligned_memory() -> None:
    data = bytearray(range(64))
    tensor = torch.frombuffer(data, dtype=torch.int64, offset=3, count=7)
    state = {"dense": tensor, "strided": tensor[::2]}
    assert_same(state, trip(state, chunk_bytes=16).state)
    into = torch.frombuffer(bytearray(64), dtype=torch.int64, offset=5, count=7)
    trip({"x": tensor[::2]}, into={"x": into[::2]})
    assert torch.equal(into[::2], tensor[::2])


def test_inference_tensors_can_be_filled() -> None:
    with torch.inference_mode():
        into = {"w": torch.zeros(3)}
    trip({"w": torch.ones(3)}, into=into)
    assert torch.equal(into["w"], torch.ones(3))


def test_autograd_sees_the_write() -> None:
    into = torch.ones(3, requires_grad=True)
    out = (into * into).sum()
    trip({"w": torch.zeros(3)}, into={"w": into})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conj_on_one_side_alone_keeps_nan_payloads(dtype: torch.dtype) -> None:
    storage = storage_of(64 * dtype.itemsize, 5)
    torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_or_(0x7D)
    sent = strided(storage, dtype, 0, (8, 8), (8, 1))
    for source, into in [
        (sent.conj(), torch.zeros(8, 8, dtype=dtype)),
        (sent, torch.zeros(8, 8, dtype=dtype).t().conj()),
        (torch._neg_view(sent), torch.zeros(8, 8, dtype=dtype).conj()),
    ]:
        assert_same({"x": source}, trip({"x": source}, into={"x": into}).state, in_place=True)


def test_arrays_over_the_memory_of_tensors_arrive_by_themselves() -> None:
    memory = torch.tensor([95, 130, 194, 7], dtype=torch.uint8)
    state = {
        "tensor": memory[:2].view(torch.bfloat16),
        "longer": memory[:3].numpy(),
        "inside": memory[1:3].numpy(),
    }
    assert_same(state, trip(state).state)
