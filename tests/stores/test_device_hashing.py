"""Digests of a share's files, made on the GPU that has the tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchrelay as tr
from torchrelay.describing.region import Region, Stream
from torchrelay.memory.gpu.side import settle
from torchrelay.shares.device_hashing import DeviceHashing
from torchrelay.stores.writer.file_writer import FileSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
LONG = 1 << 31  # cycles: about a second, which is longer than it takes to hash two chunks
HEADER = 3 << 10
SIZES = (1 << 9, HEADER, 1 << 13, 1 << 16)


def queue_writes() -> None:
    """Free memory that a kernel will write to, and have the stream wait for a while before that."""
    torch.cuda._sleep(LONG)
    for size in SIZES:
        torch.zeros(size, dtype=torch.uint8, device="cuda").fill_(0xA5)


@needs_gpu
def test_work_that_is_queued_elsewhere_writes_to_none_of_its_memory() -> None:
    """A trainer continues while a save hashes: memory that it gave back may still be written to."""
    values = torch.arange(1 << 20, dtype=torch.int64, device="cuda")
    header = torch.arange(HEADER, dtype=torch.int32).to(torch.uint8)
    placed = [(0, Region.row_major(header)), (HEADER, Region.row_major(values))]
    nbytes = HEADER + values.nbytes
    stream = Stream.of(placed, nbytes)
    files = [FileSpec("x", nbytes, 8 << 20)]
    settle()
    expected = DeviceHashing(files, [stream]).hashed()
    assert any(expected[0].digests)
    for _ in range(3):
        queue_writes()
        hashing = DeviceHashing(files, [stream])
        assert hashing.hashed() == expected
        torch.cuda.synchronize()  # the writes come now, at the latest
        (planned,) = hashing._planned.values()
        assert torch.equal(planned.beside._there.cpu(), planned.beside._here)
        assert hashing.hashed() == expected


@needs_gpu
def test_training_that_continues_does_not_disturb_a_save(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((1 << 18,), float(n), device="cuda") for n in range(8)}
    with tr.Checkpointer(tmp_path) as ckpt:
        for step in range(12):
            pending = ckpt.save_async(step, state)
            for tensor in state.values():
                torch.cuda._sleep(1 << 24)
                tensor += torch.ones(1 << 18, device="cuda")
                for size in SIZES:
                    torch.zeros(size, dtype=torch.uint8, device="cuda").fill_(0xA5)
            pending.result()
            found = ckpt.load(step=step).state
            assert all(bool((x == int(name[1:]) + step).all()) for name, x in found.items())
