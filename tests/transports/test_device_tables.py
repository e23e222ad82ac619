"""Tables of device memory as they cross to another process, and digests that are known already.

Pure: addresses are numbers here, and no GPU is asked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.geometry.runs import Runs
from torchrelay.stores.seam import Buffer
from torchrelay.stores.writer.ranges import FileSpec, Range, Staged, Writing
from torchrelay.transports.routes.nearby import ipc_handles
from torchrelay.transports.routes.nearby.chunk_ways import chunks_in, stretches
from torchrelay.transports.routes.nearby.device_digests import CELL_BYTES, CELLS, cell_bytes, cells
from torchrelay.transports.routes.nearby.ipc_handles import Export, IpcError, pack, sources


def allocation(base: int, nbytes: int, number: int) -> ipc_handles._Allocation:
    return ipc_handles._Allocation(base, nbytes, Export(number, "gpu", bytes(64)))


def opened(pointer: int, nbytes: int, device: int = 0) -> ipc_handles._Opened:
    return ipc_handles._Opened(pointer, device, nbytes)


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
    return np.array(rows, "<u8").T.tobytes()


@pytest.mark.parametrize(
    ("table", "what"),
    [
        (b"1234567", "torn"),
        (columns((0, 0, 0, 0)), "no size"),
        (columns((0, 1 << 60, 0, 0)), "beyond all bounds"),
        (columns((0, 8, 0, (1 << 64) - 8)), "beyond all bounds"),
        (columns((0, 8, 0, 0), (4, 8, 0, 0)), "order"),
        (columns((96, 8, 0, 0)), "order"),
        (columns((0, 8, 2, 0)), "no export"),
        (columns((0, 8, 0, 60)), "outside"),
        (columns((0, 65, 1, 0)), "outside"),
    ],
)
def test_a_table_that_cannot_be_is_refused(table: bytes, what: str) -> None:
    with pytest.raises(IpcError, match=what):
        sources(table, [opened(1 << 40, 64), opened(2 << 40, 64, 1)], 100)


def test_memory_of_several_gpus_comes_apart() -> None:
    table = columns((0, 8, 0, 0), (8, 8, 1, 8), (16, 8, 0, 32))
    found = sources(table, [opened(1000, 64), opened(5000, 64, 1)], 100)
    assert {n: runs.addresses.tolist() for n, runs in found.items()} == {0: [1000, 1032], 1: [5008]}


def test_cells_are_those_that_have_bytes() -> None:
    memory = Runs.of([(10, 1000, 20), (100, 2000, 101), (512, 9000, 1)])
    assert cells(memory, 64).tolist() == [0, 64, 128, 192, 512]
    assert cells(Runs([], [], []), 64).tolist() == []


def test_cells_are_small_for_small_states_and_never_many_times_what_keeps_a_gpu_busy() -> None:
    assert cell_bytes(1) == CELL_BYTES[0]
    assert cell_bytes(CELL_BYTES[1] * CELLS) == cell_bytes(1 << 50) == CELL_BYTES[1]
    sizes = [cell_bytes(1 << bits) for bits in range(51)]
    assert sizes == sorted(sizes)


class Sink:
    ordered = False

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self.data[position : position + len(buffer)] = buffer
            position += len(buffer)

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
    writing = Writing(files, [spec], workers=2)
    writing.write([Range(0, 0, len(image), Staged(0, data.data_ptr()))])
    (digests,) = writing.finish()
    assert bytes(files.sinks["a"].data) == image
    for index in range(count):
        part = image[chunk * index : chunk * (index + 1)]
        wanted = bytes([index + 1]) * 16 if index % 3 == 0 else xxhash.xxh3_128_digest(part)
        assert digests[16 * index : 16 * index + 16] == wanted


def test_a_file_whose_digests_are_all_known_keeps_them() -> None:
    image = bytes(range(256)) * 64
    data = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    files = Files()
    writing = Writing(files, [FileSpec("a", len(image), 4096, b"\7" * 64)])
    writing.write([Range(0, 0, len(image), Staged(0, data.data_ptr()))])
    assert writing.finish() == [b"\7" * 64] and bytes(files.sinks["a"].data) == image


@given(st.sets(st.integers(0, 60)))
def test_chunks_travel_as_stretches(chosen: set[int]) -> None:
    chunks = tuple(sorted(chosen))
    told = stretches(chunks)
    assert chunks_in(told, 61) == chunks
    assert all(low > high for (_, high), (low, _) in pairwise(told)), "neighbours are one stretch"


@pytest.mark.parametrize("told", [((0, 9),), ((2, 1),), ((0, 2), (1, 3)), ((3, 4), (0, 1))])
def test_stretches_of_other_chunks_are_refused(told: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="chunks that do not exist"):
        chunks_in(told, 8)
