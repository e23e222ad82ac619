"""Lazily conjugated and negated views: values are sent and written; the lazy bit is no part of a
state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchrelay as tr
from tests.support.states import meant_bits, storage_of, strided
from tests.support.trips import trip
from torchrelay.describing.snapshot import capture
from torchrelay.errors import MismatchError, StateError, UnsupportedLeafError

LAZY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": torch.conj,
    "neg": torch._neg_view,
    "both": lambda tensor: torch._neg_view(tensor.conj()),
    "imag": lambda tensor: tensor.conj().imag,
    "turned": lambda tensor: tensor.conj().t(),
    "expanded": lambda tensor: torch._neg_view(tensor[:1].expand(4, 3)),
}


def nans() -> torch.Tensor:
    """Numbers and signalling NaNs of either sign."""
    storage = storage_of(12 * 8, 3)
    torch.empty(0, dtype=torch.uint8).set_(storage)[24:].bitwise_or_(0x7D)
    return strided(storage, torch.complex64, 0, (4, 3), (3, 1))


@pytest.mark.parametrize("lazy", LAZY)
def test_values_arrive_bit_for_bit_and_the_bit_does_not(lazy: str) -> None:
    sent = LAZY[lazy](nans())
    assert sent.is_conj() or sent.is_neg()
    got = trip({"x": sent}).state["x"]
    assert not got.is_conj() and not got.is_neg()
    assert meant_bits(got) == meant_bits(sent)


@pytest.mark.parametrize("lazy", [name for name in LAZY if name != "expanded"])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_destination_with_the_bit_takes_values(lazy: str, atomic: bool) -> None:
    memory = torch.zeros(4, 3, dtype=torch.complex64)
    into = LAZY[lazy](memory)
    sent = LAZY[lazy](nans()).resolve_conj().resolve_neg()
    got = trip({"x": sent}, into={"x": into}, atomic=atomic).state["x"]
    assert got is into and meant_bits(into) == meant_bits(sent)
    if lazy == "conj":
        assert meant_bits(memory) == meant_bits(sent.conj())


def test_a_lazy_view_is_not_tied_to_what_it_is_a_view_of() -> None:
    weight = torch.complex(torch.arange(3.0), torch.ones(3))
    state = {"a": weight, "b": weight.conj(), "c": weight[:2]}
    got = trip(state).state
    assert torch.equal(got["b"], weight.conj())
    got["a"].zero_()
    assert not got["c"].any() and torch.equal(got["b"], weight.conj())
    into = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(MismatchError, match="same memory") as caught:
        trip({"a": weight, "b": weight.conj()}, into={"a": into, "b": into.conj()})
    assert caught.value.path == "['b']" and not into.any()


def test_a_write_while_it_is_sent_is_noticed() -> None:
    weight = torch.ones(3, dtype=torch.complex64)
    snapshot = capture({"w": weight.conj()})
    snapshot.check_unchanged()
    weight.zero_()
    with pytest.raises(StateError, match="changed while it was sent") as caught:
        snapshot.check_unchanged()
    assert caught.value.path == "['w']"


def test_a_save_keeps_values_and_later_saves_the_later_ones(tmp_path: Path) -> None:
    weight = torch.complex(torch.arange(3.0), torch.ones(3))
    with tr.Checkpointer(tmp_path, timeout=30) as there:
        for step in (1, 2):
            state = {"w": weight, "lazy": weight.conj(), "neg": torch._neg_view(weight.imag)}
            there.save(step, state)
            got = there.load(step=step).state
            assert all(torch.equal(got[key], state[key]) for key in state)
            weight.mul_(2)


def test_a_view_that_torch_cannot_negate_is_refused_by_path() -> None:
    with pytest.raises(UnsupportedLeafError, match="a negated view") as caught:
        capture({"b": [torch._neg_view(torch.ones(2, dtype=torch.bool))]})
    assert caught.value.path == "['b'][0]"
