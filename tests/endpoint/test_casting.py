"""States published in another dtype: the bits of `tensor.to(dtype)`, and all else as it was."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import torchrelay as tr
from tests.support import flat
from tests.support.fsdp_job import fsdp_job, train, whole
from tests.support.ranks import RankPool
from torchrelay.errors import UnsupportedLeafError, UsageError
from torchrelay.shares import casting
from torchrelay.weights import Encoding

Tensor = torch.Tensor


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.element_size()]
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return False
    bits = [x.resolve_neg().contiguous().view(raw) for x in (found, wanted)]
    return torch.equal(*bits)


def published(state: object, dtype: torch.dtype, **options: Any) -> Any:
    with tr.serve(state, step=1, encoding=Encoding(dtype=dtype), timeout=60) as endpoint:
        return flat.pull(endpoint.url, timeout=60, **options).state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("same_host", [True, False])
def test_floating_tensors_have_the_bits_of_a_cast(dtype: torch.dtype, same_host: bool) -> None:
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, 3.4e38, 1 + 2**-8, 65520.0])
    base = random(40, 30)
    flat = random(100)
    state = {
        "odd": odd,
        "double": random(33, dtype=torch.float64),
        "half": random(7, 3, dtype=torch.float16),
        "brain": random(9, dtype=torch.bfloat16),
        "scalar": random(1)[0],
        "empty": torch.empty(0, 3),
        "turned": base.t(),
        "sliced": random(20, 20)[3:11, ::3],
        "last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "wide": random(5, 1).expand(5, 4),
        "low": flat[:40],
        "high": flat[60:],
        "parameter": torch.nn.Parameter(random(6)),
        "negative": torch.complex(random(4), random(4)).conj().imag,
    }
    kept = {
        "whole": torch.arange(12),
        "flags": torch.tensor([True, False]),
        "complex": torch.complex(random(3), random(3)),
        "number": 1.5,
        "array": odd.numpy().copy(),
        "text": "as it is",
    }
    found = published({**state, **kept}, dtype, same_host=same_host)
    for name, tensor in state.items():
        assert same_bits(found[name].detach(), tensor.detach().to(dtype)), name
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert found["last"].is_contiguous(memory_format=torch.channels_last)
    for name in ("whole", "flags", "complex"):
        assert found[name].dtype is kept[name].dtype  # type: ignore[attr-defined]
        assert torch.equal(found[name], kept[name])  # type: ignore[arg-type]
    assert (found["number"], found["text"]) == (1.5, "as it is")
    assert found["array"].dtype == odd.numpy().dtype


def test_tied_tensors_stay_tied() -> None:
    weight = random(64, 8)
    found = published({"a": weight, "b": weight, "c": random(64, 8, seed=1)}, torch.bfloat16)
    assert found["a"].data_ptr() == found["b"].data_ptr()
    assert same_bits(found["b"], weight.to(torch.bfloat16))


def test_tensors_of_many_pieces_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrelay.memory import staging

    monkeypatch.setattr(staging, "PIECE", 4096)  # rows are cut anywhere
    monkeypatch.setattr(staging, "LARGE_PIECE", 4096)
    state = {"a": random(513, 77).t(), "b": random(100, 100), "c": random(3)}
    found = published(state, torch.bfloat16)
    for name, tensor in state.items():
        assert same_bits(found[name], tensor.to(torch.bfloat16)), name


def test_modules_are_cast_and_loaded_into_modules_of_that_dtype() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32))
    into = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32)).bfloat16()
    published({"model": model}, torch.bfloat16, into={"model": into})
    for name, tensor in model.state_dict().items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(into.state_dict()[name], wanted), name


def test_a_destination_of_the_old_dtype_is_refused_and_unchanged() -> None:
    into = {"w": torch.zeros(5)}
    with pytest.raises(tr.errors.RelayError, match="bfloat16"):
        published({"w": random(5)}, torch.bfloat16, into=into)
    assert not into["w"].any()


def test_later_steps_are_cast_too_and_changes_are_those_of_the_cast() -> None:
    weight = random(1000)
    into = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    with (
        tr.serve({"w": weight}, step=1, encoding=Encoding(dtype=torch.bfloat16)) as endpoint,
        tr.subscribe(endpoint.url, into=into, same_host=False, timeout=60) as subscription,
    ):
        subscription.update()
        before = weight.bfloat16()
        weight *= 1 + 1e-4  # most elements stay the same when they are rounded
        endpoint.publish({"w": weight}, step=2).result(60)
        found = tr.pull(endpoint.url, timeout=60).state["w"]
        assert same_bits(found, weight.bfloat16())
        differing = int((before != weight.bfloat16()).sum())
        assert 0 < differing < 200
        subscription.update(at_least=2)  # waits until the changes have been found
        assert same_bits(into["w"], weight.bfloat16())
        [changes] = endpoint.status()["changes"]["steps"]
        assert changes["changed"] == differing
        assert changes["elements"] < 1000 + 200  # elements of two bytes
        record = endpoint.status()["steps"][-1]
        assert record["bytes"] < 2 * 1000 + 400


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: {"a": (x := random(10)), "b": x[2:7]}, "overlaps"),
        (lambda: {"a": (x := random(10)), "b": x.view(torch.int32)}, "overlaps"),
        (lambda: {"a": (x := random(10, 10)), "b": x.t()}, "overlaps"),
        (lambda: {"b": random(10).to_sparse()}, "cannot be cast"),
        (lambda: {"b": torch.zeros(4, dtype=torch.float4_e2m1fn_x2)}, "cannot convert"),
    ],
)
def test_tensors_that_cannot_be_cast_are_named(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=why) as caught:
        published(make(), torch.bfloat16)
    assert "b" in str(caught.value.path)


def test_a_state_that_changes_while_it_is_cast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(100)
    read = casting.CastRegion.read

    def changing(self: casting.CastRegion, *args: Any, **options: Any) -> None:
        read(self, *args, **options)
        weight.add_(1)

    monkeypatch.setattr(casting.CastRegion, "read", changing)
    with pytest.raises(tr.errors.RelayError, match="changed while"):
        published({"w": weight}, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int32, "bfloat16", torch.complex64, 2])
def test_a_dtype_is_a_floating_one(dtype: Any) -> None:
    with pytest.raises(UsageError, match="floating dtype"):
        Encoding(dtype=dtype)


@pytest.mark.parametrize("name", ["float8_block", "no_such_encoding"])
def test_encodings_that_do_not_exist_are_refused(name: str) -> None:
    """There is no float8 with scales of ours: engines quantize in layouts of their own."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        Encoding(**{name: 128})
    with pytest.raises(UsageError, match="encoding is an Encoding, not str"):
        tr.serve({"w": torch.ones(2, 2)}, step=1, encoding=name, timeout=60)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: run it where there is one")
def test_tensors_on_a_gpu_are_cast_there() -> None:
    state = {
        "a": random(3000, 2000).cuda(),
        "turned": random(77, 33).cuda().t(),
        "host": random(50),
        "whole": torch.arange(9).cuda(),
    }
    found = published(state, torch.bfloat16)
    for name in ("a", "turned", "host"):
        assert same_bits(found[name].cpu(), state[name].to(torch.bfloat16).cpu()), name
    assert torch.equal(found["whole"].cpu(), state["whole"].cpu())


def serve_sharded(rank: int, group: Any, out: str) -> dict[str, Tensor]:
    """All ranks serve one state; rank 0 downloads it. The state in whole tensors, not cast."""
    job = fsdp_job(1)
    train(job, 2)
    with tr.serve(job, step=2, encoding=Encoding(dtype=torch.bfloat16), timeout=60) as endpoint:
        train(job, 1)
        endpoint.publish(job, step=3).result(60)
        dist.barrier(group)
        if rank == 0:
            with urllib.request.urlopen(f"{endpoint.url}/model.safetensors", timeout=60) as answer:
                Path(out).write_bytes(answer.read())
        dist.barrier(group)
    return whole(job)


def test_shards_are_cast(pool2: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    wanted = pool2.run(serve_sharded, str(out), timeout=120)[0]
    found = load_file(out)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(found[name], tensor.to(torch.bfloat16)), name
