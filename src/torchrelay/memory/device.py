"""A spare copy of tensors in the memory of their own device."""

from __future__ import annotations

import torch

from torchrelay.state.tensors import copy_all, raw_of


class DeviceCopy:
    """A spare copy of a share's device tensors in device memory, reused from save to save.

    Taking it is one round of kernels on the caller's stream: what the trainer does to the tensors
    afterwards comes after it.
    """

    def __init__(self) -> None:
        self._slabs: dict[torch.device, torch.Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def take(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors' bits in row-major order, each where its tensor is, until the next call."""
        need: dict[torch.device, int] = {}
        for tensor in tensors:
            if tensor.is_cuda:
                need[tensor.device] = need.get(tensor.device, 0) + -(-tensor.nbytes // 512) * 512
        for device, nbytes in need.items():
            slab = self._slabs.get(device)
            if slab is None or slab.numel() < nbytes:
                self._slabs.pop(device, None)
                del slab
                self._slabs[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        used = dict.fromkeys(need, 0)
        copies: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        spares: list[torch.Tensor] = []
        for tensor in tensors:
            if not tensor.is_cuda:
                copies.append(raw_of(tensor).clone(memory_format=torch.contiguous_format))
                continue
            at = used[tensor.device]
            used[tensor.device] = at + -(-tensor.nbytes // 512) * 512
            bits = raw_of(tensor)  # as integers: a copy of floats may quiet NaNs
            spare = self._slabs[tensor.device][at : at + tensor.nbytes]
            spare = spare.view(bits.dtype).view(bits.shape)
            copies.append(spare)
            sources.append(bits)
            spares.append(spare)
        if spares:
            copy_all(spares, sources)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        return copies

    def wait(self) -> None:
        """Until the copy is made."""
        if self._event is not None:
            self._event.synchronize()
