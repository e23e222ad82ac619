"""Chunks that a GPU hashes where they lie, on routes that go by way of the host.

Without a GPU, host memory stands for a device and the CPU for its kernels. Which chunks are
hashed there and at which end, and that both ends agree, is the code that runs on a GPU too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import torchrelay as tr
from tests.support.gpu_on_host import hash_on_host
from tests.support.ways import WAYS, by, patched
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Runs
from torchrelay.memory.digest import CELL_BYTES
from torchrelay.memory.gpu import device_chunks, kernels
from torchrelay.memory.gpu.device_chunks import DeviceChunks
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.transports.routes import outgoing as outgoing_module
from torchrelay.transports.routes import reading
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.routes.route import Incoming

CHUNK = 3 * CELL_BYTES + 4096
LONG = 30.0


class NoDevice(nullcontext[None]):
    """For `torch.cuda.device`, which torch asks for the class of."""

    def __init__(self, number: int) -> None:
        super().__init__()


@contextmanager
def played() -> Iterator[None]:
    """The CPU does what a GPU would."""
    with patched(kernels, digests=hash_on_host), patched(torch.cuda, device=NoDevice):
        yield


def laid_out(sizes: list[int], chunk_bytes: int) -> tuple[Chunks, torch.Tensor]:
    """Chunks of storages of these sizes, and the bytes of the stream."""
    aligned = [-(-size // 16) * 16 for size in sizes]
    total = sum(aligned)
    chunks = [min(chunk_bytes, total - at) for at in range(0, total, chunk_bytes)]
    torch.manual_seed(len(sizes))
    data = torch.randint(0, 256, (total,), dtype=torch.uint8)
    at = 0
    for size, room in zip(sizes, aligned, strict=True):
        data[at + size : at + room] = 0  # padding
        at += room
    return Chunks(sizes, chunks), data


def runs_of(chunks: Chunks, sizes: list[int], data: torch.Tensor, storages: list[int]) -> Runs:
    return Runs.of([(at := chunks.start_of(n), data.data_ptr() + at, sizes[n]) for n in storages])


@pytest.mark.parametrize("chunk_bytes", [16, 4096, 3 * CELL_BYTES, 64 << 20])
def test_digests_are_those_that_the_host_makes(chunk_bytes: int) -> None:
    count = 2 if chunk_bytes < 100 else 40
    sizes = [int(size) for size in np.random.default_rng(7).integers(1, 90_000, count)]
    sizes += [5 * CELL_BYTES + 3] if chunk_bytes > 4096 else []
    chunks, data = laid_out(sizes, chunk_bytes)
    with played():
        there = DeviceChunks(chunks, runs_of(chunks, sizes, data, list(range(len(sizes)))))
        found = there.digests(there)
    assert len(there) == len(chunks)
    for index, (at, size) in enumerate(zip(chunks.offsets, chunks.sizes, strict=True)):
        assert found[index] == digest_of(data[at : at + size])


def test_a_chunk_with_bytes_elsewhere_is_not_a_devices() -> None:
    sizes = [100, 4096, 64, 8192]
    chunks, data = laid_out(sizes, 2048)
    there = DeviceChunks(chunks, runs_of(chunks, sizes, data, [1, 3]))
    # The first chunk begins with storage 0; storage 2 lies in the third.
    assert sorted(there) == [1, 3, 4, 5, 6]
    assert not DeviceChunks(chunks, Runs([], [], []))


def test_memory_of_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [4096, 4096]
    chunks, data = laid_out(sizes, 2048)
    first, second = (runs_of(chunks, sizes, data, [n]) for n in (0, 1))
    monkeypatch.setattr(device_chunks, "by_device", lambda runs: {0: first, 1: second})
    there = DeviceChunks(chunks, Runs.merged(first, second))
    with played():
        found = there.digests([3, 0])
    assert found == {n: digest_of(data[at : at + 2048]) for n, at in ((0, 0), (3, 6144))}


class Counts:
    """Who has hashed what."""

    def __init__(self) -> None:
        self.there: list[int] = []
        self.here: list[int] = []

    @contextmanager
    def watch(self, sends: bool) -> Iterator[None]:
        """As if this rank's tensors lay on a GPU."""
        own = DeviceChunks.digests

        def digests(self_: DeviceChunks, wanted: Any) -> dict[int, bytes]:
            some = sorted(wanted)
            self.there += some
            return own(self_, some)

        def on_host(data: torch.Tensor) -> bytes:
            self.here.append(data.numel())
            return digest_of(data)

        memory = property(lambda one: DeviceChunks(one._chunks, one._stream.host))

        def landed(incoming: Incoming) -> DeviceChunks:
            return DeviceChunks(incoming.target.chunks, incoming.target.stream.host)

        with ExitStack() as stack:
            stack.enter_context(played())
            stack.enter_context(patched(DeviceChunks, digests=digests))
            if sends:
                stack.enter_context(patched(Outgoing, on_gpu=memory))
            else:
                stack.enter_context(patched(Incoming, on_gpu=landed))
            stack.enter_context(patched(outgoing_module, digest_of=on_host))
            stack.enter_context(patched(reading, digest_of=on_host))
            yield


def weights(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    large = torch.randint(0, 1 << 40, (4 * CELL_BYTES // 8 + 11,))
    small = [torch.randn(500 + n) for n in range(40)]
    return {"large": large, "small": small, "strided": torch.randn(64, 64).t(), "step": seed}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        torch.equal(a["large"], b["large"])
        and all(map(torch.equal, a["small"], b["small"]))
        and torch.equal(a["strided"], b["strided"])
    )


def passes(rank: int, group: Any, gpus: tuple[int, ...]) -> Any:
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG, verify="all")
    counts = Counts()
    with counts.watch(rank == 0) if rank in gpus else nullcontext():
        if rank == 0:
            held = relay.send(weights(1), [1]).verified
        else:
            into = weights(2)
            held = relay.recv(0, into=into).report.verified and same(into, weights(1))
    relay.close()
    return held, len(counts.there), len(counts.here)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gpus", [(0,), (1,), (0, 1)])
def test_each_end_hashes_where_its_bytes_lie(pool2: Any, gpus: tuple[int, ...], way: str) -> None:
    told = pool2.run(by, way, passes, gpus, fresh_group=True)
    for rank, (held, there, here) in enumerate(told):
        assert held
        if rank == 1 and way == "memory":
            continue  # it hashes what it reads straight from the sender, as it reads
        if rank in gpus:
            assert there >= 2, "but for the chunk with the strided tensor"
            assert here <= 1
        else:
            assert not there


def finds(rank: int, group: Any, often: int) -> Any:
    """Bits flip in the memory of the receiver's device after they have been copied there."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, timeout=LONG)
    if rank == 0:
        with Counts().watch(True):
            try:
                relay.send(weights(1), [1])
            except tr.errors.RelayError as fault:
                return type(fault).__name__
        return ""
    flips, into = [0] * often, weights(2)

    def flipped(hashed: Any, device: int) -> torch.Tensor:
        if flips:
            flips.pop()
            base, end, _ = hashed.segments[hashed.segments[:, 0] > 0][-1].tolist()
            byte = ctypes.c_ubyte.from_address((base + end - 1) % (1 << 64))
            byte.value ^= 4
        return hash_on_host(hashed, device)

    with Counts().watch(False), patched(kernels, digests=flipped):
        try:
            report = relay.recv(0, into=into).report
        except tr.errors.DigestError as fault:
            return str(fault), same(into, weights(2))
    return report.traffic.bytes > report.bytes, same(into, weights(1))


def test_a_bit_that_flips_on_the_device_is_found_and_fetched_again(pool2: Any) -> None:
    sender, (again, right) = pool2.run(by, "tcp", finds, 1, fresh_group=True)
    assert sender == "" and again and right


def test_bits_that_flip_again_and_again_are_named_and_nothing_lands(pool2: Any) -> None:
    sender, (words, untouched) = pool2.run(by, "tcp", finds, 1000, fresh_group=True)
    assert sender and untouched
    assert "chunk" in words and "['" in words and "from byte" in words, words
