"""The means of a landing: memory to put a state in, and threads to copy it.

The plain way is here. `memory.pool` has another, with memory that is kept and several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.runs import Moves, copy_one_by_one
from torchrelay.state.tensors import raw_of

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
LARGE_BYTES = 1 << 20  # what is smaller is torch's own: its allocator reuses small pieces well


class Workspace(Protocol):
    def room(
        self, sizes: Sequence[int], device: torch.device | str = "cpu"
    ) -> list[torch.Tensor] | None:
        """A buffer of bytes for each of `sizes`, each with a storage of its own.

        None: have torch allocate them, as it would anyway. `MismatchError` if memory runs out.
        """

    def stage(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """One buffer for a staged copy."""

    def copy(
        self, moves: Moves, *, alone: bool = True, also: Sequence[Callable[[], object]] = ()
    ) -> None:
        """Copy memory by address. `alone=False`: other threads do the same at the time. `also` has
        other jobs, which are done in any order."""

    def copy_on_device(self, pairs: Pairs) -> None:
        """Copy to each first, a contiguous tensor on a device, the bytes of the second."""

    def copy_by_address(self, moves: Moves, device: torch.device) -> bool:
        """Copy memory of one device by address; whether that can be done here."""


class PlainWorkspace:
    """Memory by torch, copies one after the other."""

    def room(
        self, sizes: Sequence[int], device: torch.device | str = "cpu"
    ) -> list[torch.Tensor] | None:
        return None

    def stage(self, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
        return allocate(nbytes, device)

    def copy(
        self, moves: Moves, *, alone: bool = True, also: Sequence[Callable[[], object]] = ()
    ) -> None:
        copy_one_by_one(moves)
        for job in also:
            job()

    def copy_on_device(self, pairs: Pairs) -> None:
        for tensor, data in pairs:
            raw_of(tensor).view(-1).view(torch.uint8).copy_(data)

    def copy_by_address(self, moves: Moves, device: torch.device) -> bool:
        return False


def allocate(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError, AssertionError) as fault:  # the last: no such device
        raise MismatchError(f"no memory for {nbytes} bytes on {device}: {fault}") from None


def large_rooms(sizes: Mapping[int, int], means: Workspace) -> dict[int, torch.Tensor]:
    """Memory for those of the storages, all of host memory, that torch is not to allocate."""
    large = [storage for storage, nbytes in sizes.items() if nbytes >= LARGE_BYTES]
    rooms = means.room([sizes[storage] for storage in large]) if large else None
    return {} if rooms is None else dict(zip(large, rooms, strict=True))
