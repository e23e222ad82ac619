"""Makes kernels.ptx of kernels.cu, compares its digests with the library's, and measures it. With
`--write`, changes.ptx of changes.cu is made, too.

    python -m benchmarks.gpu.kernels --out benchmarks/gpu/results/kernels.json

Needs a GPU and NVRTC, which comes with torch for CUDA. The text is made for compute capability 7.0
and an old version of the PTX language, so that older drivers and all later GPUs can load it.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks.harness import machine, save
from torchrelay.geometry.runs import Moves, Runs
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.chunk_table import ChunkTable

SOURCE = Path(kernels.__file__).with_name("kernels.cu")
HEAD = "// Made of {} by python -m benchmarks.gpu.kernels; loaded as it is.\n"


def compiled(file: Path) -> str:
    """The text of the kernels in a file."""
    source = file.read_bytes()
    around = Path(torch.__file__).parent
    folders = [around / "lib", *(around.parent / "nvidia").glob("*/lib"), Path("/usr/local/cuda")]
    found = [file for folder in folders for file in sorted(folder.rglob("libnvrtc.so*"))]
    if not found:
        raise SystemExit("no NVRTC beside torch")
    nvrtc = ctypes.CDLL(str(found[0]))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, file.name.encode(), 0, None, None)
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=compute_75", b"--std=c++17")
    if nvrtc.nvrtcCompileProgram(program, len(options), options):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.value.decode())
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    lines = [line for line in text.value.decode().splitlines() if line and line[:2] != "//"]
    ptx = re.sub(r"\.version [\d.]+", ".version 7.0", "\n".join(lines))
    return HEAD.format(file.name) + re.sub(r"\.target sm_\d+", ".target sm_70", ptx) + "\n"


def exact(rounds: int, seed: int) -> int:
    """Digests of chunks of all lengths and alignments, in one piece and in many, and copies of
    them: how many were compared. `AssertionError` for the first that is another."""
    draw = random.Random(seed)
    made = torch.Generator("cuda").manual_seed(seed)
    pool = torch.randint(0, 256, (24 << 20,), dtype=torch.uint8, device="cuda", generator=made)
    image, base = pool.cpu().numpy(), pool.data_ptr()
    lengths = [*range(300), *(1024 * n + d for n in range(1, 6) for d in (-1, 0, 1, 63, 64, 65))]
    compared = 0
    for turn in range(rounds):
        chunks: list[list[tuple[int, int]]] = []  # (offset in the pool or -1 for zeros, bytes)
        for size in lengths if turn == 0 else []:
            chunks += [[(draw.randrange(64), size)], _split(draw, size)]
        for _ in range(60):
            size = draw.choice([draw.randrange(2000), draw.randrange(100_000), 1 << 20])
            chunks += [[(draw.randrange(64), size)], _split(draw, size)]
        chunks.append([(draw.randrange(64), draw.randrange(1 << 20, 5 << 20))])
        chunks.append(_split(draw, draw.randrange(1 << 20, 5 << 20)))
        starts, sizes, runs, at = [], [], [], 0
        wanted = []
        for pieces in chunks:
            starts.append(at)
            digest = xxhash.xxh3_128()
            for offset, size in pieces:
                digest.update(bytes(size) if offset < 0 else image[offset : offset + size])
                if offset >= 0 and size:
                    runs.append((at, base + offset, size))
                at += size
            sizes.append(at - starts[-1])
            wanted.append(digest.digest())
        begin = np.array(starts, np.uint64)
        memory = Runs(*([run[n] for run in runs] for n in range(3)))
        hashed = ChunkTable.of(memory, begin, begin + np.array(sizes, np.uint64))
        got = kernels.digests(hashed, 0).cpu().numpy()
        for row, (found, digest) in enumerate(zip(got, wanted, strict=True)):
            assert found.tobytes() == digest, f"seed {seed}: chunk {row}: {chunks[row]}"
        compared += len(wanted)
        if kernels.kernels(0) is not None:  # they alone copy and hash at once
            to, landed, expected = _targets(draw, runs, image, base)
            end = begin + np.array(sizes, np.uint64)
            copying = ChunkTable.of(memory, begin, end, Runs.of(landed))
            again = kernels.digests(copying, 0).cpu().numpy()
            assert (again == got).all(), f"seed {seed}: digests of what was copied"
            assert (to.cpu().numpy() == expected).all(), f"seed {seed}: copied with other bits"
            compared += len(wanted)
        _copies(draw, pool, image)
    return compared


def _split(draw: random.Random, size: int) -> list[tuple[int, int]]:
    """So many bytes here and there, some of them zeros."""
    edges = sorted({0, size, *(draw.randrange(size + 1) for _ in range(draw.randrange(12)))})
    widths = [high - low for low, high in pairwise(edges)]
    return [(-1 if draw.random() < 0.2 else draw.randrange(16 << 20), w) for w in widths]


def _targets(
    draw: random.Random, runs: list[tuple[int, int, int]], image: np.ndarray[Any, Any], base: int
) -> tuple[torch.Tensor, list[tuple[int, int, int]], np.ndarray[Any, Any]]:
    """Memory for copies of all runs at random distances, where each goes, and what it has then."""
    landed, at = [], 0
    places = []
    for position, _, size in runs:
        at += draw.choice([0, 0, 8, draw.randrange(1, 40)])
        places.append((position, at, size))
        at += size
    to = torch.zeros(at + 64, dtype=torch.uint8, device="cuda")
    expected = np.zeros(at + 64, np.uint8)
    for (position, there, size), (_, address, _) in zip(places, runs, strict=True):
        landed.append((position, to.data_ptr() + there, size))
        expected[there : there + size] = image[address - base : address - base + size]
    return to, landed, expected


def _copies(draw: random.Random, pool: torch.Tensor, image: np.ndarray[Any, Any]) -> None:
    """Pieces of all alignments to places of all alignments; nothing beside them changes."""
    to = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
    expected = np.zeros(8 << 20, np.uint8)
    rows, at = [], 0
    for _ in range(40):
        size = draw.choice([0, 1, 7, 15, 16, 17, 100, draw.randrange(5000), 150_001])
        source, at = draw.randrange(16 << 20), at + draw.randrange(1, 40)
        rows.append((at, pool.data_ptr() + source, to.data_ptr() + at, size))
        expected[at : at + size] = image[source : source + size]
        at += size
    columns = np.array([row for row in rows if row[3]], np.uint64).T
    kernels.copy(Moves(*columns), 0)
    assert (to.cpu().numpy() == expected).all(), "a copy with other bits"


def measure(count: int, nbytes: int) -> list[dict[str, Any]]:
    """Rates on so many tensors of so many bytes, digests in chunks of several sizes."""
    a = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda") for _ in range(count)]
    b = [torch.zeros_like(tensor) for tensor in a]
    pairs = list(zip(a, b, strict=True))
    starts = [n * nbytes for n in range(count)]
    memory = Runs(starts, [x.data_ptr() for x in a], [nbytes] * count)
    moves = Moves(
        *(
            np.array(column, np.uint64)
            for column in (
                starts,
                [x.data_ptr() for x in a],
                [y.data_ptr() for y in b],
                [nbytes] * count,
            )
        )
    )
    total = count * nbytes

    def grid(size: int, to: Runs | None = None) -> ChunkTable:
        begin = np.arange(0, total, size, dtype=np.uint64)
        stops = np.minimum(begin + size, total).astype(np.uint64)
        return ChunkTable.of(memory, begin, stops, to)

    jobs: dict[str, Callable[[], object]] = {
        f"XXH3-128, chunks of {size >> 10} KiB": partial(kernels.digests, grid(size), 0)
        for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20)
    }
    jobs["copy"] = lambda: kernels.copy(moves, 0)
    landed = Runs(starts, [y.data_ptr() for y in b], [nbytes] * count)
    for size in (64 << 10, 1 << 20):
        name = f"copy and XXH3-128, chunks of {size >> 10} KiB"
        jobs[name] = partial(kernels.digests, grid(size, landed), 0)
    jobs["torch copy_, one by one"] = lambda: [y.copy_(x) for x, y in pairs]
    rows = []
    for name, job in jobs.items():
        seconds = []
        job()
        for _ in range(9):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            job()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        speed = total / 1e9 / median(seconds)
        print(f"{name:40s} {speed:8.0f} GB/s")
        rows.append(
            {"case": name, "gb_s": round(speed, 1), "seconds": [round(s, 6) for s in seconds]}
        )
    assert all(torch.equal(x, y) for x, y in pairs), "a copy with other bits"
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the file in the package")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    target = SOURCE.with_suffix(".ptx")
    made = compiled(SOURCE)
    same = made == target.read_text()
    print("the file in the package is", "what is made" if same else "another")
    if options.write:
        target.write_text(made)
        changes = SOURCE.with_name("changes.cu")
        changes.with_suffix(".ptx").write_text(compiled(changes))
    count, each = (8, 1_000_000) if options.small else (320, 25_000_000)
    compared = exact(3 if options.small else 30, options.seed)
    print(f"{compared} digests are the library's (seed {options.seed})")
    rows = measure(count, each)
    result = {
        "benchmark": "gpu kernels",
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "bytes": count * each,
        "package_has_what_is_made": same,
        "digests_compared": compared,
        "seed": options.seed,
        "exact": True,
        "rows": rows,
    }
    save(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
