"""The helpers of torch's `PGTransport` keep its contracts and refuse unsupported tensors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import _pg_transport as stock
from torch.utils._pytree import MappingKey

from torchrelay.dropin import _torch_records as ours
from torchrelay.errors import UnsupportedLeafError

CPU = torch.device("cpu")
DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2),
    *(torch.complex32, torch.complex64, torch.complex128),
]


def odd_storage() -> torch.Tensor:
    """One int32 in a storage of six bytes."""
    return torch.empty(0, dtype=torch.int32).set_(torch.UntypedStorage(6), 0, (1,), (1,))


class Sub(torch.Tensor):
    pass


def test_the_records_are_torchs_own() -> None:
    for name in ("_TensorMeta", "_DTensorMeta", "_ShardedTensorMeta", "_StateDictMeta", "_timeit"):
        assert getattr(ours, name) is getattr(stock, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_is_the_whole_storage_without_a_copy(dtype: torch.dtype) -> None:
    tensor = torch.zeros(48, dtype=torch.uint8).view(dtype)[1:]
    cast = ours._cast_tensor(tensor, torch.uint8)
    assert cast.untyped_storage() is tensor.untyped_storage()
    assert (cast.dtype, cast.shape) == (torch.uint8, (48,))
    cast.fill_(1)
    back = ours._cast_tensor(cast, dtype)
    assert back.untyped_storage() is tensor.untyped_storage()
    assert torch.equal(back[1:].view(torch.uint8), tensor.view(torch.uint8))


def test_cast_of_views_reaches_all_their_storage() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view in (base.t(), base[1:, ::2], base[0].expand(5, 4), base[:0]):
        cast = ours._cast_tensor(view, torch.float32)
        assert torch.equal(cast, base.flatten())
        assert cast.data_ptr() == base.data_ptr()


def test_cast_of_a_storage_that_is_no_whole_number_of_items() -> None:
    tensor = odd_storage()
    assert ours._cast_tensor(tensor, torch.uint8).shape == (6,)
    assert ours._cast_tensor(tensor, torch.int32).shape == (1,)
    assert tensor.untyped_storage().nbytes() == 6


def test_cast_takes_parameters_and_no_other_subclass() -> None:
    parameter = nn.Parameter(torch.ones(3))
    cast = ours._cast_tensor(parameter, torch.uint8)
    assert cast.untyped_storage() is parameter.untyped_storage()
    with pytest.raises(AssertionError, match="can only cast standard tensors"):
        ours._cast_tensor(torch.ones(3).as_subclass(Sub), torch.uint8)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(6)[2:5],
        torch.ones(1).expand(4),
        torch.ones(0, 3),
        torch.tensor(2.5),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=lambda t: f"{tuple(t.shape)}",
)
def test_prepared_tensor_is_what_torch_prepares(tensor: torch.Tensor) -> None:
    storage, record = ours._prepare_tensor(tensor)
    expected_storage, expected = stock._prepare_tensor(tensor)
    assert record == expected
    assert storage.untyped_storage() is expected_storage.untyped_storage()
    assert storage.nbytes == record.nbytes == tensor.untyped_storage().nbytes()


def test_prepared_parameter_is_its_data() -> None:
    parameter = nn.Parameter(torch.arange(3.0))
    storage, record = ours._prepare_tensor(parameter)
    assert record == stock._prepare_tensor(parameter.detach())[1]
    assert storage.untyped_storage() is parameter.untyped_storage()
    assert not storage.requires_grad


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_lazy_views_are_resolved(lazy: Any) -> None:
    tensor = lazy(torch.tensor([1 + 2j, 3 - 4j]))
    storage, record = ours._prepare_tensor(tensor)
    got = storage.view(record.dtype).as_strided(record.shape, record.stride, record.storage_offset)
    assert not got.is_conj()
    assert not got.is_neg()
    assert torch.equal(got, tensor.resolve_conj().resolve_neg())


def test_state_is_what_torch_prepares_for_it() -> None:
    state = {
        "model": {"w": torch.ones(2, 3), "b": torch.ones(3)},
        "opt": [{"lr": 0.1}, (torch.arange(4), None)],
        "step": 7,
    }
    record, tensors = ours._prepare_state_dict(state, CPU)
    expected, expected_tensors = stock._prepare_state_dict(state, CPU)
    assert pickle.dumps(record) == pickle.dumps(expected)
    assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in expected_tensors]
    assert len(tensors) == 3
    assert len(record.paths) == len(record.non_tensor_leaves) == 6
    assert record.paths[0] == (MappingKey("model"), MappingKey("w"))
    assert [
        leaf for leaf in record.non_tensor_leaves if not isinstance(leaf, ours._TensorMeta)
    ] == [
        0.1,
        None,
        7,
    ]


def test_state_without_tensors() -> None:
    record, tensors = ours._prepare_state_dict({}, CPU)
    assert (record.paths, record.non_tensor_leaves, tensors) == ([], [], [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: torch.ones(3).as_subclass(Sub), "Sub"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (nn.parameter.UninitializedParameter, "Uninitialized"),
    ],
    ids=["subclass", "meta", "coo", "csr", "quantized", "nested", "uninitialized"],
)
def test_what_the_protocol_cannot_carry_is_refused_by_path(make: Any, named: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=named) as caught:
        ours._prepare_state_dict({"ok": torch.ones(1), "bad": [make()]}, CPU)
    assert caught.value.path == "['bad'][0]"
    with pytest.raises(UnsupportedLeafError, match=named):
        ours._prepare_tensor(make())
