"""Every state comes back from a checkpoint as it was: one process, every kind of leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.states import Destination, assert_same, destinations, states, tensors_in

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

many = settings(
    max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(scope="module")
def shared() -> Iterator[tr.Checkpointer]:
    """One checkpointer for all examples of a test: each overwrites the step before."""
    with TemporaryDirectory() as root, tr.Checkpointer(root, timeout=30) as made:
        yield made


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tr.Checkpointer]:
    with tr.Checkpointer(tmp_path, timeout=30) as made:
        yield made


def kept(checkpointer: tr.Checkpointer, state: object, **options: Any) -> Any:
    """What a load gives of a state that was just saved."""
    checkpointer.save(0, state, overwrite=True)
    return checkpointer.load(step=0, **options).state


# Every state, drawn.


@given(state=states())
@many
def test_fresh(shared: tr.Checkpointer, state: object) -> None:
    assert_same(state, kept(shared, state), at_rest=True)


@given(data=st.data(), atomic=st.booleans())
@many
def test_in_place(shared: tr.Checkpointer, data: st.DataObject, atomic: bool) -> None:
    state = data.draw(states(in_place=True))
    made: Destination = data.draw(destinations(state))
    before = list(tensors_in(made.into))
    homes = [x.data_ptr() if x.layout is torch.strided else 0 for x in before]
    got = kept(shared, state, into=made.into, atomic=atomic)
    assert got is made.into
    assert_same(state, got, in_place=True)
    made.check()
    after = list(tensors_in(got))
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert homes == [x.data_ptr() if x.layout is torch.strided else 0 for x in after]


@given(state=states(in_place=True))
@many
def test_into_a_state_of_the_same_make(shared: tr.Checkpointer, state: object) -> None:
    twin = kept(shared, state)
    for tensor in tensors_in(twin):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype is not torch.bool:
            storage = tensor.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_xor_(1)
    got = shared.load(into=twin, step=0).state
    assert_same(state, got, at_rest=True)
