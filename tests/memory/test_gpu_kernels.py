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
from torchrelay.memory import kernels

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "torchrelay" / "memory"

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


def compared(library: Any, chunks: list[Pieces], pool: np.ndarray[Any, Any]) -> None:
    """Chunks one after the other in a stream, each with its own memory."""
    rows, starts, stops, wanted, at = [], [], [], [], 0
    for pieces in chunks:
        starts.append(at)
        digest = xxhash.xxh3_128()
        for offset, size in pieces:
            digest.update(bytes(size) if offset < 0 else pool[offset : offset + size])
            if offset >= 0 and size:
                rows.append((at, pool.ctypes.data + offset, size))
            at += size
        stops.append(at)
        wanted.append(digest.digest())
    columns = (np.array(column, np.uint64) for column in (starts, stops))
    hashed = kernels.ChunkTable.of(Runs.of(rows), *columns)
    found = np.zeros((len(chunks), 16), np.uint8)
    arrays = [np.ascontiguousarray(array) for array in (hashed.chunks, hashed.segments)]
    library.hash_on_host(
        ctypes.c_void_p(arrays[0].ctypes.data),
        ctypes.c_uint64(len(chunks)),
        ctypes.c_void_p(arrays[1].ctypes.data),
        ctypes.c_void_p(found.ctypes.data),
    )
    for row, pieces, digest_ in zip(found, chunks, wanted, strict=True):
        assert row.tobytes() == digest_, pieces


def test_every_short_length_at_any_alignment(on_host: Any) -> None:
    pool = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
    compared(on_host, [[(size % 11, size)] for size in range(260)], pool)


def test_lengths_around_stripes_and_blocks(on_host: Any) -> None:
    pool = np.random.default_rng(2).integers(0, 256, 20_000, dtype=np.uint8)
    around = [1024 * n + d for n in (1, 2, 4) for d in (-64, -63, -1, 0, 1, 63, 64, 65)]
    compared(on_host, [[(shift, size)] for size in around for shift in (0, 3)], pool)


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
    compared(on_host, chunks, pool)


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
    assert exact(1, 1) > 500
