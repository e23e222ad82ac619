"""An allocation of GPU memory of its own, apart from torch's: other processes can open it, and with
it nothing else of this process."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

from torchrelay.memory.gpu.kernels import CudaError, check, device_bytes, driver

# CUDA shares memory between processes in pieces of this size.
_PIECE = 2 << 20


def rounded(nbytes: int) -> int:
    """Bytes of the device that a block takes."""
    return max(1, -(-nbytes // _PIECE)) * _PIECE


class DeviceBlock:
    """`nbytes` of a GPU at `address`, until `close`. `MemoryError` if there are none."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.nbytes, self.device, self.address = nbytes, device, 0
        try:
            try:
                self.address = _allocated(rounded(nbytes), device)
            except CudaError:
                torch.cuda.empty_cache()  # torch may keep what it does not use
                self.address = _allocated(rounded(nbytes), device)
        except CudaError as fault:
            raise MemoryError(f"cuda:{device} has no {nbytes} bytes: {fault}") from None

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """Some of it as a tensor of bytes, which does not keep it alive."""
        return device_bytes(self.address + start, nbytes, self.device)

    def close(self) -> None:
        """Free it. Nothing of this process uses it any more."""
        address, self.address = self.address, 0
        if address:
            # At the end of the process the driver may be gone before this object is.
            with suppress(CudaError, RuntimeError), torch.cuda.device(self.device):
                torch.cuda.synchronize()
                driver().cuMemFree_v2(ctypes.c_uint64(address))

    def forget(self) -> None:
        """In a child of a fork: the memory is the parent's."""
        self.address = 0

    def __del__(self) -> None:
        self.close()


def _allocated(nbytes: int, device: int) -> int:
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        code = driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        check(code, f"allocate {nbytes} bytes")
    return address.value
