"""Endpoints of this host whose newest step is in memory of a GPU: copied there, on the device.

Where they have none, or it cannot be opened, the endpoints are read as usual, and `instead` says
why. While the connection of a lease is open, its memory is not written to. A process that publishes
may die meanwhile: then the lease is over, and nothing more is read. Memory that a process has
opened stays valid until it closes it, as CUDA counts its users.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch

from torchrelay.deadlines import Deadline
from torchrelay.errors import DamagedError, EndpointError, PeerLostError, RelayError
from torchrelay.memory.gpu.kernels import CudaError, device_bytes
from torchrelay.memory.gpu.volumes import digests_of_volumes
from torchrelay.processes.frames import has_hung_up
from torchrelay.record.schema import Record, VolumeRecord
from torchrelay.results import Loaded, Outcome
from torchrelay.sources.connection import Host
from torchrelay.sources.endpoint import POLL_SECONDS, EndpointSource
from torchrelay.sources.lent_memory import (
    ASK_SECONDS,
    DeviceLease,
    DeviceLeaseRequest,
    LocalFacts,
    borrow,
)
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.sources.requests import checked_record, local_facts
from torchrelay.stores.step_files import DataReader, DeviceRun, StepFiles
from torchrelay.transports.routes.cuda.handles import (
    Export,
    Opening,
    close_opening,
    open_export,
)

NAME = "cuda_ipc"  # in reports
_lease = msgspec.msgpack.Decoder(DeviceLease)
_MARGIN = 0.1  # seconds that an answer may take on its way


class _LentVolume(NamedTuple):
    """See `memory.gpu.volumes.PlacedVolume`."""

    name: str
    start: int
    nbytes: int
    chunk_bytes: int


class LentDevice:
    """Memory of a GPU that one server lends, until `close`."""

    def __init__(self, facts: LocalFacts, request: DeviceLeaseRequest, seconds: float) -> None:
        with ExitStack() as resources:
            self._line, self.lease = borrow(facts, request, _lease, resources, seconds)
            export = self.lease.export
            if export is None:
                raise OSError("the server lends no memory of a GPU")
            try:
                opened = open_export(Export(export.id, export.device, export.handle))
            except CudaError as fault:
                raise OSError(str(fault)) from None
            resources.callback(_close, opened)
            self.device, self.address = opened.device, opened.pointer
            room = min(export.nbytes, opened.nbytes)
            if any(start + nbytes > room for start, nbytes in self.lease.volumes.values()):
                raise OSError("a volume reaches out of the memory")
            self.close = resources.pop_all().close

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
        found = digests_of_volumes(self.address, mine, self.device)
        for one, digests in zip(mine, found, strict=True):
            if digests != recorded[one.name]:
                raise DamagedError(f"{one.name} in memory of a GPU is not what was published")


def _close(opened: Opening) -> None:
    with suppress(RuntimeError):  # of a CUDA context that is lost
        close_opening(opened)


class DeviceLentStep(StepFiles):
    """A step whose volumes are all lent by servers of this host. See `Opened`."""

    costly_reads = False
    on_gpus = True
    trusted = True  # compared when it was opened, where that was wanted

    def __init__(self, url: str, record: Record, snapshot: str, lent: Sequence[LentDevice]) -> None:
        self.url, self.record, self.snapshot = url, record, snapshot
        self.digest = bytes.fromhex(snapshot)
        self._lent = list(lent)
        self.only = lent[0].lease if len(lent) == 1 else None  # the lease, if it is of all of it
        self._place = {name: one for one in lent for name in one.lease.volumes}
        self.runs: list[DeviceRun] = []  # what was copied from there
        self.others = False  # whether anything else was read

    def note_copies(self, runs: Sequence[DeviceRun], others: bool) -> None:
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

    def read_into(self, position: int, view: memoryview) -> None:
        self._step.check_lent()
        self._step.note_copies((), others=True)
        if len(view):
            source = device_bytes(self._address + position, len(view), self._device)
            torch.frombuffer(view, dtype=torch.uint8).copy_(source)


class DeviceSource:
    """See `Source`. `step`: the one that is wanted, or the newest. `verify`: digests are made
    on the device and compared when a step is opened."""

    def __init__(
        self, endpoint: EndpointSource, *, step: int | None = None, verify: bool = False
    ) -> None:
        self.endpoint, self._step, self._verify = endpoint, step, verify
        self.lent: LentDevice | None = None  # of the step that was listed, until it is opened
        self.used = False  # whether the step that was opened last is in memory of a GPU
        self.instead: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def cost(self) -> int:
        return self.endpoint.cost

    # Which steps there are.

    def steps(self, deadline: Deadline) -> list[int]:
        lent = self._ask(DeviceLeaseRequest(step=self._step), deadline)
        return self.endpoint.steps(deadline) if lent is None else [lent.lease.step]

    def wait(self, newer_than: int, deadline: Deadline) -> list[int]:
        """As `EndpointSource.wait`: a step that is on a GPU only counts, too."""
        request, seconds = DeviceLeaseRequest(), 0.0  # waits for a step that is being published
        while deadline.early() > 2 * _MARGIN:
            begun = time.monotonic()
            lent = self._ask(request, deadline, seconds)
            if lent is not None and lent.lease.step > newer_than:
                return [lent.lease.step]
            if seconds and time.monotonic() - begun < seconds - _MARGIN:
                break  # a newer step is in host memory, or the server lends nothing
            seconds = min(deadline.early() - _MARGIN, POLL_SECONDS)
            request = DeviceLeaseRequest(newer_than=newer_than, wait_ms=int(1000 * seconds))
        self._give_back()
        return self.endpoint.wait(newer_than, deadline)

    def take(self) -> LentDevice | None:
        """The lease of the step that was listed last; the caller closes it."""
        lent, self.lent = self.lent, None
        self.used = self.used or lent is not None
        return lent

    def _ask(
        self, request: DeviceLeaseRequest, deadline: Deadline, wait: float = 0.0
    ) -> LentDevice | None:
        """A lease of the first server, which is kept until its step is opened."""
        self._give_back()
        seconds = min(ASK_SECONDS + wait, max(deadline.left(), 0.01))
        try:
            self.lent = self._lease(self.endpoint.hosts[0], request, seconds)
        except (OSError, EndpointError) as fault:
            self.instead[NAME] = str(fault)
        return self.lent

    def _lease(self, host: Host, request: DeviceLeaseRequest, seconds: float) -> LentDevice:
        known = self.endpoint.local.get(host.url)
        if known is not None:
            with suppress(ConnectionRefusedError):  # another server is there now
                return LentDevice(known, request, seconds)
        facts = self.endpoint.local[host.url] = local_facts(host)
        return LentDevice(facts, request, seconds)

    # One step.

    def open(self, step: int | None, deadline: Deadline) -> DeviceLentStep | RemoteStep:
        """A step: on the GPU if all of it is there, else as the endpoints have it."""
        self.used = False
        listed = self.lent
        if listed is None or (step is not None and listed.lease.step != step):
            listed = self._ask(DeviceLeaseRequest(step=step), deadline)
        if listed is not None:
            try:
                found = self._opened(listed, deadline)
                self.used = True
                self.instead.pop(NAME, None)
                return found
            except (OSError, RelayError) as fault:
                self.instead[NAME] = str(fault)
            with suppress(RelayError):  # its bytes may still be on their way to host memory
                self.endpoint.wait(listed.lease.step - 1, deadline)
        return self.endpoint.open(step, deadline)

    def _opened(self, listed: LentDevice, deadline: Deadline) -> DeviceLentStep:
        self.lent, lease = None, listed.lease
        lent = [listed]
        try:
            here = self.endpoint.hosts[0]
            record = checked_record(here.url, lease.record, lease.step, lease.snapshot)
            for rank in sorted(set(lease.places) - {0}):
                if lease.ranks[rank] != here.url:
                    host = self.endpoint.host(lease.ranks[rank], here)
                    request = DeviceLeaseRequest(lease.snapshot)
                    lent.append(self._lease(host, request, min(ASK_SECONDS, deadline.left())))
            sizes = {
                name: nbytes for one in lent for name, (_, nbytes) in one.lease.volumes.items()
            }
            for file in record.volumes:
                if sizes.get(file.name) != file.nbytes:
                    text = f"{file.name} is not in memory of a GPU as the record has it"
                    raise DamagedError(text)
            if self._verify:
                for one in lent:
                    one.check([file for file in record.volumes if file.name in one.lease.volumes])
            return DeviceLentStep(self.name, record, lease.snapshot, lent)
        except BaseException:
            for one in lent:
                one.close()
            raise

    def _give_back(self) -> None:
        lent, self.lent = self.lent, None
        if lent is not None:
            lent.close()

    def end(self, reason: str = "", nbytes: int = 0, *, keep: bool = False) -> None:
        """As `EndpointSource.end`. Servers of a lease know by its connection that it is over."""
        self._give_back()
        if not self.used:
            self.endpoint.end(reason, nbytes, keep=keep)
        elif not keep:
            for host in self.endpoint.hosts:
                host.close()

    def reported(self, loaded: Loaded, route: str, *, verify: bool = False) -> Loaded:
        """As `EndpointSource.reported`."""
        if not self.used:
            return self.endpoint.reported(loaded, route, verify=verify, instead=self.instead)
        outcome = Outcome(route=NAME, bytes=loaded.report.bytes)
        report = replace(loaded.report, peers={self.name: outcome}, verified=verify)
        return replace(loaded, report=report)
