"""Digests by the kernel of kernels.cu are those of the xxhash library."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.chunk_table import ChunkTable

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "torchrelay" / "memory" / "gpu"

no_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here: the kernel runs where there is one"
)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here to run the kernel on the CPU with")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = ROOT / "tests" / "support" / "kernels_on_host.cpp"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{SOURCE}"]
    command += ["-x", "c++", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip(f"the C++ compiler here does not know C++20: {done.stderr[:200]}")
    return ctypes.CDLL(str(library))


Pieces = list[tuple[int, int]]  # an offset in a pool of bytes, -1 for zeros; how many bytes


def compared(
    library: Any, chunks: list[Pieces], pool: np.ndarray[Any, Any], shift: int = 0
) -> None:
    """Chunks one after the other in a stream, each with its own memory."""
    rows, begins, ends, wanted, at = [], [], [], [], 0
    for pieces in chunks:
        begins.append(at)
        digest = xxhash.xxh3_128()
        for offset, size in pieces:
            digest.update(bytes(size) if offset < 0 else pool[offset : offset + size])
            if offset >= 0 and size:
                rows.append((at, pool.ctypes.data + offset, size))
            at += size
        ends.append(at)
        wanted.append(digest.digest())
    starts, stops = (np.array(column, np.uint64) for column in (begins, ends))
    hashed = ChunkTable.of(Runs.of(rows), starts, stops)
    assert digests_of(library, hashed) == wanted
    # And copied on the way, to memory that is cut otherwise and lies at other alignments.
    target, landed, expected = np.zeros(2 * at + 64 * len(rows) + 64, np.uint8), [], {}
    there = shift
    for start, address, size in rows:
        landed.append((start, target.ctypes.data + there, size))
        expected[there] = pool[address - pool.ctypes.data :][:size]
        there += size + (7 * size + shift) % 40
    copying = ChunkTable.of(Runs.of(rows), starts, stops, Runs.of(landed))
    assert digests_of(library, copying) == wanted
    for where, data in expected.items():
        assert (target[where : where + len(data)] == data).all()
        target[where : where + len(data)] = 0
    assert not target.any(), "bytes beside those that were to be copied"


def digests_of(library: Any, hashed: ChunkTable) -> list[bytes]:
    found = np.zeros((hashed.count, 16), np.uint8)
    at = hashed.numbers.ctypes.data
    library.hash_on_host(
        ctypes.c_void_p(at),
        ctypes.c_uint64(hashed.count),
        ctypes.c_void_p(at + hashed.chunks.nbytes),
        ctypes.c_void_p(found.ctypes.data),
        ctypes.c_bool(hashed.copies),
    )
    return [row.tobytes() for row in found]


def test_every_short_length_at_any_alignment(on_host: Any) -> None:
    pool = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    for shift in (0, 5):
        compared(on_host, [[(size % 11, size)] for size in range(260)], pool, shift)


def test_lengths_around_stripes_and_blocks(on_host: Any) -> None:
    pool = np.random.default_rng(2).integers(0, 256, 20_000, dtype=np.uint8)
    around = [1024 * n + d for n in (1, 2, 4) for d in (-64, -63, -1, 0, 1, 63, 64, 65)]
    for shift in (0, 8, 3):
        compared(on_host, [[(start, size)] for size in around for start in (0, 3)], pool, shift)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_that_lie_in_many_pieces_with_gaps_between(on_host: Any, seed: int) -> None:
    draw = random.Random(seed)
    pool = np.random.default_rng(seed).integers(0, 256, 8000, dtype=np.uint8)
    chunks: list[Pieces] = []
    for _ in range(40):
        pieces: Pieces = []
        for _ in range(draw.randint(1, 6)):
            offset = -1 if draw.random() < 0.3 else draw.randrange(4000)
            pieces.append((offset, draw.choice([1, 7, 8, draw.randrange(1, 3000)])))
        chunks.append(pieces)
    compared(on_host, chunks, pool, seed)


def test_the_loaded_text_is_made_of_the_source() -> None:
    """The text cannot be made here; it has the kernels, and every word of the secret."""
    text = (SOURCE / "kernels.ptx").read_text()
    assert ".target sm_70" in text and ".version 7.0" in text
    assert all(f".entry {name}(" in text for name in ("torchrelay_copy", "torchrelay_xxh3_128"))


@no_gpu
@pytest.mark.parametrize("seed", range(4))
def test_digests_and_copies_on_a_gpu(seed: int) -> None:
    from benchmarks.gpu.kernels import exact

    assert exact(4, seed) > 500


@no_gpu
def test_without_the_kernels_the_digests_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.kernels import exact

    monkeypatch.setattr(kernels, "kernels", lambda device: None)
    assert exact(1, 1) > 250


def test_a_table_of_no_chunks() -> None:
    """All chunks of a file may have bytes of two devices."""
    none = np.zeros(0, np.uint64)
    assert ChunkTable.of(Runs([0], [4096], [8]), none, none).numbers.tolist() == []


def test_the_cells_of_chunks() -> None:
    cell = kernels.CELL_BYTES
    begin, end, edges = kernels.cells_of([0, 3 * cell, 10 * cell], [cell + 1, cell, 5])
    assert begin.tolist() == [0, cell, 3 * cell, 10 * cell]
    assert end.tolist() == [cell, cell + 1, 4 * cell, 10 * cell + 5]
    assert edges == [0, 2, 3, 4]


def test_the_table_of_the_example() -> None:
    """That of chunk_table.py: two chunks, the first with padding behind its bytes."""
    memory = Runs.of([(0, 100, 6), (8, 200, 4)])
    starts, stops = np.array([0, 8], np.uint64), np.array([8, 12], np.uint64)
    table = ChunkTable.of(memory, starts, stops)
    assert table.chunks.tolist() == [[0, 8], [2, 4]]
    assert table.segments.tolist() == [[100, 6, 0], [0, 8, 0], [200, 4, 0]]
    copying = ChunkTable.of(memory, starts, stops, Runs.of([(0, 500, 6), (8, 4, 4)]))
    assert copying.segments.tolist() == [[100, 6, 500], [0, 8, 0], [200, 4, 4]] and copying.copies
    whole = ChunkTable.of(Runs.of([(8, 4, 4)]), starts[:1], stops[1:])
    assert whole.segments.tolist() == [[0, 8, 0], [2**64 - 4, 12, 0]]
