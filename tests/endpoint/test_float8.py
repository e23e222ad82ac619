"""Weights published as float8: the error stays inside of the documented bound."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.ranks import RankPool
from torchrelay.endpoint import Encoding
from torchrelay.endpoint.float8 import dequantize, dequantized, quantize, quantized
from torchrelay.errors import UnsupportedLeafError, UsageError

Tensor = torch.Tensor


def check_bound(exact: Tensor, values: Tensor, scales: Tensor, block: int) -> None:
    found = dequantize(values, scales, block, torch.float64)
    wide = scales.double().repeat_interleave(block, -1)[..., : exact.shape[-1]]
    error = (found - exact.double()).abs()
    slack = 1 + 2**-20  # of arithmetic in float32
    assert (error <= torch.maximum(exact.double().abs() / 16, wide / 1024) * slack).all()
    assert (error <= 16 * wide * slack).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 300),
    block=st.sampled_from([1, 7, 32, 128, 1000]),
    magnitude=st.sampled_from([1e-44, 1e-38, 1e-30, 1e-3, 1.0, 1e5, 1e37]),
    seed=st.integers(0, 1000),
)
def test_the_error_is_inside_the_bound(
    rows: int, size: int, block: int, magnitude: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    exact = torch.randn(rows, size, generator=draw) * magnitude
    exact[:, :: seed % 5 + 1] = 0
    exact[0] *= torch.logspace(-12, 0, size)  # small and large ones in one block
    values, scales = quantize(exact, block)
    assert values.dtype is torch.float8_e4m3fn and values.shape == exact.shape
    assert scales.dtype is torch.float32 and scales.shape == (rows, -(-size // block))
    check_bound(exact, values, scales, block)


def test_the_largest_number_of_a_block_is_kept() -> None:
    exact = torch.tensor([[1.0, -3.0, 0.5, 100.0]])
    values, scales = quantize(exact, 2)
    found = dequantize(values, scales, 2)
    assert torch.allclose(found[0, [1, 3]], exact[0, [1, 3]], rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    state = {"model": {"w": torch.tensor([[1.0, bad]])}}
    with pytest.raises(UsageError, match="infinities or NaNs") as caught:
        quantized(state, 128)
    assert caught.value.path == "w"


@pytest.mark.parametrize("large", [1e300, -1e300, 3.5e38])
def test_finite_numbers_beyond_float32_are_called_so(large: float) -> None:
    state = {"w": torch.tensor([[1.0, large]], dtype=torch.float64)}
    with pytest.raises(UsageError, match=r"beyond 3\.40282e\+38") as caught:
        quantized(state, 128)
    assert caught.value.path == "w" and "infinit" not in str(caught.value)


def test_the_largest_numbers_of_float32_stay_finite() -> None:
    most = torch.finfo(torch.float32).max
    exact = most * (1 - torch.linspace(0, 1e-4, 10_000, dtype=torch.float64)).reshape(100, 100)
    assert dequantize(*quantize(exact, 1), 1).isfinite().all()


def test_scales_of_another_block_are_refused() -> None:
    values, scales = quantize(torch.ones(2, 64), 32)
    with pytest.raises(UsageError, match="blocks of 16"):
        dequantize(values, scales, 16)


def test_a_model_is_published_and_read_as_float8() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 20), torch.nn.LayerNorm(20))
    tied = torch.randn(8, 40)
    state = {"model": model, "more": [{"a": tied, "b": tied}], "count": torch.arange(6).view(2, 3)}
    with tr.serve(state, step=1, encoding=Encoding(float8_block=128), timeout=60) as endpoint:
        got: Any = tr.pull(endpoint.url, timeout=60, same_host=False).state
    values, scales = got["model"]["0.weight"], got["model"]["0.weight.scale"]
    assert values.dtype is torch.float8_e4m3fn
    assert scales.shape == (20, 3)
    check_bound(model[0].weight.detach(), values, scales, 128)
    assert got["more"][0]["a"].data_ptr() == got["more"][0]["b"].data_ptr()
    found = dequantized(got, block=128, dtype=torch.float32)
    assert found["model"].keys() == model.state_dict().keys()
    assert torch.equal(found["model"]["0.weight"], dequantize(values, scales, 128))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(found["model"][name], model.state_dict()[name])
    assert torch.equal(found["count"], state["count"])  # type: ignore[arg-type]
    assert found["more"][0].keys() == {"a", "b"}


def test_what_is_not_quantized_stays() -> None:
    scale = torch.ones(3)
    state = OrderedDict(
        {"flat": torch.ones(5), "n.scale": scale, "n": torch.ones(2, dtype=torch.int8)}
    )
    assert dequantized(quantized(state, 4), block=4).keys() == state.keys()
    with pytest.raises(UsageError, match="cannot both be published"):
        quantized({"w": torch.ones(2, 2), "w.scale": scale}, 4)


def serve_shards(rank: int, group: Any) -> Any:
    """Two ranks publish a tensor that is sharded by rows, unevenly; rank 0 reads it whole."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    exact = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    state = {"w": distribute_tensor(exact, mesh, [Shard(0)])}
    found = None
    with tr.serve(state, step=1, encoding=Encoding(float8_block=16), timeout=60) as endpoint:
        dist.barrier(group)
        if rank == 0:
            into = {
                "w": torch.empty(7, 50, dtype=torch.float8_e4m3fn),
                "w.scale": torch.empty(7, 4),
            }
            tr.pull(endpoint.url, into=into, group=False, timeout=60)
            found = into["w"].view(torch.uint8), into["w.scale"]
        dist.barrier(group)
    columns = {"w": distribute_tensor(exact, mesh, [Shard(1)])}
    refused = ""
    try:
        tr.serve(columns, step=1, encoding=Encoding(float8_block=16), timeout=60)
    except UnsupportedLeafError as fault:
        refused = str(fault)
    return exact, found, refused


def test_shards_are_published_as_float8(pool2: RankPool) -> None:
    results = pool2.run(serve_shards, timeout=120)
    exact, found, _ = results[0]
    check_bound(exact, found[0].view(torch.float8_e4m3fn), found[1], 16)
    assert all("last dimension" in refused for _, _, refused in results)


@pytest.mark.parametrize("block", [0, -1, True, 1.5, "128", 1 << 30])
def test_a_block_is_a_number_of_elements(block: Any) -> None:
    with pytest.raises(UsageError, match="float8_block"):
        Encoding(float8_block=block)


def test_float8_and_another_dtype_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        Encoding(dtype=torch.bfloat16, float8_block=128)
