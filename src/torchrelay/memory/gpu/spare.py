"""A spare copy of tensors in the memory of their own device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrelay.state.tensors import copy_all, raw_of

MARGIN = 1 / 16  # of a GPU's memory


class DeviceCopy:
    """A spare copy of a share's device tensors in device memory, reused from save to save.

    Taking it is one round of kernels on the caller's stream of each device: what the trainer does
    to the tensors there afterwards comes after it. The test with several devices has stand-ins for
    them; with several real ones it has not been run.
    """

    def __init__(self) -> None:
        self._slabs: dict[torch.device, torch.Tensor] = {}
        self._events: list[torch.cuda.Event] = []  # one a device, behind the copies there

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether there are tensors on GPUs, and every one of these has room for their copy.

        The peak of a training step counts as taken, and `MARGIN` of the GPU's memory stays free in
        addition.
        """
        need = _need(tensors)
        return bool(need) and all(
            (device in self._slabs and self._slabs[device].numel() >= nbytes)
            or nbytes <= room_beside_training(device)
            for device, nbytes in need.items()
        )

    def take(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors' bits in row-major order, each where its tensor is, until the next call."""
        need = _need(tensors)
        for device, nbytes in need.items():
            slab = self._slabs.get(device)
            if slab is None or slab.numel() < nbytes:
                self._slabs.pop(device, None)
                del slab
                self._slabs[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        used = dict.fromkeys(need, 0)
        copies: list[torch.Tensor] = []
        pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
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
            spares, sources = pairs.setdefault(tensor.device, ([], []))
            spares.append(spare)
            sources.append(bits)
        self._events = []
        for device, (spares, sources) in pairs.items():
            # An event belongs to a device, and the stream that copies is the one current there.
            with torch.cuda.device(device):
                copy_all(spares, sources)
                self._events.append(torch.cuda.current_stream(device).record_event())
        return copies

    def free(self) -> None:
        """Give the memory back. Nobody uses a copy any more."""
        self._slabs.clear()

    def wait(self) -> None:
        """Until the copy is made, on every device."""
        for event in self._events:
            event.synchronize()


def _need(tensors: Sequence[torch.Tensor]) -> dict[torch.device, int]:
    """Bytes of a copy on each GPU."""
    need: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.is_cuda:
            need[tensor.device] = need.get(tensor.device, 0) + -(-tensor.nbytes // 512) * 512
    return need


def room_beside_training(device: torch.device, margin: float = MARGIN) -> int:
    """Bytes of a GPU that are free next to what training has used at its peak, but for a share."""
    free, whole = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return int(free + max(0, unused) - whole * margin)
