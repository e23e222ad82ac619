"""Buffers that outlive a transfer: the next one does not fault their pages in again."""

from __future__ import annotations

import threading

import torch

from torchrelay.memory.host import host_block


class BufferPool:
    """Buffers by size. Returned buffers are kept, up to `limit` bytes, until `clear`."""

    def __init__(self, limit: int = 512 << 20) -> None:
        self.limit = limit
        self._kept: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: str = "cpu", *, pinned: bool = False) -> torch.Tensor:
        """A buffer of at least that size; `pinned` for copies to and from a GPU."""
        with self._lock:
            for index, buffer in enumerate(self._kept):
                if buffer.numel() >= nbytes and buffer.device.type == device:
                    if pinned and not buffer.is_pinned():
                        continue
                    return self._kept.pop(index)
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if device == "cpu":
            return host_block(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back. Only one that no operation can touch any more."""
        with self._lock:
            self._kept.append(buffer)
            self._kept.sort(key=torch.Tensor.numel)
            while sum(kept.numel() for kept in self._kept) > self.limit:
                self._kept.pop(0)

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
