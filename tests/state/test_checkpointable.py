"""Plain tensors that say which boxes of a larger one they have: torch's CheckpointableTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torchrelay as tr
from tests.support.checkpointable import (
    boxes_of,
    corners,
    has_its_boxes,
    marked,
    other_corners,
    rows,
    whole,
)
from tests.support.trips import chunk_of, trip
from torchrelay.describing.snapshot import capture
from torchrelay.errors import MismatchError, UnsupportedLeafError
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.state.checkpointable import ATTRIBUTES


def new(state: object) -> Any:
    """A state received without a destination, as its sender has it."""
    snapshot = capture(state)
    landing = land(snapshot.record, None, LandingOptions(shards="as_sent"))
    for index in range(len(snapshot.chunks)):
        landing.target().write(index, chunk_of(snapshot, index))
    return landing.commit().state


def test_the_attributes_are_those_of_torch() -> None:
    """The test that names the protocol when torch moves it."""
    protocol = getattr(dcp, "CheckpointableTensor", None)
    if protocol is None:
        pytest.skip("no such case: torch has CheckpointableTensor from 2.14 on")
    assert tuple(protocol.__annotations__) == ATTRIBUTES
    assert isinstance(rows(0, 3), protocol)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("make", [lambda: rows(3, 6), corners], ids=["one box", "two boxes"])
def test_a_box_is_filled_in_place(make: Any, atomic: bool) -> None:
    sent, into = make(), make()
    into.fill_(-2)
    for box in boxes_of(into):
        box.zero_()
    got = trip({"w": sent, "n": 1}, into={"w": into, "n": 0}, atomic=atomic, chunk_bytes=16)
    assert got.state["w"] is into and got.state["n"] == 1
    assert has_its_boxes(into)
    if into.shape != sent.shape or len(into.global_offsets) > 1:
        assert (into == -2).sum() == 4 * 7 - 12  # the padding is the caller's


def test_the_order_and_the_place_of_boxes_are_each_sides_own() -> None:
    into = marked(torch.zeros(6, 2), (6, 4), [(0, 0), (3, 2)], [(3, 0), (0, 0)], [(3, 2), (3, 2)])
    trip({"w": corners()}, into={"w": into})
    assert has_its_boxes(into)
    assert torch.equal(into[:3], whole()[3:, 2:])


def test_a_new_one_has_the_same_boxes() -> None:
    state = {
        "rows": rows(0, 3),
        "corners": corners(),
        "parameter": marked(torch.nn.Parameter(torch.ones(2)), (4,), [(2,)]),
        "none": marked(torch.zeros(0, 4), (6, 4), [], [], []),
        "scalar": marked(torch.tensor(7.0), (), [()], [()], [()]),
        "complex": marked(torch.ones(2, 2, dtype=torch.complex128), (2, 4), [(0, 2)]),
    }
    got = new(state)
    for name, sent in state.items():
        assert type(got[name]) is type(sent) and got[name].dtype == sent.dtype
        assert got[name].requires_grad == sent.requires_grad
        assert got[name].global_shape == sent.global_shape
        assert sorted(got[name].global_offsets) == sorted(sent.global_offsets)
        assert all(map(torch.equal, boxes_of(got[name]), boxes_of(sent)))
    with pytest.raises(MismatchError, match="CheckpointableTensor") as caught:
        trip({"w": rows(0, 3)})
    assert "as_sent" in str(caught.value) and caught.value.path == "['w']"


def test_what_does_not_fit() -> None:
    for sent, into, what in [
        (rows(0, 3), rows(3, 6), "local shards"),
        (rows(0, 3), torch.zeros(3, 4), "kind"),
        (torch.zeros(3, 4), rows(0, 3), "kind"),
        (rows(0, 3), marked(torch.zeros(3, 4), (9, 4), [(0, 0)]), "global shape"),
        (rows(0, 3), rows(0, 3).double(), "kind"),  # torch drops the attributes
        (rows(0, 3), marked(torch.zeros(3, 4, dtype=torch.half), (6, 4), [(0, 0)]), "dtype"),
        (corners(), other_corners(), "local shards"),
    ]:
        kept = into.clone()
        with pytest.raises(MismatchError, match=what) as caught:
            trip({"w": sent}, into={"w": into})
        assert caught.value.path == "['w']"
        assert torch.equal(into, kept)


_GOOD: dict[str, Any] = {
    "global_shape": (6, 4),
    "global_offsets": ((0, 0),),
    "local_offsets": ((0, 0),),
    "local_sizes": ((3, 4),),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"global_shape": None},
        {"global_shape": (6, 4.5)},
        {"global_shape": (6,)},
        {"global_shape": (6, -4)},
        {"global_offsets": None},
        {"global_offsets": (0, 0)},
        {"global_offsets": ((4, 0),)},
        {"global_offsets": ((-1, 0),)},
        {"global_offsets": ((1 << 70, 0),)},
        {"global_offsets": ()},
        {"local_offsets": ((1, 0),)},
        {"local_offsets": ((0,),)},
        {"local_sizes": ((3, 4), (3, 4))},
        {"local_sizes": ((4, 4),)},
        {"global_offsets": ((0, 0),) * 2, "local_offsets": ((0, 0),) * 2}
        | {"local_sizes": ((3, 4),) * 2},
    ],
    ids=str,
)
def test_attributes_that_contradict_each_other_are_refused_by_path(wrong: dict[str, Any]) -> None:
    bad: Any = torch.zeros(3, 4)
    for name, value in {**_GOOD, **wrong}.items():
        setattr(bad, name, value)
    for act in (
        lambda: capture({"deep": [{"w": bad}]}),
        lambda: trip({"deep": [{"w": rows(0, 3)}]}, into={"deep": [{"w": bad}]}),
    ):
        with pytest.raises(UnsupportedLeafError, match="CheckpointableTensor") as caught:
            act()
        assert caught.value.path == "['deep'][0]['w']"


def test_only_some_of_the_attributes_make_a_plain_tensor() -> None:
    for name in ATTRIBUTES:
        one: Any = rows(0, 3)
        delattr(one, name)
        got = trip({"w": one}).state["w"]
        assert torch.equal(got, one) and not hasattr(got, "global_shape")


def test_a_local_tensor_that_is_not_plain_is_refused_by_path() -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedLeafError, match="plain strided") as caught:
        capture({"w": marked(sparse, (6, 3), [(0, 0)])})
    assert caught.value.path == "['w']"


def test_tied_ones_stay_tied() -> None:
    memory = whole()[:3].clone()
    one, other = (marked(memory.view(3, 4), (6, 4), [(0, 0)]) for _ in range(2))
    assert one is not other
    got = new({"a": one, "b": other, "again": one})
    assert got["a"] is got["again"] and got["a"].data_ptr() == got["b"].data_ptr()
    assert got["a"].global_shape == got["b"].global_shape == (6, 4)


def test_an_optimizer_takes_them_in_place() -> None:
    """Its state has the very tensors, attributes and all."""

    def optimizer(fill: float) -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.full((3, 4), fill))
        made = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.grad = torch.full((3, 4), fill)
        made.step()
        marked(made.state[parameter]["momentum_buffer"], (6, 4), [(3, 0)])
        return made

    mine, theirs = optimizer(0.0), optimizer(2.0)
    (kept,) = (one["momentum_buffer"] for one in mine.state.values())
    trip({"o": theirs.state_dict()}, into={"o": mine})
    (buffer,) = (one["momentum_buffer"] for one in mine.state.values())
    assert type(buffer) is torch.Tensor and buffer.shape == (3, 4)
    assert torch.equal(buffer, torch.full((3, 4), 2.0))
    assert buffer.data_ptr() == kept.data_ptr() and buffer.global_shape == (6, 4)


def test_a_process_alone_saves_what_it_has_all_of(tmp_path: Any) -> None:
    halves = marked(torch.cat([whole()[3:], whole()[:3]]), (6, 4), [(3, 0), (0, 0)])
    halves.local_offsets, halves.local_sizes = ((0, 0), (3, 0)), ((3, 4), (3, 4))
    with tr.Checkpointer(tmp_path, no_dist=True) as steps:
        steps.save(1, {"w": halves})
        got = steps.load().state["w"]
        assert type(got) is torch.Tensor and torch.equal(got, whole())
        assert not hasattr(got, "global_shape")
        into = rows(2, 5, torch.zeros(6, 4))
        assert steps.load(into={"w": into}).state["w"] is into
        assert has_its_boxes(into)
        wide = corners(filled=False)
        steps.load(into={"w": wide})
        assert has_its_boxes(wide) and (wide == -1).sum() == 28 - 12
        with pytest.raises(UnsupportedLeafError, match="12 of the 24 elements") as caught:
            steps.save(2, {"w": rows(0, 3)})
        assert caught.value.path == "w"
        halves.global_offsets = ((0, 0), (3, 0))  # other boxes in the same memory
        steps.save(3, {"w": halves})
        assert torch.equal(steps.load(step=3).state["w"], halves)


def test_memory_that_moves_during_a_receive_is_noticed() -> None:
    snapshot = capture({"w": rows(0, 3)})
    into = rows(0, 3, torch.zeros(6, 4))
    landing = land(snapshot.record, {"w": into})
    for index in range(len(snapshot.chunks)):
        landing.target().write(index, chunk_of(snapshot, index))
    landing.commit()
    assert has_its_boxes(into)


def test_a_write_counts_for_autograd() -> None:
    into = rows(0, 3, torch.zeros(6, 4))
    before = into._version
    trip({"w": rows(0, 3)}, into={"w": into})
    assert into._version > before


def test_a_tensor_that_changes_while_it_is_sent_is_named() -> None:
    sent = corners()
    snapshot = capture({"w": sent})
    assert snapshot.changed() is None
    sent.add_(1)
    assert snapshot.changed() == "['w']"
