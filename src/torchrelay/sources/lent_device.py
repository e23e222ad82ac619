"""Memory of a GPU that servers of this host lend: a step that is copied from there, on the device.

While the connection of a lease is open, its memory is not written to. A process that publishes may
die meanwhile: then the lease is over, and nothing more is read. Memory that a process has
opened stays valid until it closes it, as CUDA counts its users.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from torchrelay.errors import DamagedError, PeerLostError
from torchrelay.memory.gpu.kernels import Tables, device_bytes
from torchrelay.memory.gpu.volumes import digests_of_volumes
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.sources.lent_memory import (
    DeviceLease,
    DeviceLeaseRequest,
    LeaseConnection,
    LocalFacts,
)
from torchrelay.stores.seam import DataReader, DeviceRun
from torchrelay.stores.writer.frames import has_hung_up
from torchrelay.transports.routes.cuda.handles import (
    Export,
    IpcError,
    Opening,
    close_opening,
    open_export,
)


class _LentVolume(NamedTuple):
    """See `memory.gpu.volumes.PlacedVolume`."""

    name: str
    start: int
    nbytes: int
    chunk_bytes: int


class LentDevice(LeaseConnection[DeviceLease]):
    """Memory of a GPU that one server lends."""

    def __init__(self, facts: LocalFacts, request: DeviceLeaseRequest, seconds: float) -> None:
        self._opened: Opening | None = None
        super().__init__(facts, request, DeviceLease, seconds)

    def _open(self) -> None:
        export = self.lease.export
        if export is None:
            raise OSError("the server lends no memory of a GPU")
        try:
            self._opened = opened = open_export(Export(export.id, export.device, export.handle))
        except IpcError as fault:
            raise OSError(str(fault)) from None
        self.device, self.address = opened.device, opened.pointer
        room = min(export.nbytes, opened.nbytes)
        if any(start + nbytes > room for start, nbytes in self.lease.volumes.values()):
            raise OSError("a volume reaches out of the memory")

    @property
    def holds(self) -> bool:
        """Whether the server still keeps the memory for this process."""
        return not has_hung_up(self._line)

    def check(self, volumes: Sequence[VolumeRecord]) -> None:
        """`DamagedError` unless every chunk of these volumes has its digest."""
        places = self.lease.volumes
        mine = sorted(
            (_LentVolume(one.name, *places[one.name], one.chunk_bytes) for one in volumes),
            key=lambda one: one.start,
        )
        recorded = {one.name: one.digests for one in volumes}
        found = digests_of_volumes(self.address, mine, self.device, Tables())
        for one, digests in zip(mine, found, strict=True):
            if digests != recorded[one.name]:
                raise DamagedError(f"{one.name} in memory of a GPU is not what was published")

    def close(self) -> None:
        if self._opened is not None:
            with suppress(RuntimeError):  # of a CUDA context that is lost
                close_opening(self._opened)
        super().close()


class DeviceLentStep:
    """A step whose volumes are all lent by servers of this host. See `seam.Opened`,
    `stores.seam.OpenStep` and `stores.seam.DeviceStep`."""

    costly_reads = False
    trusted = True  # compared when it was opened, where that was wanted

    def __init__(self, url: str, record: Record, snapshot: str, lent: Sequence[LentDevice]) -> None:
        self.url, self.record, self.snapshot = url, record, snapshot
        self.digest = bytes.fromhex(snapshot)
        self._lent = list(lent)
        self.only = lent[0].lease if len(lent) == 1 else None  # the lease, if it is of all of it
        self._place = {name: one for one in lent for name in one.lease.volumes}
        self.runs: list[DeviceRun] = []  # what was copied from there
        self.others = False  # whether anything else was read

    def note(self, runs: Sequence[DeviceRun], others: bool) -> None:
        self.runs += runs
        self.others = self.others or others

    @property
    def files(self) -> DeviceLentStep:
        return self

    def device_memory(self, name: str) -> tuple[int, int]:
        lent = self._place[name]
        return lent.device, lent.address + lent.lease.volumes[name][0]

    def check_lent(self) -> None:
        if not all(one.holds for one in self._lent):
            raise PeerLostError(
                f"the publisher at {self.url} was lost while its memory was read; nothing was "
                "written. Pull again when it is back",
                step=self.record.step,
                phase="data",
            )

    def reader(self, name: str, *, once: bool = True) -> DeviceReader:
        return DeviceReader(self, name)

    def close(self) -> None:
        while self._lent:
            self._lent.pop().close()


class DeviceReader(DataReader):
    """A volume in memory of a GPU, for what lands in host memory."""

    def __init__(self, step: DeviceLentStep, name: str) -> None:
        self._step = step
        self._device, self._address = step.device_memory(name)
        self.nbytes = next(file.nbytes for file in step.record.volumes if file.name == name)

    def read_into(self, position: int, buffers: Sequence[memoryview]) -> None:
        self._step.check_lent()
        self._step.note((), others=True)
        for view in buffers:
            if len(view):
                source = device_bytes(self._address + position, len(view), self._device)
                torch.frombuffer(view, dtype=torch.uint8).copy_(source)
                position += len(view)

    def read_cached(self, position: int, buffers: Sequence[memoryview]) -> bool:
        self.read_into(position, buffers)
        return True
