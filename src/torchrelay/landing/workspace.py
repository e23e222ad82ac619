"""The workspace of a landing: memory to put a state in, and threads to copy it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Moves, copy_one_by_one

LARGE_BYTES = 1 << 20  # what is smaller is torch's own: its allocator reuses small pieces well


class Workspace:
    """Memory by torch, copies one after the other. `memory.pool` has another workspace, with memory
    that is kept, several threads and kernels."""

    def buffers(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """A host buffer of bytes for each of `sizes`, each with a storage of its own.
        `MismatchError` if memory runs out."""
        return [allocate(nbytes) for nbytes in sizes]

    def stage(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """One buffer for a staged copy."""
        return allocate(nbytes, device)

    def first_read_only(self, addresses: Numbers, sizes: Numbers) -> int:
        """The first of some ranges of host memory that cannot be written; -1 if there is none."""
        return -1

    def copy(
        self, moves: Moves, *, alone: bool = True, also: Sequence[Callable[[], object]] = ()
    ) -> None:
        """Copy memory by address. `alone=False`: other threads do the same at the time. `also` has
        other jobs, which are done in any order."""
        copy_one_by_one(moves)
        for job in also:
            job()

    def copy_by_address(self, moves: Moves, device: torch.device) -> bool:
        """Copy memory of one device by address; whether that can be done here."""
        return False


def allocate(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError, AssertionError) as fault:  # the last: no such device
        raise MismatchError(f"no memory for {nbytes} bytes on {device}: {fault}") from None
