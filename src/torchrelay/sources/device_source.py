"""Endpoints of this host whose newest step is in memory of a GPU: read there, not from the host.

Where they have none, or it cannot be opened, the endpoints are read as usual, and `instead` says
why.
"""

from __future__ import annotations

import time
from contextlib import suppress

from torchrelay.deadlines import Deadline
from torchrelay.errors import DamagedError, EndpointError, RelayError
from torchrelay.sources.connection import Host
from torchrelay.sources.endpoint import POLL_SECONDS, EndpointSource, checked_record, local_facts
from torchrelay.sources.lent_device import DeviceLentStep, LentDevice
from torchrelay.sources.lent_memory import ASK_SECONDS, DeviceLeaseRequest
from torchrelay.sources.remote_step import RemoteStep

NAME = "cuda_ipc"  # in reports
_MARGIN = 0.1  # seconds that an answer may take on its way


class DeviceSource:
    """See `seam.Source`. `step`: the one that is wanted, or the newest. `verify`: digests are made
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
        seconds = 0.0  # the first look may have to find out where the server lends memory
        while deadline.early() > 2 * _MARGIN:
            begun = time.monotonic()
            request = DeviceLeaseRequest(newer_than=newer_than, wait_ms=int(1000 * seconds))
            lent = self._ask(request, deadline, seconds)
            if lent is not None:
                return [lent.lease.step]
            if seconds and time.monotonic() - begun < seconds - _MARGIN:
                break  # a newer step is in host memory, or the server lends nothing
            seconds = min(deadline.early() - _MARGIN, POLL_SECONDS)
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
