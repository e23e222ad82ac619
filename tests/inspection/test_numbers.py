"""Elements of every dtype become the numbers that torch says they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrelay.inspection.numbers import numbers_of
from torchrelay.record.dtypes import ITEM_SIZES
from torchrelay.state.tensors import DTYPES

WITHOUT = {name for name in ITEM_SIZES if name.startswith(("bits", "q", "float4"))} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)
}


@pytest.mark.parametrize("dtype", sorted(WITHOUT | ITEM_SIZES.keys() & DTYPES.keys()))
def test_every_pattern_of_bits_is_the_number_torch_reads(dtype: str) -> None:
    as_numbers = numbers_of(dtype)
    assert (as_numbers is None) == (dtype in WITHOUT)
    if as_numbers is None:
        return
    kind = DTYPES[dtype]
    raw = np.random.default_rng(5).integers(0, 256, 1 << 16, "uint8")
    if dtype == "bool":
        raw &= 1
    tensor = torch.from_numpy(raw.copy()).view(kind)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    found = as_numbers(raw)
    if tensor.is_floating_point():
        wanted = tensor.to(torch.float64).numpy()
        with np.errstate(invalid="ignore"):  # NaNs that signal
            np.testing.assert_array_equal(found.astype("float64"), wanted)
    else:
        np.testing.assert_array_equal(found, tensor.numpy())
