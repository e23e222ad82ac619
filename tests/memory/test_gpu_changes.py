"""Changed elements found and counted by the kernels of changes.cu, as numpy has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrelay.memory.gpu import changes

no_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: the kernels run where there is one"
)


def _versions(nbytes: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw)
    flip = torch.rand(nbytes, generator=draw) < share
    return old, torch.where(flip, old ^ 0x40, old)


def _expected(old: torch.Tensor, new: torch.Tensor, size: int) -> np.ndarray:
    differ = (old.numpy() != new.numpy()).reshape(-1, size).any(axis=1)
    return np.packbits(differ, bitorder="little")


@no_gpu
@pytest.mark.parametrize("size", changes.SIZES)
@pytest.mark.parametrize("shift", [0, 1, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_changes_are_those_of_numpy(size: int, shift: int, share: float) -> None:
    """Of several fields, of all alignments and of lengths that are no multiple of anything."""
    for turn, count in enumerate((1, 7, 8, 1025, 70_001, 3 * changes.TILE // size + 5)):
        nbytes = count * size
        old, new = _versions(nbytes, share, seed=turn)
        before, after = (torch.zeros(nbytes + 64, dtype=torch.uint8, device="cuda") for _ in "ab")
        before[shift : shift + nbytes] = old.cuda()
        after[shift : shift + nbytes] = new.cuda()
        middle = count // 2 * size
        fields = [(shift, shift + middle, size), (shift + middle, shift + nbytes, size)]
        fields = [field for field in fields if field[0] < field[1]]
        found = changes.find(before.data_ptr(), after.data_ptr(), fields, 0)
        for index, (low, high, _) in enumerate(fields):
            part = slice(low - shift, high - shift)
            bits = _expected(old[part], new[part], size)
            assert (found.of(index).cpu().numpy() == bits).all()
        marks = (old.numpy() != new.numpy()).reshape(-1, size).any(axis=1)
        assert found.total() == int(marks.sum())


@no_gpu
def test_fields_of_several_sizes_are_found_together() -> None:
    old, new = _versions(10_000, 0.02, seed=3)
    before, after = old.cuda(), new.cuda()
    fields = [(0, 3, 1), (16, 1016, 2), (1024, 5024, 4), (5024, 9024, 8), (9024, 9984, 16)]
    found = changes.find(before.data_ptr(), after.data_ptr(), fields, 0)
    for index, (low, high, size) in enumerate(fields):
        bits = _expected(old[low:high], new[low:high], size)
        assert (found.of(index).cpu().numpy() == bits).all()
