"""Free memory, by the files of the kernel, and the blocks that are compared with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrelay.errors import MismatchError, ResourceError
from torchrelay.memory import free, pages
from torchrelay.memory.arena import Arena
from torchrelay.memory.free import take_free
from torchrelay.memory.host import host_block
from torchrelay.memory.pool import CheckedWorkspace, Pool, Pooled

MIB = 1 << 20


def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str) -> Path:
    """A machine with 1,000 KiB of free memory and 24 KiB of swap; the folder of its groups."""
    meminfo = "MemTotal: 9000 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\nSwapFree: 24 kB\n"
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "cgroup").write_text(groups)
    mount = tmp_path / "groups"
    mount.mkdir()
    monkeypatch.setattr(free, "_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(free, "_GROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(free, "_MOUNT", str(mount))
    return mount


def group(folder: Path, limit: str, used: int, stat: str, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes",
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip((*names, "memory.stat"), (limit, str(used), stat), strict=True):
        (folder / name).write_text(text + "\n")


def test_the_least_of_machine_and_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = machine(tmp_path, monkeypatch, "0::/job/worker\n")
    assert free.free_bytes() == 1024 << 10
    group(mount / "job" / "worker", "max", 10, "anon 10\n", 2)
    assert free.free_bytes() == 1024 << 10
    group(mount / "job", "5000", 4000, "anon 1000\ninactive_file 500\nactive_file 200\n", 2)
    assert free.free_bytes() == 1700
    group(mount, "600", 4000, "anon 4000\n", 2)
    assert free.free_bytes() == 0


def test_groups_of_the_first_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = machine(tmp_path, monkeypatch, "7:cpu:/a\n4:memory:/of/the/host\n0::/\n")
    group(mount / "memory", "9000", 3000, "inactive_file 1\ntotal_inactive_file 100\n", 1)
    assert free.free_bytes() == 6100
    group(mount / "memory", str(2**63 - 4096), 3000, "", 1)
    assert free.free_bytes() == 1024 << 10


def test_the_total_is_the_smallest_limit_of_nested_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = machine(tmp_path, monkeypatch, "3:memory:/job/worker\n0::/job/worker\n")
    physical = free.total_bytes()
    assert physical is not None and physical > 64 * MIB
    group(mount / "job" / "worker", str(48 * MIB), 10, "", 2)
    assert free.total_bytes() == 48 * MIB
    group(mount / "job", str(40 * MIB), 10, "", 2)  # the outer one has less
    assert free.total_bytes() == 40 * MIB
    group(mount / "memory" / "job", str(32 * MIB), 10, "", 1)
    assert free.total_bytes() == 32 * MIB
    (mount / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (mount / "job" / "memory.max").write_text("max\n")
    assert free.total_bytes() == 48 * MIB


def test_a_system_that_does_not_say_checks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, monkeypatch, "0::/\n")
    (tmp_path / "meminfo").unlink()
    assert free.free_bytes() is None
    free.check_free(1 << 60)


def _reserve(nbytes: int) -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, nbytes)
        pages.reserve(fd, nbytes)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("take", "error"),
    [
        (lambda n: Arena(n).close(), MemoryError),
        (_reserve, MemoryError),
        (pages.Mapping, MemoryError),
        (host_block, MemoryError),
        (lambda n: take_free(n, "it"), ResourceError),
        (lambda n: Pool(0).take([n]), MemoryError),
        (lambda n: Pooled(Pool(0)).buffers([n // 2, n - n // 2]), MismatchError),
        (lambda n: Pooled(None).buffers([n // 2, n - n // 2]), MismatchError),
        (lambda n: CheckedWorkspace().stage(n), MismatchError),
        (lambda n: Pooled(Pool(0)).stage(n), MismatchError),
    ],
)
def test_a_block_beyond_what_is_free_is_refused_with_figures(
    take: Callable[[int], object], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free, "CHECKED_BYTES", MIB)
    monkeypatch.setattr(free, "free_bytes", lambda: 2 * MIB)
    take(MIB)
    with pytest.raises(error, match=r"3145728 bytes.*2097152 are free"):
        take(3 * MIB)
