"""What a receiver copies out of a sender's device memory, and how it knows that it holds.

There is no GPU here: memory of the host stands for that of devices, and the CPU does what their
kernels do. Which bytes are copied and which chunks are hashed is the code that runs on a GPU too.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpu_on_host import hash_on_host, landed
from torchrelay.describing.snapshot import capture
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Moves, Runs, copy_one_by_one
from torchrelay.memory.digest import CELL_BYTES
from torchrelay.memory.gpu import device_chunks, kernels
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.memory.host import at_address
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes import cuda_ipc
from torchrelay.transports.routes.cuda.handles import sources
from torchrelay.transports.routes.cuda_ipc import CudaFetch, CudaService
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.routes.route import Link, RouteFault
from torchrelay.transports.wire.messages import Accept


class NoStream:
    def synchronize(self) -> None: ...


@contextmanager
def no_stream() -> Iterator[NoStream]:
    yield NoStream()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copy", lambda moves, device: copy_one_by_one(moves))
    monkeypatch.setattr(kernels, "digests", hash_on_host)
    monkeypatch.setattr(kernels, "kernels", lambda device: object())
    monkeypatch.setattr(kernels, "device_bytes", lambda at, nbytes, device: at_address(at, nbytes))
    for module in (cuda_ipc, kernels):
        monkeypatch.setattr(module, "side_stream", no_stream)
    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext())


class Scene:
    """Chunks in a sender's memory on one or two devices, and in a receiver's, cut otherwise."""

    def __init__(
        self, seed: int, monkeypatch: pytest.MonkeyPatch, *, devices: int = 1, shifted: bool = True
    ) -> None:
        draw = random.Random(seed)
        sizes = [draw.choice((16, 4096, 70_000)) for _ in range(draw.randint(3, 9))]
        sizes += [CELL_BYTES + 4096] if seed % 3 == 0 else []
        aligned = [-(-size // 16) * 16 for size in sizes]
        self.chunks = Chunks(sizes, aligned)
        total = self.total = sum(aligned)
        self.there = np.random.default_rng(seed).integers(0, 256, total + 8, dtype=np.uint8)
        self.here = np.zeros(total + 8, np.uint8)
        shift = draw.randrange(8) if shifted else 0
        self.base = self.there.ctypes.data + shift
        theirs = self._cut(draw, self.base, devices)
        # Here each chunk lies on the first device, in runs of its own.
        self.mine = Runs.merged(*self._cut(draw, self.here.ctypes.data, 1).values())
        for module in (kernels, device_chunks):
            monkeypatch.setattr(module, "by_device", lambda runs: {0: runs})
        self.fetch = fetch = CudaFetch.__new__(CudaFetch)
        fetch._chunks, fetch._digests, fetch._mine = self.chunks, True, {}
        fetch._opened = theirs
        fetch._places = SimpleNamespace(device=self.mine)  # type: ignore[assignment]
        fetch._on_gpu = DeviceChunks(self.chunks, self.mine)
        member = SimpleNamespace(resources=Resources())
        fetch._incoming = SimpleNamespace(member=member)  # type: ignore[assignment]
        fetch.messages = fetch.wire_bytes = 0
        self.counted: list[int] = []
        fetch._count = self.counted.append  # type: ignore[method-assign]

    def _cut(self, draw: random.Random, base: int, devices: int) -> dict[int, Runs]:
        """All bytes, in pieces that lie on one device or another; a chunk lies on one."""
        rows: dict[int, list[tuple[int, int, int]]] = {n: [] for n in range(devices)}
        for at, size in zip(self.chunks.offsets, self.chunks.sizes, strict=True):
            cuts = (at + 16 * draw.randrange(max(1, size // 16)) for _ in range(3))
            device = draw.randrange(devices)
            for low, high in pairwise(sorted({at, at + size, *cuts})):
                rows[device].append((low, base + low, high - low))
        return {n: Runs.of(some) for n, some in rows.items() if some}

    def sent(self, chunk: int) -> bytes:
        """The digest that the sender tells."""
        at, size = self.chunks.offsets[chunk], self.chunks.sizes[chunk]
        return digest_of(at_address(self.base + at, size))

    @property
    def every(self) -> list[int]:
        return list(range(len(self.chunks)))

    def wrong(self) -> list[int]:
        """The chunks that do not have the digests they were sent with."""
        return [chunk for chunk in self.every if self.fetch._mine[chunk] != self.sent(chunk)]

    def copied(self) -> bytes:
        return bytes(self.here[: self.total])


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_what_holds_is_found_to_hold(
    seed: int, devices: int, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(seed, monkeypatch, devices=devices, shifted=shifted)
    scene.fetch._copy_device_memory(scene.every)
    assert scene.copied() == ctypes.string_at(scene.base, scene.total)
    assert scene.wrong() == [] and sum(scene.counted) == scene.total


@pytest.mark.parametrize("seed", range(10))
def test_some_chunks_are_copied_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(seed, monkeypatch)
    scene.fetch._copy_device_memory(scene.every)
    before, some = scene.copied(), scene.every[::2]
    scene.here[:] = 0
    scene.fetch._mine.clear()
    scene.fetch._copy_device_memory(some)
    assert sorted(scene.fetch._mine) == some
    for chunk, (at, size) in enumerate(zip(scene.chunks.offsets, scene.chunks.sizes, strict=True)):
        wanted = before[at : at + size] if chunk in some else bytes(size)
        assert scene.copied()[at : at + size] == wanted


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("seed", range(10))
def test_a_bit_that_flips_where_it_was_copied_to_is_found_in_its_chunk(
    seed: int, devices: int, shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of what has come to lie here, also where it is made on the way."""
    scene = Scene(seed, monkeypatch, devices=devices, shifted=shifted)
    victim = seed % len(scene.chunks)
    at = scene.chunks.offsets[victim] + scene.chunks.sizes[victim] - 1

    def flipped(hashed: Any, device: int) -> torch.Tensor:
        hash_on_host(hashed, device)
        scene.here[at] ^= 8
        return hash_on_host(landed(hashed) if hashed.copies else hashed, device)

    monkeypatch.setattr(kernels, "digests", flipped)
    scene.fetch._copy_device_memory(scene.every)
    assert scene.wrong() == [victim]


@pytest.mark.parametrize("seed", range(5))
def test_memory_that_changes_after_the_sender_hashed_it_is_found(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(seed, monkeypatch)
    told = {chunk: scene.sent(chunk) for chunk in scene.every}
    ctypes.c_ubyte.from_address(scene.base).value ^= 1
    scene.fetch._copy_device_memory(scene.every)
    assert [chunk for chunk in scene.every if scene.fetch._mine[chunk] != told[chunk]] == [0]


def test_without_digests_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(1, monkeypatch)
    scene.fetch._digests = False
    monkeypatch.setattr(kernels, "digests", pytest.fail)
    scene.fetch._copy_device_memory(scene.every)
    assert scene.copied() == ctypes.string_at(scene.base, scene.total)
    assert scene.fetch._mine == {}


def test_words_are_copied_and_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "copy", pytest.fail)
    scene = Scene(2, monkeypatch, shifted=False)
    scene.fetch._copy_device_memory(scene.every)
    assert scene.wrong() == []
    odd = Moves(*(np.array([n], np.uint64) for n in (0, 3, 0, 64)))
    assert not kernels.in_words(odd)


def test_a_receiver_that_was_not_offered_the_route_gets_no_exports() -> None:
    """The sender did not find its process: a handle would open the memory for another one."""
    nothing: Any = SimpleNamespace()
    with pytest.raises(RouteFault, match="not offered"):
        CudaService(nothing).begin(nothing, Accept("cuda_ipc"), Link(1))


def test_reads_of_host_memory_alone_need_no_exports() -> None:
    """A receiver takes the route for a state on a GPU, and then wants parts of it that are not."""
    nothing: Any = SimpleNamespace()
    outgoing = Outgoing(capture({"host": torch.ones(5000)}), nothing, None)
    table = CudaService(nothing).table(outgoing)
    assert table.host and not table.exports and sources(table.device, [], 1 << 20) == {}
