"""The digest of a chunk: of its bytes, or of the digests of its cells where it has several."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
import xxhash

from torchrelay.memory.digest import (
    CELL_BYTES,
    RollingDigest,
    RunningDigest,
    digest,
    joined_each,
)
from torchrelay.memory.gpu.kernels import digest_of

LENGTHS = [0, 1, CELL_BYTES - 1, CELL_BYTES, CELL_BYTES + 1, 3 * CELL_BYTES, 3 * CELL_BYTES + 5]


def noise(nbytes: int) -> torch.Tensor:
    torch.manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_is_that_of_the_bytes_or_of_the_cells(nbytes: int) -> None:
    data = noise(nbytes)
    raw = data.numpy().tobytes()
    cells = [raw[at : at + CELL_BYTES] for at in range(0, nbytes, CELL_BYTES)] or [b""]
    digests = [xxhash.xxh3_128_digest(cell) for cell in cells]
    wanted = digests[0] if len(digests) == 1 else xxhash.xxh3_128_digest(b"".join(digests))
    assert digest(raw) == digest(memoryview(data.numpy())) == digest_of(data) == wanted
    assert (wanted == xxhash.xxh3_128_digest(raw)) == (nbytes <= CELL_BYTES)
    assert (
        joined_each(b"".join([*digests, *digests]), [0, len(cells), 2 * len(cells)]) == [wanted] * 2
    )


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_it_is_the_same_piece_by_piece(nbytes: int) -> None:
    data, draw = noise(nbytes), random.Random(nbytes)
    cuts = sorted(draw.sample(range(nbytes), min(nbytes, 12)))
    rolling, running = RollingDigest(7), RunningDigest()
    running.update(b"of a chunk before")
    running.reset()
    for start, stop in zip([0, *cuts], [*cuts, nbytes], strict=True):
        if draw.random() < 0.2:
            data[start:stop] = 0  # left out: zeros
        elif stop > start:
            rolling.add([7 + start], [[data.data_ptr() + start, stop - start]])
        running.update(data[start:stop].numpy())
    assert rolling.end(7 + nbytes) == running.digest() == digest_of(data)


def test_it_needs_no_torch() -> None:
    code = "import sys; import torchrelay.memory.digest; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
