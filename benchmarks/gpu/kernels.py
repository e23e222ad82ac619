"""Makes copy_and_sum.ptx of copy_and_sum.cu, and measures it.

    python -m benchmarks.gpu.kernels --out benchmarks/gpu/results/kernels.json

Needs a GPU and NVRTC, which comes with torch for CUDA. The text is made for compute capability 7.0
and an old version of the PTX language, so that older drivers and all later GPUs can load it.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import machine, save
from torchrelay.memory import kernels

SOURCE = Path(kernels.__file__).with_name("copy_and_sum.cu")
HEAD = "// Made of copy_and_sum.cu by python -m benchmarks.gpu.kernels; loaded as it is.\n"


def compiled(source: bytes) -> str:
    around = Path(torch.__file__).parent
    folders = [around / "lib", *(around.parent / "nvidia").glob("*/lib"), Path("/usr/local/cuda")]
    found = [file for folder in folders for file in sorted(folder.rglob("libnvrtc.so*"))]
    if not found:
        raise SystemExit("no NVRTC beside torch")
    nvrtc = ctypes.CDLL(str(found[0]))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
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
    return HEAD + re.sub(r"\.target sm_\d+", ".target sm_70", ptx) + "\n"


def measure(count: int, nbytes: int) -> tuple[bool, list[dict[str, Any]]]:
    """Copy and sum pieces of all alignments: whether all are right. Rates of aligned ones."""
    good = True
    tables = kernels.Tables()
    for shift in (0, 1, 4, 8, 16):
        for size in (1, 7, 8, 9, 15, 16, 4096, 4099, 3 * kernels.TILE + 5):
            source = torch.randint(0, 256, (size + shift,), dtype=torch.uint8, device="cuda")[
                shift:
            ]
            to = torch.zeros(size + 2 * shift, dtype=torch.uint8, device="cuda")[2 * shift :]
            piece = kernels.Piece(source.data_ptr(), to.data_ptr(), size)
            total = kernels.copy_and_sum([piece], 0, tables)
            assert total is not None
            same = total[0] == kernels.word_sum(source)
            good = good and bool(same) and torch.equal(source, to)
    a = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda") for _ in range(count)]
    b = [torch.zeros_like(tensor) for tensor in a]
    pairs = list(zip(a, b, strict=True))
    both = [kernels.Piece(x.data_ptr(), y.data_ptr(), nbytes) for x, y in pairs]
    jobs = {
        "copy and sum": lambda: kernels.copy_and_sum(both, 0, tables),
        "sum": lambda: kernels.copy_and_sum(both, 0, tables, what=kernels.SUM_SOURCE),
        "sum of every 8th tile": lambda: kernels.copy_and_sum(
            both, 0, tables, what=kernels.SUM_DESTINATION, part=(3, 8)
        ),
        "torch copy_, one by one": lambda: [y.copy_(x) for x, y in pairs],
    }
    rows = []
    for name, job in jobs.items():
        seconds = []
        for _ in range(9):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            job()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        speed = count * nbytes / 1e9 / median(seconds)
        print(f"{name:24s} {speed:8.0f} GB/s")
        rows.append(
            {"case": name, "gb_s": round(speed, 1), "seconds": [round(s, 6) for s in seconds]}
        )
    return good and all(torch.equal(x, y) for x, y in pairs), rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the file in the package")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    target = SOURCE.with_suffix(".ptx")
    made = compiled(SOURCE.read_bytes())
    same = made == target.read_text()
    print("the file in the package is", "what is made" if same else "another")
    if options.write:
        target.write_text(made)
    count, each = (8, 1_000_000) if options.small else (320, 25_000_000)
    good, rows = measure(count, each)
    print("exact" if good else "WRONG BITS")
    result = {
        "benchmark": "gpu kernels",
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "bytes": count * each,
        "package_has_what_is_made": same,
        "exact": good,
        "rows": rows,
    }
    save(result, options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
