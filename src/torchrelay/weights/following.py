"""The newest step of a publisher, as a source for a load: read by parts, or from mapped memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    PeerLostError,
    StepNotFoundError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.record.encoding import state_digest
from torchrelay.record.schema import Record
from torchrelay.results import Loaded
from torchrelay.sources.access import Access
from torchrelay.sources.device_source import DeviceLentStep, DeviceSource
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.lent_memory import DeviceLease
from torchrelay.sources.peer import PeerSource
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.stores.step_files import StepFiles, WantedBox
from torchrelay.weights.fetch import PartFetch
from torchrelay.weights.packed_volumes import PackedReader, PackedVolumes

Publisher = str | PeerSource | Sequence[str] | Sequence[PeerSource]


def publisher(place: Publisher, access: Access | None, same_host: bool) -> EndpointSource:
    """The endpoints or ranks that a caller names; `UsageError` for anything else."""
    listed = isinstance(place, Sequence) and not isinstance(place, str)
    several: list[object] = [*place] if listed else [place]  # type: ignore[misc]
    peers = [one for one in several if isinstance(one, PeerSource)]
    urls = [one for one in several if isinstance(one, str)]
    if peers and len(peers) == len(several):
        return PeerSource.of(peers, same_host=same_host)
    if urls and len(urls) == len(several):
        return EndpointSource(urls, access=access, same_host=same_host)
    raise UsageError(f"a publisher is a URL or Relay.peer(rank), or several of one kind: {place!r}")


class StepIdentity(msgspec.Struct, array_like=True, frozen=True):
    """A step, and digests of its content: of the `snapshot`, and of the `state` whichever its
    number. Empty where they are not known."""

    step: int
    snapshot: str = ""
    state: str = ""

    def same_state(self, other: StepIdentity) -> bool:
        """Whether another step is known to have the same state."""
        same = self.snapshot == other.snapshot != ""
        return same or self.state == other.state != ""

    @classmethod
    def of(cls, lease: DeviceLease) -> StepIdentity:
        """The step that a lease of a GPU's memory is of."""
        return cls(lease.step, lease.snapshot, lease.state)


class NewestStep:
    """See `Source`: of the steps of a publisher the newest alone, if it is at least
    `floor`. One is made for each update."""

    def __init__(
        self, origin: EndpointSource, packed: PackedVolumes, floor: int, *, on_gpu: bool = False
    ) -> None:
        """`on_gpu`: memory of a GPU of this host is read where the step is there."""
        self._origin, self._packed, self._floor = origin, packed, floor
        self.name, self.cost = origin.name, origin.cost
        self.device = DeviceSource(origin) if on_gpu and origin.lends_gpus else None
        self._source = self.device or origin
        self.opened: RemoteStep | DeviceLentStep | None = None  # what was opened last

    def end(self, reason: str = "", nbytes: int = 0) -> None:
        self._source.end(reason, nbytes, keep=not reason)

    def for_another(self) -> EndpointSource:
        """The servers for the next update, with the connections that were kept after this one."""
        return self._origin.renewed()

    def steps(self, deadline: Deadline) -> list[int]:
        """Waits for a step. Servers that cannot be reached are asked again until the deadline."""
        newest, fault = -1, None
        try:
            newest = max(self._source.wait(self._floor - 1, deadline), default=-1)
        except (PeerLostError, TransferTimeoutError) as lost:
            fault = lost
        if newest >= max(self._floor, 0):
            return [newest]
        wanted = f"no step from {self._floor} on" if self._floor > 0 else "no step"
        there = f"; the newest is {newest}" if newest >= 0 else ""
        unheard = "; ".join(f"{url} {why}" for url, why in self._origin.failed.items())
        advice = "wait longer, or see whether the publisher is alive"
        if fault is not None:
            advice = f"{unheard or fault.message}. Start the publisher, or wait longer"
        elif unheard:
            advice = f"{unheard}; {advice}"
        raise TransferTimeoutError(
            f"{wanted} at {self.name} in {deadline.seconds:g} s{there}: {advice}", phase="wait"
        ) from fault

    def identity(self, step: int) -> StepIdentity:
        """The content of a step that was listed, by its digests."""
        lent = None if self.device is None else self.device.lent
        if lent is not None and lent.lease.step == step:
            return StepIdentity.of(lent.lease)
        return StepIdentity(step, *self._origin.digests_of(step))

    @property
    def taken(self) -> StepIdentity:
        """The step that was opened last."""
        assert self.opened is not None
        record = self.opened.record
        assert record.step is not None
        return StepIdentity(record.step, self.opened.snapshot, state_digest(record))

    def open(self, step: int, deadline: Deadline) -> RemoteStep | PackedStep | DeviceLentStep:
        self.opened = found = self._source.open(step, deadline)
        if isinstance(found, DeviceLentStep):
            return found
        # Memory of this host is read where it is.
        return found if found.mapped else PackedStep(found, self._packed)

    def reported(self, loaded: Loaded) -> Loaded:
        """The result, with what each server gave. It is verified if every byte was compared with
        the record, or with what another server has."""
        found = self._source.reported(loaded, "parts")
        if isinstance(self.opened, RemoteStep) and not self.opened.mapped:
            found = replace(found, report=replace(found.report, verified=self._packed.verified))
        return found


class PackedStep(StepFiles):
    """A step whose bytes are fetched by parts, as soon as it is known which ones are wanted. See
    `Opened`."""

    costly_reads = False
    trusted = True  # what has come was compared with digests of the record, where it can be
    fetches_ahead = True

    def __init__(self, step: RemoteStep, packed: PackedVolumes) -> None:
        self._step, self._packed = step, packed
        self.url, self.digest = step.url, step.digest
        self.record: Record = step.record
        self._files = {file.name: file for file in step.record.volumes}

    @property
    def files(self) -> PackedStep:
        return self

    def prepare(self, wanted: Iterable[WantedBox]) -> None:
        self._packed.plan(wanted, self.record)
        try:
            PartFetch(self._step, self._packed).run()
        except FileNotFoundError as fault:
            text = f"the step was replaced while it was read: {fault.strerror}"
            raise StepNotFoundError(text, step=self.record.step) from fault

    def reader(self, name: str, *, once: bool = True) -> PackedReader:
        return PackedReader(self._files[name].nbytes, self._packed.volumes.get(name))

    def close(self) -> None:
        self._step.close()
