"""Endpoints of this host whose newest step is in memory of a GPU: read there, not from the host.

Where they have none, or it cannot be opened, the endpoints are read as usual, and `instead` says
why.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.errors import DamagedError, EndpointError, ManifestError, RelayError
from torchrelay.record.encoding import content_digest, decode_at_rest
from torchrelay.record.schema import Record
from torchrelay.sources.connection import Host
from torchrelay.sources.endpoint import KEEPER_SECONDS, POLL_SECONDS, EndpointSource
from torchrelay.sources.lent_device import DeviceLentStep, LentDevice
from torchrelay.sources.lent_memory import ASK_SECONDS, DeviceLeaseRequest, LocalFacts
from torchrelay.sources.remote_step import RemoteStep

NAME = "cuda_ipc"  # in reports
_MARGIN = 0.1  # seconds that an answer may take on its way

_local = msgspec.json.Decoder(LocalFacts)


class _KnownSockets:
    """The Unix sockets of servers that this process has read from: a subscriber asks for each
    version, and would otherwise ask for the same name first. Another server at the same address has
    another name, and connections to the old one are refused."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str | None], LocalFacts] = {}
        self._lock = threading.Lock()

    def of(self, host: Host, token: str | None) -> tuple[LocalFacts, bool]:
        """The facts, and whether they were known."""
        key = host.url, token
        with self._lock:
            if key in self._known:
                return self._known[key], True
        answer = host.get("/local.json", seconds=KEEPER_SECONDS)
        if answer.status != 200:
            raise EndpointError(f"{host.url} answered {answer.status}: {answer.text}")
        with self._lock:
            found = self._known[key] = _local.decode(answer.body)
            while len(self._known) > 256:
                self._known.pop(next(iter(self._known)))
        return found, False

    def forget(self, host: Host, token: str | None) -> None:
        with self._lock:
            self._known.pop((host.url, token), None)


_sockets = _KnownSockets()


class DeviceSource:
    """See `seam.Source`. `step`: the one that is wanted, or the newest. `verify`: digests are made
    on the device and compared when a step is opened."""

    def __init__(
        self, endpoint: EndpointSource, *, step: int | None = None, verify: bool = False
    ) -> None:
        self.endpoint, self._step, self._verify = endpoint, step, verify
        self._token = endpoint.access.secret()
        self._lent: LentDevice | None = None  # of the step that was listed
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
        while deadline.early() > 2 * _MARGIN:
            begun = time.monotonic()
            seconds = min(deadline.early() - _MARGIN, POLL_SECONDS)
            request = DeviceLeaseRequest(newer_than=newer_than, wait_ms=int(1000 * seconds))
            lent = self._ask(request, deadline, seconds)
            if lent is not None:
                return [lent.lease.step]
            if time.monotonic() - begun < seconds - _MARGIN:
                break  # a newer step is in host memory, or the server lends nothing
        return self.endpoint.wait(newer_than, deadline)

    @property
    def lent(self) -> LentDevice | None:
        """The lease of the step that was listed last, until it is opened."""
        return self._lent

    def take(self) -> LentDevice | None:
        """The same; the caller closes it."""
        lent, self._lent = self._lent, None
        self.used = self.used or lent is not None
        return lent

    def _ask(
        self, request: DeviceLeaseRequest, deadline: Deadline, wait: float = 0.0
    ) -> LentDevice | None:
        """A lease of the first server, which is kept until its step is opened."""
        self._give_back()
        seconds = min(ASK_SECONDS + wait, max(deadline.left(), 0.01))
        try:
            self._lent = self._lease(self.endpoint.hosts[0], request, seconds)
        except (OSError, EndpointError) as fault:
            self.instead[NAME] = str(fault)
        return self._lent

    def _lease(self, host: Host, request: DeviceLeaseRequest, seconds: float) -> LentDevice:
        for _ in range(2):
            facts, known = self._facts(host)
            try:
                return LentDevice(facts, request, seconds)
            except ConnectionRefusedError:  # another server is there now
                _sockets.forget(host, self._token)
                if not known:
                    raise
        raise OSError("the server does not listen at its Unix socket")

    def _facts(self, host: Host) -> tuple[LocalFacts, bool]:
        try:
            return _sockets.of(host, self._token)
        except msgspec.MsgspecError as fault:
            text = f"{host.url} answers in another way than an endpoint: {fault}"
            raise EndpointError(text) from None

    # One step.

    def open(self, step: int | None, deadline: Deadline) -> DeviceLentStep | RemoteStep:
        """A step: on the GPU if all of it is there, else as the endpoints have it."""
        self.used = False
        listed = self._lent
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
        self._lent, lease = None, listed.lease
        lent = [listed]
        try:
            record = _record(listed)
            here = self.endpoint.hosts[0]
            ranks = lease.ranks if set(lease.places) - {0} else []
            for rank in sorted(set(lease.places)) if ranks else ():
                if ranks[rank] != here.url and rank:
                    host = self.endpoint.host(ranks[rank], here)
                    request = DeviceLeaseRequest(lease.snapshot)
                    lent.append(self._lease(host, request, min(ASK_SECONDS, deadline.left())))
            _check_volumes(record, lent)
            if self._verify:
                for one in lent:
                    one.check([file for file in record.volumes if file.name in one.lease.volumes])
            return DeviceLentStep(self.name, record, lease.snapshot, lent)
        except BaseException:
            for one in lent:
                one.close()
            raise

    def _give_back(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.close()

    def end(self, reason: str = "", nbytes: int = 0) -> None:
        self._give_back()
        if not self.used:
            self.endpoint.end(reason, nbytes)
            return
        for host in self.endpoint.hosts:
            host.close()


def _record(lent: LentDevice) -> Record:
    """The record of a step; `EndpointError` unless it is that of the lease."""
    lease = lent.lease
    try:
        record = decode_at_rest(lease.record)
    except ManifestError as fault:
        raise EndpointError(f"the server has no valid record: {fault.message}") from fault
    if record.step != lease.step or content_digest(record) != lease.snapshot:
        raise EndpointError("the server sends a record of something else than it lends")
    return record


def _check_volumes(record: Record, lent: list[LentDevice]) -> None:
    """`DamagedError` unless all volumes are lent, with their sizes."""
    sizes = {name: one.lease.volumes[name][1] for one in lent for name in one.lease.volumes}
    for file in record.volumes:
        if sizes.get(file.name) != file.nbytes:
            raise DamagedError(f"{file.name} is not in memory of a GPU as the record has it")
