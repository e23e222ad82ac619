"""Large blocks of host memory, in huge pages where the kernel gives them.

A fresh block costs a page fault a page: with 4 KB pages that is slower than the transfer itself.
An allocator may or may not ask for huge pages, depending on size and history; this always does.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch

from torchrelay.memory.free import check_free
from torchrelay.memory.pages import HUGE_PAGE, private_memory


def host_block(nbytes: int) -> torch.Tensor:
    """`nbytes` of host memory, freed with the tensor; `MemoryError` if there is none."""
    if nbytes < HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    check_free(nbytes)
    try:
        size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        block = private_memory(size)
    except OSError as fault:
        raise MemoryError(str(fault)) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)[:nbytes]


def at_address(address: int, nbytes: int) -> torch.Tensor:
    """Memory of this process as bytes. It does not stay alive by this."""
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
