"""How two ranks' values of a tensor differ, from few of their bytes. Pure but for `blocks_of` and
`bytes_of`, which read a tensor.

Ranks first send digests of blocks, then the bytes of the first blocks that differ. A tensor of 40
elements of 4 bytes, in blocks of 64:

    block   bytes      rank 0   rank 1
    0       0-63       a        a
    1       64-127     b        c        sent in full: element 16 + 3 is the first that differs
    2       128-159    d        d
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from torchrelay.describing.region import Region
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.inspection.numbers import numbers_of
from torchrelay.memory.digest import digest
from torchrelay.memory.pages import host_view
from torchrelay.record.dtypes import itemsize
from torchrelay.replicas.comparison import FirstDifference
from torchrelay.state import tensors as t

DETAILED = 16  # tensors
MOST_BLOCKS = 4096  # of a tensor
SMALLEST_BLOCK = 4096
SENT_BYTES = 256 << 10  # of a tensor, in full; at least one block


class TensorBlocks(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of a rank by digests of its blocks."""

    dtype: str
    shape: tuple[int, ...]
    block: int  # bytes
    digests: bytes

    @property
    def count(self) -> int:
        return len(self.digests) // DIGEST_BYTES


def blocks_of(tensor: torch.Tensor) -> TensorBlocks:
    region = Region.row_major(tensor)
    block = max(
        SMALLEST_BLOCK, -(-region.nbytes // (MOST_BLOCKS * SMALLEST_BLOCK)) * SMALLEST_BLOCK
    )
    buffer = torch.empty(block, dtype=torch.uint8, device="cpu")
    digests = [
        digest(_read(region, at, min(at + block, region.nbytes), buffer))
        for at in range(0, region.nbytes, block)
    ]
    return TensorBlocks(t.NAMES[tensor.dtype], tuple(tensor.shape), block, b"".join(digests))


def bytes_of(tensor: torch.Tensor, block: int, numbers: Sequence[int]) -> list[bytes]:
    """The bytes of some blocks of a tensor."""
    region = Region.row_major(tensor)
    buffer = torch.empty(block, dtype=torch.uint8, device="cpu")
    spans = [(n * block, min((n + 1) * block, region.nbytes)) for n in numbers]
    return [bytes(_read(region, start, stop, buffer)) for start, stop in spans if start < stop]


def _read(region: Region, start: int, stop: int, buffer: torch.Tensor) -> memoryview:
    region.read(start, stop, buffer)
    return host_view(buffer.data_ptr(), stop - start)


def differing_blocks(ranks: Sequence[TensorBlocks]) -> list[int]:
    """The blocks that are not the same on these ranks, which have one layout."""
    rows = [np.frombuffer(one.digests, f"V{DIGEST_BYTES}") for one in ranks]
    differs = np.zeros(ranks[0].count, bool)
    for row in rows[1:]:
        differs |= row != rows[0]
    found: list[int] = np.flatnonzero(differs).tolist()
    return found


def sent_blocks(blocks: Sequence[int], size: int) -> list[int]:
    """The blocks that are sent in full."""
    return list(blocks[: max(1, SENT_BYTES // size)])


def first_difference(
    path: str,
    ranks: tuple[int, int],
    layout: TensorBlocks,
    sent: Mapping[int, tuple[bytes, bytes]],
    *,
    counted: bool,
) -> FirstDifference | None:
    """`sent`: blocks of both ranks, by number. None if they are the same."""
    size = itemsize(layout.dtype)
    first, differing, values = None, 0, ("", "")
    for number, pair in sorted(sent.items()):
        one, other = (np.frombuffer(data, np.uint8).reshape(-1, size) for data in pair)
        where = np.flatnonzero((one != other).any(axis=1))
        differing += len(where)
        if first is None and len(where):
            at = int(where[0])
            first = number * layout.block // size + at
            values = (_text(layout.dtype, one[at]), _text(layout.dtype, other[at]))
    if first is None:
        return None
    index = tuple([int(n) for n in np.unravel_index(first, layout.shape)])
    elements = int(np.prod(layout.shape))
    return FirstDifference(path, ranks, index, values, elements, differing, counted)


def _text(dtype: str, raw: Any) -> str:
    as_numbers = numbers_of(dtype)
    bits = bytes(raw[::-1]).hex()
    if as_numbers is None:
        return f"0x{bits}"
    values = as_numbers(raw).tolist()
    value = values[0] if len(values) == 1 else complex(*values)
    return f"{value!r} (0x{bits})"
