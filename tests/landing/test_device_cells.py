"""What a receiver copies out of a sender's device memory, and how it knows that it holds.

There is no GPU here: memory of the host stands for that of devices, and what the kernels do is done
by the CPU. Which cells are compared with what is the code that runs on a GPU too.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpu_on_host import hash_on_host
from torchrelay.geometry.runs import Moves, Runs, copy_one_by_one
from torchrelay.memory.gpu.kernels import ChunkTable
from torchrelay.transports.routes.nearby import device_digests
from torchrelay.transports.routes.nearby.device_digests import Copied, Copier, Grid, cell_bytes

CELL = 64


def copy_on_host(moves: Moves, device: int, tables: object) -> None:
    copy_one_by_one(moves)


class NoStream:
    def record_event(self) -> NoStream:
        return self

    def synchronize(self) -> None: ...


@contextmanager
def no_stream() -> Iterator[NoStream]:
    yield NoStream()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_digests.kernels, "copy", copy_on_host)
    monkeypatch.setattr(device_digests.kernels, "digests", hash_on_host)
    monkeypatch.setattr(device_digests, "_copy_across", lambda m, there, here: copy_one_by_one(m))
    monkeypatch.setattr(device_digests, "side_stream", no_stream)
    monkeypatch.setattr(device_digests, "CELL_BYTES", (CELL, CELL))
    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext())


class Scene:
    """Memory of a sender in pieces, and of a receiver that wants some of it, cut otherwise."""

    def __init__(self, seed: int, whole: bool, devices: int = 1, *, shifted: bool = True) -> None:
        draw = random.Random(seed)
        self._shifts = range(8) if shifted else range(1)
        self.total = draw.randint(200, 3000)
        self.there = np.random.default_rng(seed).integers(0, 256, self.total * 2, dtype=np.uint8)
        self.here = np.zeros(self.total * 2, np.uint8)
        self.sources = self._cut(draw, self.there, devices, 0.1)
        self.destinations = self._cut(draw, self.here, 1, 0.0 if whole else 0.4)
        memory = Runs.merged(*self.sources.values())
        self.sent = b""
        self.copier = Copier()
        grid = Grid()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_digests, "by_device", lambda runs: self.sources)
            self.sent = grid.digests(memory, self.total).packed()

    def _cut(
        self, draw: random.Random, memory: Any, devices: int, skipped: float
    ) -> dict[int, Runs]:
        edges = sorted({0, self.total, *(draw.randrange(self.total) for _ in range(12))})
        rows: dict[int, list[tuple[int, int, int]]] = {n: [] for n in range(devices)}
        shift = draw.choice(self._shifts)
        for low, high in pairwise(edges):
            if draw.random() >= skipped:
                row = (low, memory.ctypes.data + low + shift, high - low)
                rows[draw.randrange(devices)].append(row)
        return {n: Runs.of(some) for n, some in rows.items() if some}

    def copy(self) -> Copied:
        return self.copier.copy(self.sources, self.destinations, self.total, digests=True)


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seed", range(15))
def test_what_holds_is_found_to_hold(seed: int, whole: bool, devices: int, shifted: bool) -> None:
    scene = Scene(seed, whole, devices, shifted=shifted)
    copied = scene.copy()
    assert copied.differs(scene.sent) is None
    assert whole is False or copied.summary == device_digests.summary(scene.sent)
    assert scene.copy().differs(scene.sent) is None, "by the plan of the first time"
    got = device_digests.moves(
        Runs.merged(*scene.sources.values()), Runs.merged(*scene.destinations.values())
    )
    for _, source, to, nbytes in zip(*(column.tolist() for column in got), strict=True):
        assert ctypes.string_at(source, nbytes) == ctypes.string_at(to, nbytes)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seed", range(15))
def test_a_bit_that_flips_where_it_was_copied_to_is_found_in_its_cell(
    seed: int, whole: bool, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(seed, whole, devices)
    left: list[int] = []

    def flip(moves: Moves, device: int, tables: object) -> None:
        copy_on_host(moves, device, tables)
        if not left and len(moves.nbytes):
            index = seed % len(moves.nbytes)
            byte = int(moves.nbytes[index]) - 1
            ctypes.c_ubyte.from_address(int(moves.destinations[index]) + byte).value ^= 8
            left.append(int(moves.positions[index]) + byte)

    monkeypatch.setattr(device_digests.kernels, "copy", flip)
    monkeypatch.setattr(device_digests, "_copy_across", lambda m, there, here: flip(m, here, None))
    copied = scene.copy()
    found = copied.differs(scene.sent)
    assert left and found == left[0] // CELL * CELL
    assert copied.summary != device_digests.summary(scene.sent)


@pytest.mark.parametrize("seed", range(10))
def test_a_bit_that_flips_where_it_is_copied_and_hashed_at_once_is_found(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(seed, whole=True, shifted=False)
    left: list[int] = []

    def flip(hashed: ChunkTable, device: int, tables: object) -> torch.Tensor:
        hash_on_host(hashed, device, tables)
        assert hashed.copies, "copied and hashed at once"
        chunk = seed % hashed.count
        first = int(hashed.chunks[chunk, 0])
        last = int(hashed.chunks[chunk + 1, 0]) if chunk + 1 < hashed.count else None
        _, end, to = next(row for row in hashed.segments[first:last].tolist() if row[2])
        ctypes.c_ubyte.from_address((to + end - 1) % (1 << 64)).value ^= 8
        left.append(chunk)
        return hash_on_host(hashed.landed, device, tables)

    monkeypatch.setattr(device_digests.kernels, "digests", flip)
    copied = scene.copy()
    begin = copied.compared[0].cells.begin
    assert copied.differs(scene.sent) == int(begin[left[0]])
    assert copied.summary != device_digests.summary(scene.sent)


@pytest.mark.parametrize("seed", range(10))
def test_memory_that_changes_after_the_sender_hashed_it_is_found(seed: int) -> None:
    scene = Scene(seed, whole=True)
    runs = scene.sources[0]
    ctypes.c_ubyte.from_address(int(runs.addresses[-1])).value ^= 1
    assert scene.copy().differs(scene.sent) == int(runs.starts[-1]) // CELL * CELL


@pytest.mark.parametrize("sent", [b"", b"x" * 16, b"y" * 17])
def test_digests_of_another_number_of_cells_do_not_hold(sent: bytes) -> None:
    copied = Scene(1, whole=True).copy()
    assert copied.differs(sent) == 0 and copied.summary != sent


def test_both_ends_have_cells_of_one_size() -> None:
    assert cell_bytes(10) == cell_bytes(1 << 40) == CELL
