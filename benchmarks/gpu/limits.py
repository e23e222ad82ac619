"""What a machine with a GPU can do at best: `python -m benchmarks.gpu.limits [--small] [--out F]`.

The parts of a load and of a save by themselves: copies between pinned memory and the GPU, reads of
a file by threads, pinning the memory of a file where it lies, getting and pinning fresh memory, and
reads of a disk past the page cache.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine, save
from torchrelay.memory.arena import unregister
from torchrelay.memory.gpu.kernels import CudaError, check, driver
from torchrelay.memory.pages import Mapping, allocate, populate, side_by_side
from torchrelay.memory.thread_pool import run_on_threads

MIB = 1 << 20
GB = 1e9
THREADS = 16
READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY


def seconds_of(act: Callable[[], object], laps: int = 1) -> float:
    """Of the best lap."""
    best = float("inf")
    for _ in range(laps):
        begun = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - begun)
    return best


def pin(address: int, nbytes: int, flags: int = 0) -> None:
    size = ctypes.c_size_t(nbytes)
    code = driver().cuMemHostRegister_v2(ctypes.c_void_p(address), size, ctypes.c_uint(flags))
    check(code, f"pin {nbytes} bytes")


class Limits:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.rows: list[dict[str, Any]] = []

    def row(self, name: str, seconds: float, nbytes: int | None = None, **how: Any) -> None:
        speed = (self.nbytes if nbytes is None else nbytes) / GB / seconds
        self.rows.append(
            {"name": name, **how, "seconds": round(seconds, 4), "gb_s": round(speed, 2)}
        )
        print(f"{name:44} {speed:8.2f} GB/s {seconds:8.4f} s  {how or ''}", flush=True)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        try:
            yield
        except (CudaError, OSError, MemoryError) as fault:
            self.rows.append({"name": name, "error": str(fault)})
            print(f"{name:44} {fault}", flush=True)

    def link(self) -> None:
        size = min(self.nbytes, 256 * MIB)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device="cuda")
        pairs = {"host to device": (there, host), "device to host": (host, there)}
        for name, (to, source) in pairs.items():

            def copies(to: torch.Tensor = to, source: torch.Tensor = source) -> None:
                for _ in range(self.nbytes // size):
                    to.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            self.row(f"link, {name}", seconds_of(copies, 3), self.nbytes // size * size)

    def reads(self, name: str, fd: int, threads: int, piece: int, nbytes: int, laps: int) -> None:
        """By threads that each fill the same memory again and again."""
        memory = Mapping(threads * piece)
        populate(memory.address, threads * piece, threads)

        def lap() -> None:
            numbers = count()

            def hand() -> Callable[[int], None]:
                at = memory.address + next(numbers) * piece
                view = memoryview((ctypes.c_char * piece).from_address(at)).cast("B")

                def read(position: int) -> None:
                    os.preadv(fd, [view[: nbytes - position]], position)

                return read

            run_on_threads(range(0, nbytes, piece), hand, threads)

        with self.attempt(name):
            self.row(name, seconds_of(lap, laps), nbytes, threads=threads, piece=piece)

    def pinned_where_it_lies(self, name: str, fd: int) -> None:
        """The memory of a file that is in memory anyway, instead of copies of it."""
        with self.attempt(name):
            mapped = mmap.mmap(fd, self.nbytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            self.row(name, seconds_of(lambda: pin(address, self.nbytes, READ_ONLY)))
            unregister(address)

    def fresh(self, name: str, parts: int) -> None:
        """What a first save to host memory waits for: memory that it has not had before."""
        with self.attempt(name):
            taken, pinned = min(self._fresh(parts) for _ in range(2))
            self.row(f"{name}: allocate", taken, parts=parts)
            self.row(f"{name}: pin", pinned, parts=parts)

    def _fresh(self, parts: int) -> tuple[float, float]:
        """Seconds to allocate and to pin it."""
        files = [os.memfd_create("limits") for _ in range(parts)]
        each = self.nbytes // parts
        for file in files:
            os.ftruncate(file, each)
        whole = side_by_side(files, each, self.nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))

        def part(number: int) -> None:
            allocate(files[number], address + number * each, each)

        taken = seconds_of(lambda: run_on_threads(range(parts), lambda: part, parts))
        pinned = seconds_of(lambda: pin(address, self.nbytes))
        unregister(address)
        for file in files:
            os.close(file)
        return taken, pinned

    def private(self, name: str) -> None:
        def touched() -> None:
            populate(Mapping(self.nbytes).address, self.nbytes, THREADS)

        with self.attempt(name):
            self.row(name, seconds_of(touched))


def written(path: Path, nbytes: int) -> None:
    block = os.urandom(16 * MIB)
    with path.open("wb") as file:
        for at in range(0, nbytes, len(block)):
            file.write(block[: nbytes - at])
        file.flush()
        os.fsync(file.fileno())


def measure(limits: Limits, places: Sequence[Path]) -> None:
    limits.link()
    for base in places:
        in_memory = base == Path("/dev/shm")
        where = str(base) if in_memory else "hot page cache"
        with tempfile.TemporaryDirectory("-torchrelay", dir=base) as folder:
            path = Path(folder) / "file"
            written(path, limits.nbytes)
            fd = os.open(path, os.O_RDWR)
            for threads, piece in ((THREADS, 8 * MIB), (THREADS, MIB), (THREADS // 2, 8 * MIB)):
                limits.reads(f"read, {where}", fd, threads, piece, limits.nbytes, 3)
            limits.pinned_where_it_lies(f"pin the file's memory, {where}", fd)
            if not in_memory:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
                some = min(limits.nbytes, 4 << 30)
                for threads, piece in ((4, 4 * MIB), (THREADS, 4 * MIB), (THREADS, 16 * MIB)):
                    limits.reads("read, cold disk", direct, threads, piece, some, 1)
                os.close(direct)
            os.close(fd)
    limits.fresh("fresh memory, one memfd", 1)
    limits.fresh(f"fresh memory, {THREADS} memfds", THREADS)
    limits.private("fresh memory, private")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.limits", description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--disk", type=Path, default=Path("/tmp"), help="a place on a disk")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 0
    limits = Limits(256 * MIB if options.small else 8 << 30)
    measure(limits, [Path("/dev/shm"), options.disk])
    result = {
        "benchmark": "gpu limits",
        "machine": {**machine(), "gpu": torch.cuda.get_device_name()},
        "bytes": limits.nbytes,
        "rows": limits.rows,
    }
    save(result, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
