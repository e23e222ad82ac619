"""Published steps in memory of the GPU that their tensors are on.

A slot has the same bytes as the host memory of a step: its volumes one behind the other. It is
filled by one copy on the device, so a caller waits for little; digests are made there, processes of
this host read from there, and the bytes reach host memory in the background.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.describing.region import Region, Stream
from torchrelay.endpoint.server.messages import Volume
from torchrelay.errors import UsageError
from torchrelay.geometry.runs import Moves
from torchrelay.memory.gpu import kernels
from torchrelay.memory.gpu.block import DeviceBlock, rounded
from torchrelay.memory.gpu.changes import Changes, can_find, find
from torchrelay.memory.gpu.kernels import CudaError
from torchrelay.memory.gpu.side import on_side_stream, side_stream
from torchrelay.memory.gpu.spare import room_beside_training
from torchrelay.memory.gpu.volumes import split_by_volume, table_of_volumes
from torchrelay.memory.pages import host_view
from torchrelay.parts.fields import Field
from torchrelay.shares.share import Share
from torchrelay.sources.lent_memory import DeviceExport
from torchrelay.transports.routes.cuda.handles import export_of

MARGIN = 1 / 4  # of a GPU's memory that stays free where steps are kept there unasked
USUAL_SLOTS = 2
_ITEM = 16  # bytes of the largest element
CHOICES = ("auto", "host", "device")


class DeviceSlot:
    """Memory of a GPU for one step at a time, which other processes can open."""

    def __init__(self, number: int, nbytes: int, device: int) -> None:
        self.number = number
        self.block = DeviceBlock(nbytes, device)
        try:
            found = export_of(self.block.address)
        except BaseException:
            self.block.close()
            raise
        self.export = DeviceExport(found.id, found.device, found.handle, nbytes)
        self._hashed: tuple[torch.cuda.Event, torch.Tensor] | None = None  # of what was copied

    def fill(self, streams: Sequence[Stream], volumes: Sequence[Volume]) -> None:
        """Copy a share; returns when its memory may change. The caller has waited for work that
        was begun on it. Digests are made behind the copy; `digests` waits for them."""
        device = self.block.device
        rows: list[tuple[int, int, int, int]] = []
        with torch.cuda.device(device), side_stream():
            for stream, volume in zip(streams, volumes, strict=True):
                for at, region in stream.elsewhere:
                    place = volume.start + at
                    if source := region.device_address:
                        rows.append((place, source, self.block.address + place, region.nbytes))
                    elif region.nbytes:
                        self._pack(region, place)
                for at, address, nbytes in stream.host.within(0, stream.nbytes):
                    data = torch.frombuffer(host_view(address, nbytes), dtype=torch.uint8)
                    self.block.view(volume.start + at, nbytes).copy_(data)
                for low, high in stream.gaps:
                    self.block.view(volume.start + low, high - low).zero_()
            if rows:
                columns = np.array(rows, np.uint64).T
                kernels.copy(Moves(*columns), device)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            table = table_of_volumes(self.block.address, volumes)
            found = kernels.digests(table, device)
            hashed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            hashed.record()
            self._hashed = hashed, found
            copied.synchronize()

    def _pack(self, region: Region, place: int) -> None:
        """Copy a region that is cast, or is in several pieces."""
        out = self.block.view(place, region.nbytes)
        packed = out if place % _ITEM == 0 else torch.empty_like(out)
        region.read(0, region.nbytes, packed)
        if packed is not out:
            out.copy_(packed)

    def digests(self, volumes: Sequence[Volume]) -> list[bytes]:
        """The digests of each volume's chunks, made on the device."""
        assert self._hashed is not None, "nothing was copied"
        (hashed, found), self._hashed = self._hashed, None
        hashed.synchronize()
        return split_by_volume(found.cpu().numpy().tobytes(), volumes)

    def copy_to(self, arena: torch.Tensor, nbytes: int) -> None:
        """Copy everything to pinned host memory."""
        with torch.cuda.device(self.block.device), on_side_stream():
            arena[:nbytes].copy_(self.block.view(0, nbytes), non_blocking=True)

    def close(self) -> None:
        self.block.close()


class _Published(NamedTuple):
    """A step that lies in a slot."""

    slot: DeviceSlot
    layout: object
    snapshot: str


class DeviceSlots:
    """The slots of one publisher, by the numbers that its server gives them."""

    def __init__(self) -> None:
        self._slots: dict[int, DeviceSlot] = {}
        self._last: _Published | None = None

    def published(self, slot: DeviceSlot, share: Share, snapshot: str) -> None:
        """The step in a slot is shown."""
        self._last = _Published(slot, share.layout, snapshot)

    def changes(
        self,
        slot: DeviceSlot,
        share: Share,
        volumes: Sequence[Volume],
        fields: Sequence[Sequence[Field]],
    ) -> tuple[str, Changes] | None:
        """The snapshot of the step that was published last, and the elements of the one in a slot
        that differ from it: of the fields of each volume, one after the other. None where that step
        is not on the GPU, or has other volumes."""
        last, device = self._last, slot.block.device
        if last is None or last.slot is slot or last.layout is not share.layout:
            return None
        if last.slot.block.device != device or not last.slot.block.address or not can_find(device):
            return None
        placed = [
            (one.start + field.start, one.start + field.stop, field.itemsize)
            for one, each in zip(volumes, fields, strict=True)
            for field in each
        ]
        try:
            with torch.cuda.device(device), on_side_stream():
                before = last.slot.block.address
                return last.snapshot, find(before, slot.block.address, placed, device)
        except (torch.cuda.OutOfMemoryError, CudaError):  # the server compares them then
            return None

    def unfit(self, share: Share, nbytes: int, choice: str) -> str:
        """Why a share is not kept on a GPU; empty where it is."""
        if choice == "host":
            return 'stage_on="host"'
        devices = set().union(*(stream.devices for stream in share.streams))
        if len(devices) != 1:
            return f"its tensors are on {len(devices)} GPUs"
        device = _index(next(iter(devices)))
        if kernels.kernels(device) is None:
            return "the kernels cannot be loaded"
        have = [one for one in self._slots.values() if one.block.nbytes >= nbytes]
        need = rounded(nbytes) * max(0, USUAL_SLOTS - len(have))
        where = torch.device("cuda", device)
        if choice == "auto" and need and need > room_beside_training(where, MARGIN):
            return f"cuda:{device} has too little memory for {USUAL_SLOTS} copies of {nbytes} bytes"
        return ""

    def slot(self, number: int, share: Share, nbytes: int) -> DeviceSlot:
        """A slot that can be written to. `MemoryError` or `CudaError` where it cannot be made."""
        device = _index(next(iter(set().union(*(one.devices for one in share.streams)))))
        found = self._slots.get(number)
        if found is not None and (found.block.nbytes < nbytes or found.block.device != device):
            self._slots.pop(number).close()
            found = None
        if found is None:
            found = self._slots[number] = DeviceSlot(number, nbytes, device)
        return found

    def close(self) -> None:
        """Free the memory. A process that has it open keeps what it has open."""
        self._last = None
        while self._slots:
            self._slots.popitem()[1].close()

    def forget(self) -> None:
        """In a child of a fork."""
        for one in self._slots.values():
            one.block.forget()
        self._slots.clear()


UNABLE = (MemoryError, CudaError)


def check_choice(choice: str) -> str:
    """`UsageError` for another word than there are."""
    if choice not in CHOICES:
        raise UsageError(f"stage_on must be one of {', '.join(CHOICES)}, not {choice!r}")
    return choice


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
