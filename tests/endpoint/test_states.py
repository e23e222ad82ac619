"""Every state comes through an endpoint as it was, and training resumes from it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchrelay as tr
from tests.endpoint.conftest import Stage
from tests.support import flat
from tests.support.fsdp_job import train
from tests.support.rounds import rounds
from tests.support.states import (
    STRIDED_DTYPES,
    Destination,
    assert_same,
    destinations,
    states,
    storage_of,
    strided,
    tensors_in,
)
from torchrelay.progress import Progress

_pull = partial(flat.pull, same_host=False)  # over TCP, though this is the same host
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
many = settings(
    max_examples=rounds(100),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@given(state=states())
@many
def test_new_tensors(stage: Stage, state: object) -> None:
    assert_same(state, stage.through(state), at_rest=True)


@given(data=st.data(), atomic=st.booleans())
@many
def test_in_place(stage: Stage, data: st.DataObject, atomic: bool) -> None:
    state = data.draw(states(in_place=True))
    made: Destination = data.draw(destinations(state))
    before = list(tensors_in(made.into))
    got = stage.through(state, into=made.into, atomic=atomic)
    assert got is made.into
    assert_same(state, got, in_place=True)
    made.check()
    assert all(one is other for one, other in zip(before, tensors_in(got), strict=True))


def test_each_dtype(stage: Stage) -> None:
    state = {
        str(dtype): strided(storage_of(24 * dtype.itemsize, 2), dtype, 0, (2, 3, 4), (12, 4, 1))
        for dtype in STRIDED_DTYPES
    }
    assert_same(state, stage.through(state), at_rest=True)


def test_memory_of_an_earlier_pull_shows_nothing_of_it(stage: Stage) -> None:
    """New tensors are in memory of tensors that are gone; those that are kept stay as they are."""
    numel, patterns = 600_000, ["a", "b"]
    first = stage.through({"a": torch.full((numel,), 1.0), "b": torch.full((numel,), 2.0)})
    kept, before = first["b"], first["a"].data_ptr()
    del first
    step = stage.show({"a": torch.arange(2.0 * numel)[::2], "b": torch.full((numel,), 3.0)})
    into = {"a": torch.zeros(numel), "b": torch.zeros(numel - 1)}
    with pytest.raises(tr.errors.MismatchError):
        _pull(stage.url, step=step, into=into, timeout=60)
    second = _pull(stage.url, step=step, include=patterns, timeout=60).state
    assert before in (second["a"].data_ptr(), second["b"].data_ptr())
    assert torch.equal(second["a"], torch.arange(2.0 * numel)[::2])
    assert bool((second["b"] == 3).all()) and bool((kept == 2).all())
    del second
    into = {"a": torch.zeros(numel), "b": torch.zeros(numel)}
    _pull(stage.url, step=step, into=into, timeout=60)  # staged in the same memory
    assert torch.equal(into["a"], torch.arange(2.0 * numel)[::2]) and bool((into["b"] == 3).all())
    assert bool((kept == 2).all())


def test_what_is_staged_may_change(stage: Stage) -> None:
    weight = torch.arange(300_000.0)
    before = weight.clone()
    published = stage.endpoint.publish({"weight": weight}, step=stage.show({}) + 1)
    weight.zero_()
    published.result(30)
    got = _pull(stage.url, step=published.step, timeout=30)
    assert torch.equal(got.state["weight"], before)


def _job(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "step": 0}


def test_a_trainer_publishes_while_it_trains_and_a_puller_trains_on(stage: Stage) -> None:
    trainer = _job(1)
    for _ in range(3):
        train(trainer, 2, features=8)
        step = stage.show(trainer)
    got = _pull(stage.url, step=step, into=_job(2), timeout=30)
    assert got.state["step"] == 6
    assert train(got.state, 5, features=8) == train(trainer, 5, features=8)


def test_a_destination_that_does_not_fit_stays_as_it_is(stage: Stage) -> None:
    step = stage.show({"a": torch.ones(3), "b": torch.ones(4)})
    into = {"a": torch.zeros(3), "b": torch.zeros(5)}
    with pytest.raises(tr.errors.MismatchError, match="shape"):
        _pull(stage.url, step=step, into=into, timeout=30)
    with pytest.raises(tr.errors.MismatchError, match="b"):
        _pull(stage.url, step=step, into={"a": into["a"]}, timeout=30)
    assert not into["a"].any() and not into["b"].any()
    got = _pull(stage.url, step=step, into={"a": into["a"]}, strict=False, timeout=30)
    assert got.report.unexpected_keys == ("['b']",)
    assert into["a"].all()


def test_only_some_paths(stage: Stage) -> None:
    step = stage.show({"model": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(4)}})
    got = _pull(stage.url, step=step, include="model.*", timeout=30)
    assert list(got.state) == ["model"]
    assert sum(got.report.sources.values()) < 4096


def test_a_newer_step_is_waited_for(stage: Stage) -> None:
    import threading

    step = stage.show({"a": torch.ones(3)})
    with pytest.raises(tr.errors.TransferTimeoutError, match=f"no step above {step}"):
        _pull(stage.url, newer_than=step, timeout=0.5)
    found: list[int] = []
    waiting = threading.Thread(
        target=lambda: found.append(_pull(stage.url, newer_than=step, timeout=30).step)
    )
    waiting.start()
    newer = stage.show({"a": torch.ones(3)})
    waiting.join(30)
    assert found == [newer]


def test_a_pull_sees_what_was_published_before_it(stage: Stage) -> None:
    """Though its digests are made meanwhile."""
    step = stage.show({}) + 1
    stage.endpoint.publish({"a": torch.ones(8_000_000)}, step=step)
    assert _pull(stage.url, include="a", timeout=30).step == step


def test_a_step_with_the_same_number_or_a_lower_one_is_the_newest() -> None:
    """A trainer that went back to an earlier step publishes on from there."""
    w = torch.zeros(4)
    with tr.serve({"w": w}, step=5, no_dist=True) as endpoint:
        for number, step in enumerate((5, 4, 4, 3, 6), start=1):
            endpoint.publish({"w": w.fill_(number)}, step=step).result(60)
            got = _pull(endpoint.url, timeout=60)
            assert got.step == step and got.state["w"][0] == number


def test_progress_and_report(stage: Stage) -> None:
    state = {"a": torch.ones(8_000_000)}
    step = stage.show(state)
    told: list[Progress] = []
    got = _pull(stage.url, step=step, into=state, progress=told.append, timeout=30)
    assert told[-1].done == told[-1].total == got.report.bytes == 32_000_000
    assert got.report.route == "http" and got.report.verified
    assert sum(got.report.sources.values()) >= 32_000_000
    assert set(got.report.seconds) == {"plan", "verify", "land", "commit"}


def test_a_subtree_and_patterns(stage: Stage) -> None:
    """`key` takes the state below a key; `include` takes paths of it, each where it is."""
    state = {
        "model": {"w": torch.ones(3), "layers": [torch.full((2,), 1.0), torch.full((2,), 2.0)]},
        "optimizer": {"m": torch.ones(4)},
        "step": 7,
    }
    step = stage.show(state)
    options: dict[str, Any] = {"step": step, "timeout": 30}
    assert_same(state["model"], _pull(stage.url, key="model", **options).state, at_rest=True)
    assert _pull(stage.url, key="step", **options).state == 7
    assert torch.equal(
        _pull(stage.url, key="model.layers.1", **options).state, torch.full((2,), 2.0)
    )
    got = _pull(stage.url, include="model", **options)
    assert list(got.state) == ["model"] and list(got.state["model"]) == ["w", "layers"]
    got = _pull(stage.url, key="model", include=["w"], **options)
    assert list(got.state) == ["w"]
    into = {"w": torch.zeros(3), "layers": [torch.zeros(2), torch.zeros(2)]}
    assert _pull(stage.url, key="model", into=into, **options).state is into
    assert into["w"].all() and into["layers"][1][0] == 2
    with pytest.raises(tr.errors.MismatchError, match="model, optimizer, step"):
        _pull(stage.url, key="nothing", **options)
    with pytest.raises(tr.errors.MismatchError, match="shape"):
        _pull(stage.url, key="model", into={**into, "w": torch.zeros(4)}, **options)


def test_the_names_in_an_error_are_complete(stage: Stage) -> None:
    names = [f"part{number:02}" for number in range(30)]
    step = stage.show({name: torch.ones(1) for name in names})
    for chosen in ({"include": "zzz"}, {"key": "zzz"}):
        with pytest.raises(tr.errors.MismatchError) as caught:
            _pull(stage.url, step=step, timeout=30, **chosen)
        assert all(name in str(caught.value) for name in names), caught.value
