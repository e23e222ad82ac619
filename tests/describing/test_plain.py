"""The plain tensors among many leaves: found all at once as they would be one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.rounds import rounds
from tests.support.states import assert_same
from tests.support.trips import trip
from torchrelay.describing.plain import PlainTensors, find_plain
from torchrelay.describing.snapshot import capture
from torchrelay.planning.destination import Destination
from torchrelay.state import tensors

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def facts(plain: PlainTensors) -> list[tuple[object, ...]]:
    kinds = [plain.kinds[number] for number in plain.kind_of.tolist()]
    columns = (column.tolist() for column in (plain.leaves, plain.addresses, plain.offsets))
    return list(zip(kinds, *columns, strict=True))


def check_found(leaves: list[Any]) -> None:
    """The result is that of looking at each by itself."""
    plain = find_plain(leaves)
    wanted = []
    for place, leaf in enumerate(leaves):
        wanted += [(kind, place, *rest) for kind, _, *rest in facts(find_plain([leaf]))]
    assert facts(plain) == wanted
    assert plain.count == len(leaves)
    assert [x.data_ptr() for x in plain.of(leaves)] == plain.addresses.tolist()
    assert plain.lie_in_place(plain.of(leaves))


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


@pytest.mark.parametrize("odd", ODD)
def test_one_odd_among_many(odd: str) -> None:
    first = list(ODD).index(odd)
    for place in [PLACES[(first + n) % len(PLACES)] for n in range(rounds(len(PLACES)))]:
        leaves: list[Any] = [torch.ones(3) for _ in range(COUNT)]
        leaves[place] = ODD[odd]()
        check_found(leaves)


@pytest.mark.parametrize("odd", ["negated", "dtype", "requires grad", "transposed", "parameter"])
def test_one_odd_among_matrices_of_several_kinds(odd: str) -> None:
    """Blocks of several kinds take another way than blocks of one."""
    make = {**ODD, "transposed": lambda: torch.ones(3, 3).t()}[odd]
    for place in (189, 700, 1290):
        leaves: list[Any] = [torch.ones([3] * (n % 3)) for n in range(COUNT)]
        leaves[place] = make()
        check_found(leaves)


@pytest.mark.parametrize(
    "odd", [lambda: torch.randn(3, 3).t(), lambda: torch._neg_view(torch.randn(3, 3))]
)
def test_a_last_block_of_another_layout(odd: Callable[[], torch.Tensor]) -> None:
    """Tensors of one shape and dtype: contiguous ones, and then a block of another length."""
    leaves: list[Any] = [torch.randn(3, 3) for _ in range(tensors.BLOCK)]
    leaves += [odd() for _ in range(88)]
    check_found(leaves)
    assert_same(leaves, trip(leaves).state)


@given(
    st.lists(st.sampled_from(sorted(ODD)), min_size=1, max_size=4),
    st.integers(1, COUNT),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mixtures(names: list[str], count: int, rng: Any, runs: bool) -> None:
    """In runs, as layers have them, or at random."""
    if runs:
        leaves = [ODD[names[n * len(names) // count]]() for n in range(count)]
    else:
        leaves = [ODD[rng.choice(names)]() for _ in range(count)]
    check_found(leaves)


def test_what_it_tells_of_each_is_so() -> None:
    leaves: list[Any] = [make() for make in ODD.values()]
    plain = find_plain(leaves)
    kinds = [plain.kinds[number] for number in plain.kind_of.tolist()]
    assert len(kinds) > 5
    for leaf, kind, at in zip(plain.of(leaves), kinds, plain.addresses.tolist(), strict=True):
        assert at == leaf.data_ptr() and kind.flags == tensors.flags_of(leaf)
        assert kind.shape == tuple(leaf.shape) and kind.nbytes == leaf.nbytes


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
def test_odd_leaves_are_not_plain(odd: object) -> None:
    fine = [torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3).double()]
    assert list(find_plain([fine[0], odd, *fine[1:]]).leaves) == [0, 2, 3]
    assert list(find_plain([odd]).leaves) == []


def test_memory_that_was_freed_is_not_plain() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert list(find_plain([torch.ones(3), freed]).leaves) == [0]


def test_a_nested_tensor_does_not_end_the_process() -> None:
    """torch raises when it is asked for the shape of one."""
    state: dict[str, Any] = {str(n): torch.ones(3) for n in range(40)}
    state["7"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(tr.errors.UnsupportedLeafError) as caught:
        capture(state)
    assert caught.value.path == "['7']"
    assert 7 not in Destination(state).layout.plain.leaves
