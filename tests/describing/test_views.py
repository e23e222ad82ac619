"""Which tensors share bytes; and no byte leaves the process that no tensor has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from tests.support.states import bytes_of, geometries, sharing_bytes, storage_of, strided
from tests.support.trips import trip
from torchrelay.describing import views as views_module
from torchrelay.describing.at_rest import describe
from torchrelay.describing.snapshot import capture
from torchrelay.describing.views import View, sharing
from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.strides import extent
from torchrelay.state.tensors import raw_of

SECRET = 0xA7
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.complex64, torch.complex128]


def view_of(tensor: torch.Tensor) -> View:
    shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    low = tensor.data_ptr()
    high = low + extent(shape, strides) * size
    return View(tensor, shape, strides, size, low, high, "", 0, ("cpu", 0, low))


@st.composite
def over_one_storage(draw: st.DrawFn) -> list[torch.Tensor]:
    storage = storage_of(16 * draw(st.integers(1, 12)), 1)
    made = []
    for dtype in draw(st.lists(st.sampled_from(DTYPES), min_size=2, max_size=6)):
        geometry = draw(geometries(storage.nbytes() // dtype.itemsize))
        made.append(strided(storage, dtype, *geometry))
    return [tensor for tensor in made if tensor.numel()]


@given(over_one_storage())
@settings(max_examples=rounds(500), deadline=None)
def test_groups_are_those_that_share_bytes(tensors: list[torch.Tensor]) -> None:
    found = [*sharing([view_of(tensor) for tensor in tensors])]
    assert sorted(map(sorted, found)) == sorted(sharing_bytes(tensors))


@given(over_one_storage(), st.booleans())
@settings(max_examples=rounds(500), deadline=None)
def test_no_byte_that_no_tensor_has_leaves(tensors: list[torch.Tensor], at_rest: bool) -> None:
    """All others are of one value, which no tensor has."""
    if not tensors:
        return
    first = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    first.fill_(SECRET)
    for tensor in tensors:
        for at in bytes_of(tensor):
            first[at - first.data_ptr()] = 1
    try:
        sent = stored_of(tensors) if at_rest else stream_of(tensors)
    except UnsupportedLeafError as fault:
        assert "begin amid" in fault.message
        return
    assert SECRET not in sent


def stored_of(state: object) -> bytes:
    return b"".join(raw_of(tensor).numpy().tobytes() for tensor in describe(state).tensors)


def stream_of(state: object) -> bytes:
    snapshot = capture(state)
    found = bytearray()
    for index, size in enumerate(snapshot.chunks.sizes):
        out = torch.full((size,), SECRET, dtype=torch.uint8)
        snapshot.read(index, out)
        found += out.numpy().tobytes()
    return bytes(found)


def test_columns_of_a_matrix_are_sent_as_their_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(views_module, "shared_bytes")
    fused = torch.arange(48.0).reshape(4, 12)
    state = {"q": fused[:, :4], "k": fused[:, 4:8], "v": fused[:, 8:]}
    snapshot = capture(state)
    assert [kind.shape for kind in snapshot.record.image_kinds] == [(4, 4)]
    assert snapshot.record.images == 3 and snapshot.record.nbytes == fused.nbytes
    got: Any = trip(state).state
    assert all(torch.equal(got[key], state[key]) for key in state)


def test_views_that_share_bytes_still_do_and_others_do_not() -> None:
    base = torch.arange(24.0)
    state = {"even": base[::2], "odd": base[1::2], "inside": base[6:10:2], "far": base[20:23]}
    got: Any = trip(state).state
    assert all(torch.equal(got[key], state[key]) for key in state)
    got["even"].zero_()
    assert not got["inside"].any() and not got["far"][::2].any()
    assert torch.equal(got["odd"][:9], base[1:19:2]) and got["far"][1] == 21


def test_views_that_have_all_bytes_together_are_not_copied() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    snapshot = capture({"all": base, "turned": base.t(), "column": base[:, 1]})
    (image,) = range(snapshot.record.images)
    assert snapshot.addresses[image] == base.data_ptr()
