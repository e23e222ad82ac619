"""A safetensors file made of a state's tensors: the same bytes however it is cut, and few reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from random import Random

import numpy as np
import pytest

from torchrelay.inspection.file_bytes import FileBytes
from torchrelay.inspection.opened_state import Contents
from torchrelay.planning.stored import Shard, StoredTensor


@dataclass
class Volumes:
    """Volumes of random bytes, and the reads of them: volume, start and stop."""

    data: list[bytes]
    reads: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def contents(self) -> Contents:
        raise NotImplementedError

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        self.reads.append((volume, start, start + view.nbytes))
        view[:] = self.data[volume][start : start + view.nbytes]


def whole(name: str, shape: tuple[int, ...], start: int, volume: int = 0) -> StoredTensor:
    return StoredTensor(name, "uint8", shape, (Shard((0,) * len(shape), shape, volume, start),))


def by_columns(name: str, shape: tuple[int, int], start: int, volume: int) -> StoredTensor:
    """A matrix whose two halves lie one behind the other."""
    rows, columns = shape
    half = columns // 2
    left = Shard((0, 0), (rows, half), volume, start)
    right = Shard((0, half), (rows, columns - half), volume, start + rows * half)
    return StoredTensor(name, "uint8", shape, (left, right))


def expected(header: bytes, tensors: list[StoredTensor], volumes: Volumes) -> bytes:
    out = [header]
    for tensor in tensors:
        made = np.zeros(tensor.shape, np.uint8)
        for box in tensor.shards:
            data = volumes.data[box.file][box.start : box.start + prod(box.sizes)]
            place = tuple([slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)])
            made[place] = np.frombuffer(data, np.uint8).reshape(box.sizes)
        out.append(made.tobytes())
    return b"".join(out)


def random_file(draw: Random) -> tuple[bytes, list[StoredTensor], Volumes]:
    header = bytes(draw.randrange(40))
    tensors, ends = [], [draw.randrange(30) for _ in range(2)]
    for number in range(draw.randint(1, 6)):
        volume = draw.randrange(2)
        ends[volume] += draw.choice([0, 0, draw.randrange(20)])
        shape = draw.randint(0, 12), draw.randint(2, 30)
        make = draw.choice([whole, by_columns])
        tensors.append(make(f"t{number}", shape, ends[volume], volume))
        ends[volume] += prod(shape)
    return header, tensors, Volumes([draw.randbytes(end) for end in ends])


@pytest.mark.parametrize("seed", range(60))
def test_any_ranges_make_the_same_file(seed: int) -> None:
    draw = Random(seed)
    header, tensors, volumes = random_file(draw)
    file = FileBytes(header, tensors)
    wanted = expected(header, tensors, volumes)
    assert file.nbytes == len(wanted)
    size, task = draw.randint(1, 64), draw.randint(1, 200)
    ranges = [*file.ranges(task)]
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])][: len(ranges)]
    made = b"".join(
        bytes(piece)
        for low, high in ranges
        for piece in file.pieces(volumes, low, high, lambda volume: size)
    )
    assert made == wanted


def test_no_chunk_is_read_twice() -> None:
    """A file of 1,000 bytes behind another header than its volume has, in pieces of 64."""
    volumes = Volumes([bytes(range(256)) * 4])
    file = FileBytes(b"h" * 10, [whole("a", (600,), 24), whole("b", (400,), 624)])
    for low, high in file.ranges(128):
        for _ in file.pieces(volumes, low, high, lambda volume: 64):
            pass
    assert [start for _, start, _ in volumes.reads] == [24, *range(64, 1024, 64)]
    assert [stop for _, _, stop in volumes.reads] == [*range(64, 1024, 64), 1024]
