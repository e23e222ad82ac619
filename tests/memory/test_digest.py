"""Digests of chunks: of their bytes, or of their cells."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from torchrelay.memory.digest import CELL_BYTES, RollingDigest, digest

LENGTHS = [0, 1, CELL_BYTES - 1, CELL_BYTES, CELL_BYTES + 1, 3 * CELL_BYTES, 3 * CELL_BYTES + 5]


def noise(nbytes: int) -> torch.Tensor:
    torch.manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_a_chunk_of_cells(nbytes: int) -> None:
    data = noise(nbytes)
    raw = data.numpy().tobytes()
    cells = [raw[at : at + CELL_BYTES] for at in range(0, nbytes, CELL_BYTES)]
    digests = [xxhash.xxh3_128_digest(cell) for cell in cells]
    whole = xxhash.xxh3_128_digest(b"".join(digests)) if len(digests) != 1 else digests[0]
    assert digest(data, cells=True) == whole
    assert digest(data) == xxhash.xxh3_128_digest(raw)
    assert (digest(data, cells=True) == digest(data)) == (nbytes <= CELL_BYTES)


@pytest.mark.parametrize("cells", [False, True])
@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_is_the_same_piece_by_piece(nbytes: int, cells: bool) -> None:
    data, draw = noise(nbytes), random.Random(nbytes)
    cuts = sorted(draw.sample(range(nbytes), min(nbytes, 12)))
    rolling = RollingDigest(7, cells=cells)
    for start, stop in zip([0, *cuts], [*cuts, nbytes], strict=True):
        if draw.random() < 0.2:
            data[start:stop] = 0  # left out: zeros
        elif stop > start:
            rolling.add([7 + start], [[data.data_ptr() + start, stop - start]])
    assert rolling.end(7 + nbytes) == digest(data, cells=cells)
