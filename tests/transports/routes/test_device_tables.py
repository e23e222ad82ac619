"""Tables of device memory as they cross to another process, and digests that are known already.

Pure: addresses are numbers here, and no GPU is asked.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import xxhash

from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu.kernels import CudaError
from torchrelay.stores.draft import Buffer
from torchrelay.stores.writer.file_writer import FileSpec, FileWriter, Range
from torchrelay.transports.routes.cuda import handles
from torchrelay.transports.routes.cuda.handles import Export, pack, sources


def allocation(base: int, nbytes: int, number: int) -> handles._Allocation:
    return handles._Allocation(base, nbytes, Export(number, "gpu", bytes(64)))


def opened(pointer: int, nbytes: int, device: int = 0) -> handles.Opening:
    return handles.Opening(pointer, device, nbytes)


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_is_found_again_at_its_place_in_the_opened_memory(seed: int) -> None:
    draw = random.Random(seed)
    base, bases = 1 << 40, []
    for _ in range(draw.randint(1, 5)):
        nbytes = draw.randint(100, 1000)
        bases.append((base, nbytes))
        base += nbytes + draw.choice([0, 0, 4096])  # neighbours as well
    rows: list[tuple[int, int, int]] = []
    for low, nbytes in bases:
        at = low
        while (size := draw.randint(1, 200)) <= low + nbytes - at:
            rows.append((0, at, size))
            at += size + draw.choice([0, 0, 7])
    draw.shuffle(rows)
    position, placed = 0, []
    for _, address, size in rows:
        placed.append((position, address, size))
        position += size + draw.choice([0, 16])
    memory = Runs.of(placed)
    there = [(low + (7 << 44) * (n + 1), nbytes) for n, (low, nbytes) in enumerate(bases)]
    packed = pack(memory, [allocation(*one, n) for n, one in enumerate(bases)])
    found = sources(packed, [opened(*one) for one in there], position)[0]
    for start, address, size in placed:
        (index,) = [n for n, (low, nbytes) in enumerate(bases) if low <= address < low + nbytes]
        wanted = address - bases[index][0] + there[index][0]
        assert list(found.within(start, start + size)) == [(start, wanted, size)]


def columns(*rows: tuple[int, int, int, int]) -> bytes:
    """Position in the stream, bytes, export and offset of runs, as `pack` writes them."""
    packed = [
        (at, (export << handles._OFFSET_BITS) + offset, size) for at, size, export, offset in rows
    ]
    return np.array(packed, "<u8").T.tobytes()


@pytest.mark.parametrize(
    ("table", "what"),
    [
        (b"1234567", "torn"),
        (columns((0, 0, 0, 0)), "no size"),
        (columns((0, 1 << 60, 0, 0)), "outside the stream"),
        (columns((0, 8, 0, (1 << 64) - 8)), "no export"),
        (columns((0, 8, 0, (1 << 44) - 8)), "outside of an export"),
        (columns((0, 8, 0, 0), (4, 8, 0, 0)), "overlaps"),
        (columns((96, 8, 0, 0)), "outside the stream"),
        (columns((0, 8, 2, 0)), "no export"),
        (columns((0, 8, 0, 60)), "outside"),
        (columns((0, 65, 1, 0)), "outside"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table: bytes, what: str) -> None:
    with pytest.raises(CudaError, match=what):
        sources(table, [opened(1 << 40, 64), opened(2 << 40, 64, 1)], 100)


def test_a_table_without_exports_has_no_memory() -> None:
    assert sources(b"", [], 100) == {}
    with pytest.raises(CudaError, match="no export"):
        sources(columns((0, 8, 0, 0)), [], 100)


def test_memory_of_several_gpus_comes_apart() -> None:
    table = columns((0, 8, 0, 0), (8, 8, 1, 8), (16, 8, 0, 32))
    found = sources(table, [opened(1000, 64), opened(5000, 64, 1)], 100)
    assert {n: runs.addresses.tolist() for n, runs in found.items()} == {0: [1000, 1032], 1: [5008]}


class Sink:
    ordered = False

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def write(self, position: int, data: Buffer) -> None:
        self.data[position : position + len(data)] = data

    def finish(self) -> None: ...

    def abort(self) -> None: ...


class Files:
    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}

    def open(self, name: str, nbytes: int) -> Sink:
        self.sinks[name] = Sink(nbytes)
        return self.sinks[name]


def test_chunks_whose_digests_are_known_are_not_hashed_again() -> None:
    chunk, count = 4096, 40
    data = torch.arange(chunk * count - 100, dtype=torch.int64).to(torch.uint8)
    image = data.numpy().tobytes()
    known = bytearray(16 * count)
    for index in range(0, count, 3):
        known[16 * index : 16 * index + 16] = bytes([index + 1]) * 16  # nobody else would make it
    files = Files()
    spec = FileSpec("a", len(image), chunk, bytes(known))
    writing = FileWriter(files, [spec])
    writing.write([Range(0, 0, len(image), data.data_ptr())])
    (digests,) = writing.finish().digests
    assert bytes(files.sinks["a"].data) == image
    for index in range(count):
        part = image[chunk * index : chunk * (index + 1)]
        wanted = bytes([index + 1]) * 16 if index % 3 == 0 else xxhash.xxh3_128_digest(part)
        assert digests[16 * index : 16 * index + 16] == wanted


def test_a_file_whose_digests_are_all_known_keeps_them() -> None:
    image = bytes(range(256)) * 64
    data = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    files = Files()
    writing = FileWriter(files, [FileSpec("a", len(image), 4096, b"\7" * 64)])
    writing.write([Range(0, 0, len(image), data.data_ptr())])
    assert writing.finish().digests == [b"\7" * 64] and bytes(files.sinks["a"].data) == image
