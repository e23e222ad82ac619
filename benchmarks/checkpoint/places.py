"""Where files go, what the system caches of them, and how much memory processes have."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
DROP = Path("/proc/sys/vm/drop_caches")
PIECE = 8 << 20


class Places(NamedTuple):
    memory: Path
    disk: Path


@contextmanager
def places(given: Path | None) -> Iterator[Places]:
    """Two folders, in memory and on a disk: the one `given`, else the disk that this file is on."""
    with tempfile.TemporaryDirectory(prefix="torchrelay-bench-", dir=SHM) as memory:
        disk = given
        if disk is None:
            usual = Path(tempfile.gettempdir())
            disk = usual if usual.stat().st_dev == ROOT.stat().st_dev else ROOT
        disk.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="torchrelay-bench-", dir=disk) as folder:
            yield Places(Path(memory), Path(folder))


def remove(folder: Path) -> None:
    """Files go, and what others left unwritten is written before the next lap is timed."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def warm(folder: Path) -> None:
    """Have the page cache hold every file."""
    piece = bytearray(PIECE)
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def can_drop() -> bool:
    return os.access(DROP, os.W_OK)


def cool(folder: Path) -> None:
    """Have the page cache hold none of the files."""
    os.sync()
    for path in _files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if can_drop():
        DROP.write_text("1")


def pss(roots: list[int]) -> int:
    """Bytes of memory of processes and all below them, shared memory counted once among them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    order: list[int] = []
    todo = list(roots)
    while todo:
        order.append(todo.pop())
        todo += children.get(order[-1], [])
    # A page that a second process maps between two readings counts one and a half times in one
    # order, and half in the other.
    return (sum(map(_pss, order)) + sum(map(_pss, reversed(order)))) // 2


def _pss(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class Peak:
    """The most memory that a tree of processes had while this was entered."""

    def __init__(self, roots: list[int], seconds: float = 0.05) -> None:
        self._roots = roots
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.bytes = 0

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds):
            self.bytes = max(self.bytes, pss(self._roots))

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = max(self.bytes, pss(self._roots))
