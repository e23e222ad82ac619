"""Every state comes back from a checkpoint as it was: one process, every kind of leaf.

Files and planners are in `test_checkpointer_layout.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import torchrelay as tr
from tests.support.rounds import rounds
from tests.support.states import (
    STRIDED_DTYPES,
    Destination,
    Point,
    assert_same,
    bits,
    destinations,
    states,
    storage_of,
    strided,
    tensors_in,
)
from torchrelay.endpoint.publish import host_slots

# torch warns about quantized, sparse and complex32 tensors as such.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
many = settings(
    max_examples=rounds(200),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def shared() -> Iterator[tr.Checkpointer]:
    """One checkpointer for all examples of a test: each overwrites the step before."""
    with TemporaryDirectory(dir=MEMORY) as root, tr.Checkpointer(root, timeout=30) as made:
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


@given(data=st.data(), atomic=st.booleans(), verify=st.booleans())
@many
def test_in_place(shared: tr.Checkpointer, data: st.DataObject, atomic: bool, verify: bool) -> None:
    state = data.draw(states(in_place=True))
    made: Destination = data.draw(destinations(state))
    before = list(tensors_in(made.into))
    homes = [x.data_ptr() if x.layout is torch.strided else 0 for x in before]
    got = kept(shared, state, into=made.into, atomic=atomic, verify=verify)
    assert got is made.into
    assert_same(state, got, in_place=True)
    made.check()
    after = list(tensors_in(got))
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert homes == [x.data_ptr() if x.layout is torch.strided else 0 for x in after]


@given(state=states(in_place=True))
@many
def test_into_a_state_of_the_same_make(shared: tr.Checkpointer, state: object) -> None:
    """The destination has the ties and overlaps of what was saved, and keeps them."""
    twin = kept(shared, state)
    for tensor in tensors_in(twin):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype is not torch.bool:
            storage = tensor.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_xor_(1)
    got = shared.load(into=twin, step=0).state
    assert_same(state, got, at_rest=True)


@given(state=states())
@settings(many, max_examples=rounds(25, 2))
def test_asynchronously(shared: tr.Checkpointer, state: object) -> None:
    """The writer process writes what was there when `save_async` returned."""
    expected = kept(shared, state)
    pending = shared.save_async(1, state, overwrite=True)
    for tensor in tensors_in(state):
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.dtype is not torch.bool:
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()
    pending.result(30)
    assert_same(expected, shared.load(step=1).state)


@pytest.mark.parametrize("dtype", STRIDED_DTYPES, ids=str)
def test_each_dtype(shared: tr.Checkpointer, dtype: torch.dtype) -> None:
    storage = storage_of(24 * dtype.itemsize, 1)
    state = {
        "dense": strided(storage_of(24 * dtype.itemsize, 2), dtype, 0, (2, 3, 4), (12, 4, 1)),
        "turned": strided(storage, dtype, 0, (4, 6), (1, 4)),
        "stepped": strided(storage, dtype, 1, (5,), (3,)),
        "parameter": nn.Parameter(
            strided(storage_of(64, 3), dtype, 1, (2,), (1,)), requires_grad=False
        ),
        "scalar": strided(storage_of(16, 5), dtype, 0, (), ()),
        "none": strided(storage_of(16, 4), dtype, 0, (0, 3), (3, 1)),
    }
    assert_same(state, kept(shared, state), at_rest=True)
    again = {key: torch.empty(value.shape, dtype=dtype) for key, value in state.items()}
    assert_same(state, shared.load(into=again, step=0).state, in_place=True)


def test_an_array_beside_a_tensor_over_the_same_memory(there: tr.Checkpointer) -> None:
    base = np.arange(12, dtype=np.uint8)
    state = {"tensor": torch.from_numpy(base), "part": base[5:9], "whole": base, "twice": base}
    got = kept(there, state)
    assert all(np.array_equal(np.asarray(got[key]), np.asarray(state[key])) for key in state)


# Small states, and many tensors.


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        None,
        7,
        {"epoch": 3, "text": "ü", "big": 1 << 90, "nan": math.nan},
        {"nothing": torch.empty(0, 4), "meta": torch.empty(3, device="meta")},
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(6).reshape(2, 3),
        [torch.ones(2), {"deep": (torch.zeros(()), None)}],
        {"": torch.ones(1), ".": torch.ones(2), "a.b": torch.ones(3), "a": {"b": torch.ones(4)}},
        {1: torch.ones(1), "1": torch.ones(2), (1, 2): torch.ones(3), None: torch.ones(4)},
        {"\ud800": torch.ones(1), "\\ud800": torch.ones(2), "é/\n": {"\x00": torch.ones(3)}},
    ],
    ids=lambda state: ascii(state)[:40],
)
def test_a_small_state(there: tr.Checkpointer, state: object) -> None:
    assert_same(state, kept(there, state), at_rest=True)
    there.verify(0)


def test_thousands_of_small_tensors(there: tr.Checkpointer) -> None:
    torch.manual_seed(0)
    state = {f"layer.{n}": {"w": torch.randn(n % 7, 3), "n": n} for n in range(3000)}
    got = kept(there, state)
    assert_same(state, got, at_rest=True)
    for tensor in tensors_in(got):
        tensor.zero_()
    assert_same(state, there.load(into=got).state, in_place=True)


def test_gaps_between_views_are_not_written(there: tr.Checkpointer, tmp_path: Path) -> None:
    secret = torch.full((4096,), 0x5A, dtype=torch.uint8)
    views = {"a": secret[0:40:8], "b": secret[4:44:8], "c": secret[0:20:4]}
    for value in views.values():
        value.zero_()
    there.save(0, views)
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"ZZZ" not in file.read_bytes()


# Saves that follow one another: plans are remembered from one to the next.


def test_each_save_has_its_own_values_and_shapes(there: tr.Checkpointer) -> None:
    made: list[Any] = []
    shapes = [(3, 4), (3, 4), (4, 3), (3, 4), (2,), (2,)]
    for step, shape in enumerate(shapes):
        made.append({"w": torch.full(shape, float(step)), "inner": {"n": torch.tensor(step)}})
        if step % 2:
            there.save_async(step, made[step]).result(30)
        else:
            there.save(step, made[step])
    made.append({"w": made[-1]["w"].half(), "inner.n": torch.tensor(99)})
    there.save(len(shapes), made[-1])
    made.append({"w": {"inner": {"n": torch.ones(2)}}})
    there.save(len(shapes) + 1, made[-1])
    for step, state in enumerate(made):
        assert_same(state, there.load(step=step).state)


def test_a_saved_state_is_not_kept_alive(there: tr.Checkpointer) -> None:
    import gc
    import weakref

    state = {"w": torch.ones(3)}
    held = weakref.ref(state["w"].untyped_storage())
    there.save(0, state)
    there.save_async(1, state).result(30)
    storage = weakref.ref(state["w"])
    del state
    gc.collect()
    assert storage() is None
    assert held() is None


# Staging.


def test_a_share_larger_than_the_budget(tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = {
        "model": {f"w{n}": torch.randint(0, 255, (1 << 20,), dtype=torch.uint8) for n in range(30)},
        "turned": torch.randn(1000, 2500).t(),
        "wide": torch.randn(2_000_003, dtype=torch.float64),
        "small": [torch.tensor(n) for n in range(50)],
    }
    with tr.Checkpointer(
        tmp_path, timeout=60, options=tr.options.CheckpointerOptions(memory_budget=16 << 20)
    ) as there:
        there.save(0, state)
        pending = there.save_async(1, state)
        expected = there.load(step=0).state
        pending.result(60)
        assert_same(expected, there.load(step=1).state)
        for file in sorted((tmp_path / "step-0").glob("*.safetensors")):
            assert file.read_bytes() == (tmp_path / "step-1" / file.name).read_bytes()
    assert_same(state, expected)


def test_a_change_right_after_save_async(there: tr.Checkpointer) -> None:
    weights = torch.arange(1 << 20, dtype=torch.float32)
    state = {"w": weights, "turned": weights.view(1024, 1024).t(), "step": [1]}
    expected = {key: value.clone() for key, value in state.items() if key != "step"}
    for step in range(5):
        pending = there.save_async(step, state)
        weights.fill_(-1)
        state["step"][0] = step + 10
        pending.result(30)
        got = there.load(step=step).state
        assert bits(got["w"]) == bits(expected["w"])
        assert bits(got["turned"]) == bits(expected["turned"])
        assert got["step"] == [1]
        weights.copy_(expected["w"])
        state["step"][0] = 1


def test_a_state_that_is_trained_on_while_it_is_copied_is_an_error(
    there: tr.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"w": torch.zeros(1 << 20)}, "step": 1}
    weights = state["model"]["w"]  # type: ignore[index]

    def train(*_: object) -> None:
        weights.add_(1)

    with pytest.raises(tr.errors.CheckpointError, match=r"changed while it was saved.*at model.w"):
        there.save(1, state, progress=train)
    assert there.steps() == []
    there.save(1, state)

    def copy(*args: Any, **options: Any) -> None:
        stage(*args, **options)
        train()

    stage = host_slots.stage
    with tr.serve(state, step=1, no_dist=True, timeout=30) as endpoint:
        monkeypatch.setattr(host_slots, "stage", copy)
        with pytest.raises(
            tr.errors.CheckpointError, match=r"changed while it was saved.*at model.w"
        ):
            endpoint.publish(state, step=2)
        monkeypatch.undo()
        endpoint.publish(state, step=3).result(30)
        got = tr.pull(endpoint.url, timeout=30)
    assert got.step == 3 and torch.equal(got.state["model"]["w"], weights)


# Loading into what is there.


def example() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)},
        "list": [torch.tensor([1, 2]), np.arange(3)],
        "epoch": 4,
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(2, 3), "b": nn.Parameter(torch.zeros(3))},
        "list": [torch.tensor([0, 0]), np.zeros(3, dtype=np.int64)],
        "epoch": 0,
    }


def test_parameters_are_filled_and_stay(there: tr.Checkpointer) -> None:
    into = blank()
    kept_objects = into["model"]["w"], into["model"]["b"], into["list"][1]
    got = kept(there, example(), into=into)
    assert got is into and got["epoch"] == 4
    assert into["model"]["w"] is kept_objects[0] and into["model"]["b"] is kept_objects[1]
    assert into["list"][1] is kept_objects[2] and into["list"][1].tolist() == [0, 1, 2]
    assert isinstance(into["model"]["b"], nn.Parameter) and into["model"]["b"].requires_grad
    assert torch.equal(into["model"]["w"], example()["model"]["w"])


def _put(state: Any, path: tuple[Any, ...], value: object) -> Any:
    *way, last = path
    inner = state
    for key in way:
        inner = inner[key]
    inner[last] = value
    return state


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("model", "w"), torch.zeros(2, 3, dtype=torch.float64), "dtype"),
        (("model", "w"), torch.zeros(2, 3, dtype=torch.int32), "dtype"),
        (("model", "w"), torch.zeros(3, 2), "shape"),
        (("model", "w"), torch.zeros(6), "shape"),
        (("model", "w"), torch.zeros(2, 3).to_sparse(), "kind"),
        (("model", "w"), torch.zeros(2, 3, device="meta"), "meta"),
        (("model", "w"), torch.zeros(1, 3).expand(2, 3), "overlapping"),
        (("model", "w"), np.zeros((2, 3), np.float32), "kind"),
        (("model", "w"), None, "kind"),
        (("model", "b"), 1.0, "kind"),
        (("list", 0), np.zeros(2, np.int64), "kind"),
        (("list", 1), torch.zeros(3, dtype=torch.int64), "kind"),
        (("list", 1), np.zeros(3, np.int32), "dtype"),
        (("epoch",), torch.tensor(4), "kind"),
        (("model", "new"), torch.zeros(1), "not offered"),
        (("other",), 1, "not offered"),
    ],
    ids=lambda value: ascii(value)[:30].replace("\n", " "),
)
def test_what_does_not_fit(
    there: tr.Checkpointer, path: tuple[Any, ...], value: object, what: str, atomic: bool
) -> None:
    there.save(0, example())
    into = _put(blank(), path, value)
    with pytest.raises(tr.errors.MismatchError, match=what) as caught:
        there.load(into=into, step=0, atomic=atomic)
    assert caught.value.path == "".join(f"[{key!r}]" for key in path)
    assert_same(_put(blank(), path, value), into, in_place=True)


def test_what_is_missing(there: tr.Checkpointer) -> None:
    there.save(0, example())
    into = blank()
    del into["model"]["b"]
    with pytest.raises(tr.errors.MismatchError, match="not in the destination") as caught:
        there.load(into=into)
    assert caught.value.path == "['model']['b']"
    assert into["model"]["w"].count_nonzero() == 0 and into["epoch"] == 0


def test_not_strict(there: tr.Checkpointer) -> None:
    there.save(0, example())
    into = blank()
    del into["model"]["b"]
    into["mine"] = torch.full((2,), 5.0)
    loaded = there.load(into=into, strict=False)
    assert loaded.report.unexpected_keys == ("['model']['b']",)
    assert loaded.report.missing_keys == ("['mine']",)
    assert torch.equal(into["model"]["w"], example()["model"]["w"])
    assert into["mine"].tolist() == [5, 5] and "b" not in into["model"]


def test_one_memory_cannot_take_two_tensors(there: tr.Checkpointer) -> None:
    there.save(0, {"a": torch.zeros(4), "b": torch.ones(4)})
    memory = torch.full((6,), 7.0)
    with pytest.raises(tr.errors.MismatchError, match="shares memory"):
        there.load(into={"a": memory[:4], "b": memory[2:]})
    assert memory.tolist() == [7] * 6


def test_tied_weights(there: tr.Checkpointer) -> None:
    weight = torch.randn(3, 4)
    state = {"in": weight, "out": weight, "turned": weight.t(), "alias": weight.detach()}
    got = kept(there, state)
    assert got["in"] is got["out"]
    assert got["turned"].data_ptr() == got["alias"].data_ptr() == got["in"].data_ptr()
    assert sum(file.nbytes for file in there.record(0).volumes) < 2 * weight.nbytes + 600
    apart = {key: torch.zeros_like(value) for key, value in state.items()}
    assert_same(state, there.load(into=apart).state, in_place=True)


def test_a_tied_tensor_to_places_of_different_kinds(there: tr.Checkpointer) -> None:
    """One stored tensor, wanted plain, conjugated and new."""
    weight = torch.randn(3, dtype=torch.complex64)
    state = {"a": weight, "b": weight.conj(), "c": weight.detach()}
    into = {
        "a": torch.zeros(3, dtype=torch.complex64),
        "b": torch.zeros(6, dtype=torch.complex64)[::2],
        "c": torch.zeros(3, dtype=torch.complex64).conj(),
    }
    assert_same(state, kept(there, state, into=into), in_place=True)


def test_autograd_sees_the_write(there: tr.Checkpointer) -> None:
    there.save(0, {"w": torch.zeros(3), "c": torch.zeros(3, dtype=torch.complex64).conj()})
    for key, into in [
        ("w", torch.ones(3, requires_grad=True)),
        ("c", torch.ones(3, dtype=torch.complex64, requires_grad=True)),
    ]:
        out = (into * into).sum().abs()
        there.load(into={key: into}, include=key)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_only(there: tr.Checkpointer) -> None:
    there.save(0, example())
    assert_same({"model": {"w": example()["model"]["w"]}}, there.load(include="model.w").state)
    got = there.load(include=["model.*", "list.0"]).state
    assert set(got) == {"model", "list"} and got["list"][1] is None
    with pytest.raises(tr.errors.MismatchError, match="matches nothing"):
        there.load(include="nothing*")
    assert_same({"model": example()["model"]}, there.load(include="model").state)
    into = blank()
    there.load(into=into, include="*.w")
    assert into["epoch"] == 0 and into["model"]["b"].count_nonzero() == 0
    assert torch.equal(into["model"]["w"], example()["model"]["w"])
    part = {"model": {"w": torch.zeros(2, 3)}}
    there.load(into=part, include="model.w")
    assert torch.equal(part["model"]["w"], example()["model"]["w"])


def test_device(there: tr.Checkpointer) -> None:
    got = kept(there, example(), device="cpu")
    assert_same(example(), got)
    if not torch.cuda.is_available():
        with pytest.raises(tr.errors.MismatchError, match="cuda"):
            there.load(device="cuda")


def test_registered_types_in_place(there: tr.Checkpointer) -> None:
    into = Point(torch.zeros(2), (0, torch.zeros(1)))
    tensor = into.x
    got = kept(there, Point(torch.ones(2), (3, torch.ones(1))), into=into)
    assert got.x is tensor and tensor.tolist() == [1, 1] and got.y[0] == 3


# Objects.


class Position:
    """Of a data loader: plain values that change their number."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(10, 6), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False)
    )


def job(seed: int) -> dict[str, Any]:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1), amsgrad=True)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 + seed),
        "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**seed),
        "position": Position(),
        "epoch": seed,
    }


def train(state: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        out = state["model"](torch.randint(0, 10, (4,)))
        loss = out.square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_job_goes_on_where_it_was(there: tr.Checkpointer, steps_before: int) -> None:
    """Into a job of another seed: new (its optimizer has no state yet), or already under way."""
    first, other = job(1), job(2)
    train(first, 3)
    train(other, steps_before)
    first["position"].seen = {"file": 3, "shuffled": torch.randperm(5), "rest": [1, 2]}
    if steps_before:
        other["position"].seen = {"file": 1}
    there.save(3, first)
    parameters = list(other["model"].parameters())
    places = [parameter.data_ptr() for parameter in parameters]
    loaded = there.load(into=other)
    assert loaded.state is other and loaded.report.unexpected_keys == ()
    assert all(a is b for a, b in zip(parameters, other["model"].parameters(), strict=True))
    assert places == [parameter.data_ptr() for parameter in parameters]
    assert_same(plain(first), plain(other), in_place=True)
    assert other["epoch"] == 1
    assert train(first, 3) == train(other, 3)


def test_a_state_that_is_itself_a_module(there: tr.Checkpointer) -> None:
    first, other = network(1), network(2)
    there.save(0, first)
    assert there.load(into=other).state is other
    assert_same(first.state_dict(), other.state_dict(), in_place=True)
    assert_same(first.state_dict(), there.load().state, in_place=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_module_with_tied_weights(there: tr.Checkpointer) -> None:
    first, other = Tied(), Tied()
    there.save(0, {"model": first})
    there.load(into={"model": other})
    assert other.head.weight is other.embed.weight
    assert torch.equal(first.embed.weight, other.embed.weight)


@pytest.mark.parametrize("root", [True, False])
def test_a_module_of_another_make(there: tr.Checkpointer, root: bool) -> None:
    """A module takes no more and no less than it has, and is left alone otherwise."""

    def state(module: nn.Module) -> Any:
        return module if root else {"model": module}

    there.save(0, state(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    there.save(1, state(nn.Sequential(nn.Linear(2, 2))))
    smaller = nn.Sequential(nn.Linear(2, 2))
    larger = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for step, into, name in [(0, smaller, "1.weight"), (1, larger, "1.weight")]:
        before = {key: value.clone() for key, value in into.state_dict().items()}
        with pytest.raises(tr.errors.MismatchError) as caught:
            there.load(into=state(into), step=step)
        assert caught.value.path == ("" if root else "['model']") + f"['{name}']"
        assert_same(before, dict(into.state_dict()), in_place=True)
        report = there.load(into=state(into), step=step, strict=False).report
        assert len(report.unexpected_keys if into is smaller else report.missing_keys) == 2
        stored = there.load(step=step).state
        stored = stored if root else stored["model"]
        assert torch.equal(into[0].weight, stored["0.weight"])
    assert torch.equal(larger[1].weight, before["1.weight"])


def test_only_some_of_the_objects(there: tr.Checkpointer) -> None:
    first, other = job(1), job(2)
    train(first, 2)
    there.save(0, first)
    there.load(into=other, include="model.*")
    assert_same(first["model"].state_dict(), other["model"].state_dict(), in_place=True)
    assert other["optimizer"].state_dict()["state"] == {}
    assert other["optimizer"].param_groups[0]["lr"] == pytest.approx(0.3)
    assert other["epoch"] == 2
    with pytest.raises(tr.errors.MismatchError, match="all of its state or none"):
        there.load(into=other, include=["optimizer.param_groups.*"])
    there.load(into=other, include=["optimizer.*", "scheduler.*", "epoch"])
    assert_same(first["optimizer"].state_dict(), other["optimizer"].state_dict(), in_place=True)
    assert other["epoch"] == 1


def test_tensors_saved_apart_load_into_tied_ones_if_they_are_equal(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    with tr.Checkpointer(tmp_path) as held:
        held.save(1, {"a": weight, "b": weight.clone()})
        held.save(2, {"a": weight, "b": weight + 1})
        mine = torch.zeros(4, 4)
        tied = {"a": mine, "b": mine.view(4, 4)}
        with pytest.raises(
            tr.errors.MismatchError, match=r"saved with another value than a: .*\['b'\]"
        ):
            held.load(tied, step=2)
        assert not mine.any()
        held.load(tied, step=1)
    assert torch.equal(mine, weight)
