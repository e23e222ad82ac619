"""An arena is one range of memory in as many files as it is told, here and in another process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import torchrelay as tr
from torchrelay.memory import arena
from torchrelay.memory.arena import Arena
from torchrelay.memory.pages import HUGE_PAGE, side_by_side

SIZE = 5 * HUGE_PAGE + 4096


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "LEAST_PART", HUGE_PAGE)


@pytest.mark.parametrize(("parts", "files"), [(1, 1), (2, 2), (4, 3), (16, 3)])
def test_a_second_mapping_has_every_byte(parts: int, files: int) -> None:
    """Parts are multiples of a huge page: five of these and some make three parts of two."""
    one = Arena(SIZE, parts=parts)
    assert len(one.fds) == files
    assert sum(os.fstat(fd).st_size for fd in one.fds) == SIZE
    assert all(os.fstat(fd).st_blocks * 512 >= os.fstat(fd).st_size for fd in one.fds)
    one.tensor.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))
    other = torch.frombuffer(side_by_side(one.fds, one.each, SIZE), dtype=torch.uint8)
    assert torch.equal(one.tensor, other)
    one.close()
    assert one.fds == [] and one.fd == -1
    assert other.sum() > 0  # whoever has it mapped keeps the memory


def memory_files() -> set[int]:
    """The files of memory of this process; threads of other tests may close theirs meanwhile."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "memfd:torchrelay-arena" in str(link.readlink()):
                found.add(link.stat().st_ino)
    return found


def test_no_memory_is_told_and_no_file_stays_open() -> None:
    before = memory_files()
    with pytest.raises(MemoryError, match="no arena"):
        Arena(1 << 62, parts=4)
    assert memory_files() <= before


def test_the_writer_process_writes_what_lies_across_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Arena] = []

    class Counted(Arena):
        def __init__(self, nbytes: int, *, pinned: bool = False, parts: int = 1) -> None:
            super().__init__(nbytes, pinned=pinned, parts=max(parts, 3))
            made.append(self)

    monkeypatch.setattr("torchrelay.checkpointer.share_writer.Arena", Counted)
    state = {"w": torch.randint(-100, 100, (SIZE // 2,), dtype=torch.int16)}
    with tr.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save_async(1, state).result()
        assert len(made[0].fds) > 1
        assert torch.equal(checkpointer.load().state["w"], state["w"])


def test_an_arena_has_no_more_files_than_go_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are machines with more cores than the kernel passes on descriptors."""
    monkeypatch.setattr(arena, "LEAST_PART", 1 << 21)
    made = arena.Arena(400 << 21, parts=384, populate=False)
    assert len(made.fds) <= 200 and made.each * len(made.fds) >= made.nbytes
    made.close()
