"""A tensor whose storage does not hold all of it is never read and never written to, and a zero
tensor of forward-mode AD, whose storage has no address, is sent as zeros: whichever way it goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

import torchrelay as tr
from tests.support.trips import trip
from torchrelay.checkpointer.export import export_hf
from torchrelay.dcp import Reader, Writer
from torchrelay.describing.snapshot import capture
from torchrelay.dropin import _torch_records, _torch_wire
from torchrelay.endpoint.encoding import Encoding
from torchrelay.errors import MismatchError, RelayError, UnsupportedLeafError
from torchrelay.weights import MappedDestination, ParameterRule, WeightMapping

TIMEOUT = 20.0
FEW, MANY = 10, 1000  # as many are looked at in blocks


def shrunk(shape: tuple[int, ...] = (4,)) -> torch.Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(8)
    return tensor


def shrunk_view() -> torch.Tensor:
    tensor = torch.ones(6)[2:]
    tensor.untyped_storage().resize_(20)  # enough for four, and not for those behind two others
    return tensor


def transposed() -> torch.Tensor:
    tensor = torch.ones(2, 2).t()
    tensor.untyped_storage().resize_(8)
    return tensor


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "shrunk": shrunk,
    "view": shrunk_view,
    "transposed": transposed,
    "parameter": lambda: torch.nn.Parameter(shrunk()),
    "zero": lambda: torch._efficientzerotensor((4,)),
    "zero view": lambda: torch._efficientzerotensor((6,))[2:],
}
SHRUNK = [name for name in MAKERS if not name.startswith("zero")]
ZEROS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch._efficientzerotensor((3,)),
    "view": lambda: torch._efficientzerotensor((3,))[1:],
    "transposed": lambda: torch._efficientzerotensor((2, 3)).t(),
    "expanded": lambda: torch._efficientzerotensor((3,)).expand(2, 3),
    "negated": lambda: torch._neg_view(torch._efficientzerotensor((3,))),
    "conjugated": lambda: torch._efficientzerotensor((3,), dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch._efficientzerotensor((3,))),
    "half": lambda: torch._efficientzerotensor((3,), dtype=torch.bfloat16),
    "scalar": lambda: torch._efficientzerotensor(()),
    "empty": lambda: torch._efficientzerotensor((0, 2)),
}


def among(count: int, odd: torch.Tensor) -> dict[str, Any]:
    state: dict[str, Any] = {f"t{n}": torch.ones_like(odd, device="cpu") for n in range(count)}
    state[f"t{count // 2}"] = odd
    return state


class Holder:
    """An object that takes its state by copying it into its own tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["t"])


def save(state: Any, tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True) as places:
        places.save(1, state)


def published(state: Any, tmp_path: Path, **how: Any) -> None:
    with tr.serve(state, step=1, no_dist=True, **how):
        pass


SENDS: dict[str, Callable[[Any, Path], None]] = {
    "capture": lambda state, path: capture(state) and None,
    "save": save,
    "publish": published,
    "publish as bfloat16": lambda state, path: published(
        state, path, encoding=Encoding(torch.bfloat16)
    ),
    "torch's records": lambda state, path: (
        _torch_records._prepare_state_dict(state, torch.device("cpu")) and None
    ),
    "dcp": lambda state, path: dcp.save(state, storage_writer=Writer(path), no_dist=True),
    "object": lambda state, path: (
        capture({k: Holder(v) for k, v in state.items()}, objects=True) and None
    ),
}


@pytest.mark.parametrize(
    ("how", "count"), [("capture", 1), ("capture", MANY), *((how, FEW) for how in SENDS)]
)
@pytest.mark.parametrize("kind", SHRUNK)
def test_a_storage_that_is_too_small_is_not_read(
    kind: str, how: str, count: int, tmp_path: Path
) -> None:
    state = among(count, MAKERS[kind]())
    with pytest.raises((RelayError, CheckpointException)) as caught:
        SENDS[how](state, tmp_path)
    text = str(caught.value)
    assert f"t{count // 2}" in text and "made smaller" in text


def received(state: dict[str, Any], into: dict[str, Any], tmp_path: Path) -> None:
    trip(state, into=into)


def loaded(state: dict[str, Any], into: dict[str, Any], tmp_path: Path) -> None:
    save(state, tmp_path)
    with tr.Checkpointer(tmp_path, no_dist=True) as places:
        places.load(into)


def pulled(state: dict[str, Any], into: dict[str, Any], tmp_path: Path) -> None:
    with tr.serve(state, step=1, no_dist=True) as endpoint:
        tr.pull(endpoint.url, into=into, timeout=TIMEOUT)


def subscribed(state: dict[str, Any], into: dict[str, Any], tmp_path: Path) -> None:
    with tr.serve(state, step=1, no_dist=True) as endpoint:
        with tr.subscribe(endpoint.url, into=into) as follower:
            follower.update(timeout=TIMEOUT)


def by_dcp(state: dict[str, Any], into: dict[str, Any], tmp_path: Path) -> None:
    dcp.save(state, storage_writer=Writer(tmp_path), no_dist=True)
    dcp.load(into, storage_reader=Reader(tmp_path), no_dist=True)


def mapped(state: dict[str, Any], into: dict[str, Any], tmp_path: Path) -> None:
    trip(state, into=MappedDestination(into, WeightMapping((ParameterRule("**"),))))


def given(state: dict[str, Any], into: dict[str, Any], tmp_path: Path) -> None:
    holders = {name: Holder(one) for name, one in into.items()}
    sent = {name: Holder(one) for name, one in state.items()}
    save(sent, tmp_path)
    with tr.Checkpointer(tmp_path, no_dist=True) as places:
        places.load(holders)


RECEIVES = {
    one.__name__: one for one in (received, loaded, pulled, subscribed, by_dcp, mapped, given)
}


@pytest.mark.parametrize(
    ("how", "count"), [("received", 1), ("received", MANY), *((how, FEW) for how in RECEIVES)]
)
@pytest.mark.parametrize("kind", MAKERS)
def test_memory_that_is_not_there_is_not_written(
    kind: str, how: str, count: int, tmp_path: Path
) -> None:
    odd = MAKERS[kind]()
    into = among(count, odd)
    state = {name: torch.full(tuple(one.shape), 7.0) for name, one in into.items()}
    with pytest.raises((RelayError, CheckpointException)) as caught:
        RECEIVES[how](state, into, tmp_path)
    text = str(caught.value)
    assert f"t{count // 2}" in text
    assert "made smaller" in text or "no memory" in text
    assert all(bool((one == 1).all()) for one in into.values() if one is not odd)


@pytest.mark.parametrize("kind", MAKERS)
def test_torchs_protocol_refuses_a_destination_without_memory(kind: str) -> None:
    odd = MAKERS[kind]()
    sent, _ = _torch_records._prepare_state_dict({"w": torch.ones(odd.shape)}, odd.device)
    (record,) = sent.non_tensor_leaves
    with pytest.raises(MismatchError, match="cannot be written") as caught:
        _torch_wire._target((), record, odd)
    assert caught.value.path is not None


@pytest.mark.parametrize("count", [1, FEW])
@pytest.mark.parametrize("kind", ZEROS)
def test_a_zero_tensor_is_sent_as_zeros(kind: str, count: int, tmp_path: Path) -> None:
    zero = ZEROS[kind]()
    state, name = among(count, zero), f"t{count // 2}"
    live: Any = trip(state).state
    save(state, tmp_path)
    with tr.Checkpointer(tmp_path, no_dist=True) as places:
        kept = places.load().state
    with tr.serve(state, step=1, no_dist=True) as endpoint:
        pulled = tr.pull(endpoint.url, timeout=TIMEOUT).state
    into = {key: torch.full(tuple(one.shape), 7, dtype=one.dtype) for key, one in state.items()}
    filled: Any = trip(state, into=into).state
    for found in (live, kept, pulled, filled):
        one = found[name]
        assert not one._is_zerotensor() and (one.shape, one.dtype) == (zero.shape, zero.dtype)
        assert not one.resolve_conj().resolve_neg().to(torch.complex128).abs().any()
        assert type(one) is type(zero) or found is filled


@pytest.mark.parametrize("way", ["dcp", "torch's records", "publish as bfloat16", "export"])
def test_a_zero_tensor_is_kept_as_zeros_by_other_ways(way: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(3), "z": torch._efficientzerotensor((3,))}
    if way == "dcp":
        dcp.save(state, storage_writer=Writer(tmp_path), no_dist=True)
        got = {"a": torch.zeros(3), "z": torch.ones(3)}
        dcp.load(got, storage_reader=Reader(tmp_path), no_dist=True)
    elif way == "torch's records":
        _, sent = _torch_records._prepare_state_dict(state, torch.device("cpu"))
        got = {"z": sent[1].view(torch.float32)}
    elif way == "export":
        export_hf(state, tmp_path / "model", TIMEOUT)
        got = load_file(tmp_path / "model" / "model.safetensors")
    else:
        with tr.serve(state, step=1, no_dist=True, encoding=Encoding(torch.bfloat16)) as endpoint:
            got = tr.pull(endpoint.url, timeout=TIMEOUT).state
    assert got["z"].shape == (3,) and not got["z"].any()


def test_a_functional_tensor_is_refused_by_path() -> None:
    plain = torch.ones(3)

    def refused(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedLeafError) as caught:
            capture({"a": plain, "w": tensor})
        assert caught.value.path == "['w']"
        with pytest.raises(MismatchError) as other:
            trip({"w": plain}, into={"w": tensor})
        assert other.value.path == "['w']"
        return tensor

    torch.func.functionalize(refused)(torch.ones(3))
    torch.func.grad(lambda tensor: refused(tensor).sum())(torch.ones(3))
    torch.vmap(refused)(torch.ones(2, 3))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    refused(fake)
