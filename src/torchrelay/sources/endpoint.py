"""Endpoints as a source: which steps they have, and a step that some of them have, opened."""

from __future__ import annotations

import http.client
import secrets
import ssl
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    EndpointError,
    ManifestError,
    PeerLostError,
    RelayError,
    StepNotFoundError,
    UsageError,
)
from torchrelay.items import items_of
from torchrelay.memory.crew import Crew
from torchrelay.record.checkpoint.commit import content_digest, decode
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.sources.connection import RECORD_BYTES, Host, Reply
from torchrelay.sources.lease import LocalFacts
from torchrelay.sources.mapped_step import LentMemory, MappedStep
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.sources.seam import Absent
from torchrelay.sources.suppliers import Supplier, Suppliers

ASK_SECONDS = 20.0  # that an endpoint may take to say what it has
MAX_URLS = 64
_AT_ONCE = 16
_MARGIN = 0.1  # seconds that an answer may take on its way

Result = TypeVar("Result")


class StepFacts(msgspec.Struct):
    """A line of `/steps.json`, as far as a reader needs it."""

    step: int
    snapshot: str
    bytes: int
    volumes: int = 0  # of how many volumes it is
    here: list[str] = []  # those that the endpoint has itself


class _StepList(msgspec.Struct):
    steps: list[StepFacts]


class PlaceFacts(msgspec.Struct):
    """`/places.json`."""

    step: int
    snapshot: str
    volumes: dict[str, list[str]]
    seeds: list[str] = []


_steps = msgspec.json.Decoder(_StepList)
_places = msgspec.json.Decoder(PlaceFacts)
_local = msgspec.json.Decoder(LocalFacts)


# What a connection does that breaks off; one that is refused is not asked again.
_BROKEN = (ConnectionResetError, BrokenPipeError, http.client.IncompleteRead)


class _DamagedRecordError(EndpointError):
    """A record with wrong bytes, which may have been changed on their way."""


class OpenedEndpoint:
    """A step that endpoints have, with its record. See `seam.Opened`."""

    def __init__(self, record: Checkpoint, files: RemoteStep | MappedStep, snapshot: str) -> None:
        self.record, self.files = record, files
        self.digest = bytes.fromhex(snapshot)

    def close(self) -> None:
        self.files.close()


class EndpointSource:
    """One or several URLs. `failed` says which of them were left out, and why.

    Where a URL is this host's, and the user is the same, memory is shared, unless `same_host` is
    false; `instead` says why it is not. `verify`: digests are checked there too.
    """

    most = MAX_URLS

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        token: str | None = None,
        context: ssl.SSLContext | None = None,
        same_host: bool = True,
        verify: bool = False,
    ) -> None:
        self._same_host, self._verify = same_host, verify
        self.mapped = False  # whether the step that was opened is in memory of this host
        self.instead: dict[str, str] = {}
        listed = items_of("url", urls, str, "an endpoint's URL")
        if not 0 < len(listed) <= self.most:
            raise UsageError(f"1 to {self.most} URLs, not {len(listed)}")
        self.token, self._context = token, context
        self.reader = secrets.token_hex(16)
        self.hosts = [self.host(url) for url in dict.fromkeys(listed)]
        self.failed: dict[str, str] = {}
        self._opened: list[RemoteStep] = []

    def host(self, url: str) -> Host:
        """Another endpoint, with the same token and the same name for this reader."""
        return Host(url, token=self.token, context=self._context, reader=self.reader)

    @property
    def name(self) -> str:
        return ", ".join(host.url for host in self.hosts)

    @property
    def cost(self) -> int:
        return 0 if all(host.is_here for host in self.hosts) else 1

    def steps(
        self, deadline: Deadline, newer_than: int | None = None
    ) -> dict[int, list[tuple[Host, StepFacts]]]:
        """Who has which step. With `newer_than`, waits for a higher one."""
        while True:
            told = self._told(deadline, newer_than)
            found: dict[int, list[tuple[Host, StepFacts]]] = {}
            for host, facts in told:
                # The newest is the last: of two with one number, that one replaced the other.
                for one in {one.step: one for one in facts.steps}.values():
                    found.setdefault(one.step, []).append((host, one))
            if newer_than is None or any(one > newer_than for one in found):
                return found
            if deadline.early() < 2 * _MARGIN:
                return found

    def _told(self, deadline: Deadline, newer_than: int | None) -> list[tuple[Host, _StepList]]:
        hosts = [host for host in self.hosts if host.url not in self.failed]
        wait = min(max(deadline.early() - _MARGIN, _MARGIN), 30.0)
        query = "" if newer_than is None else f"?newer_than={newer_than}&wait_ms={1000 * wait:.0f}"
        limit = ASK_SECONDS + (0 if newer_than is None else wait) + 30
        # Who waits for a step is answered late; else one that stays away leaves the others time.
        alone = newer_than is not None or len(hosts) == 1
        seconds = min(limit, _share_of(deadline, alone))

        def ask(host: Host) -> _StepList | None:
            return self._asked(
                host,
                lambda: _decoded(host, _steps, host.get(f"/steps.json{query}", seconds=seconds)),
            )

        answers = Crew(_AT_ONCE).each(ask, hosts)
        found = [(host, a) for host, a in zip(hosts, answers, strict=True) if a is not None]
        if not found:
            raise self._nobody()
        return found

    def _asked(self, host: Host, act: Callable[[], Result]) -> Result | None:
        """What an endpoint says; None where it does not answer as one, and `failed` has why. One
        that breaks off, or whose record is damaged, is asked once more."""
        for again in (True, False):
            try:
                return act()
            except (*_BROKEN, _DamagedRecordError) as fault:
                if not again:
                    self.failed[host.url] = _reason(fault)
            except (EndpointError, OSError, http.client.HTTPException) as fault:
                self.failed[host.url] = _reason(fault)
                break
        return None

    def _nobody(self) -> RelayError:
        told = "; ".join(f"{url}: {why}" for url, why in self.failed.items())
        refused = all("answer:" not in why for why in self.failed.values())
        kind = EndpointError if refused else PeerLostError
        return kind(f"no endpoint can be read: {told}", phase="open")

    def open(self, step: int | None, deadline: Deadline) -> OpenedEndpoint:
        """A step of all URLs that have the same bytes of it; the others are left out."""
        found = self.steps(deadline)
        chosen = max(found, default=None) if step is None else step
        if chosen is None or chosen not in found:
            there = ", ".join(map(str, sorted(found))) or "none"
            raise StepNotFoundError(f"no step {chosen} at {self.name}; there: {there}", step=step)
        snapshots: dict[str, list[Host]] = {}
        for host, facts in found[chosen]:
            snapshots.setdefault(facts.snapshot, []).append(host)
        snapshot = max(snapshots, key=lambda one: len(snapshots[one]))
        for host in self.hosts:
            if host not in snapshots[snapshot]:
                other = any(host in hosts for hosts in snapshots.values())
                why = f"has other bytes of step {chosen}" if other else f"has no step {chosen}"
                self.failed.setdefault(host.url, why)
        return self._open(snapshots[snapshot], chosen, snapshot, deadline)

    def _open(
        self, hosts: list[Host], step: int, snapshot: str, deadline: Deadline
    ) -> OpenedEndpoint:
        for host in hosts:
            seconds = _share_of(deadline, host is hosts[-1])
            told = self._asked(host, lambda h=host, s=seconds: self._record(h, step, snapshot, s))  # type: ignore[misc]
            if told is not None:
                break
        else:
            raise self._nobody()
        data, record = told
        able = [host for host in hosts if host.url not in self.failed]
        suppliers = self._suppliers(able, record, snapshot, deadline)
        remote = RemoteStep(self.name, data, record, snapshot, suppliers, deadline)
        self._opened.append(remote)
        return OpenedEndpoint(record, self._nearest(remote, record, snapshot), snapshot)

    def _nearest(
        self, remote: RemoteStep, record: Checkpoint, snapshot: str
    ) -> RemoteStep | MappedStep:
        """The step in memory of this host, where it is there."""
        found = self._mapped(remote, record, snapshot)
        self.mapped = isinstance(found, MappedStep)
        if isinstance(found, Absent):
            self.instead["mapped"] = found.reason
            return remote
        return found

    def _local_facts(self, host: Host, seconds: float) -> LocalFacts:
        return _decoded(host, _local, host.get("/local.json", seconds=seconds))

    def _mapped(self, remote: RemoteStep, record: Checkpoint, snapshot: str) -> MappedStep | Absent:
        """The step in memory of this host, or why not."""
        if not self._same_host:
            return Absent("same_host=False")
        memories: list[LentMemory] = []
        try:
            for supplier in remote.suppliers.all:
                facts = self._local_facts(supplier.host, ASK_SECONDS)
                memories += LentMemory.all(facts, snapshot, self.reader)
            found = MappedStep.of(
                self.name, remote.manifest(), record, memories, trusted=not self._verify
            )
        except (OSError, http.client.HTTPException, EndpointError) as fault:
            text = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
            found = Absent(text)
        if isinstance(found, Absent):
            for memory in memories:
                memory.close()
        return found

    def _record(
        self, host: Host, step: int, snapshot: str, seconds: float
    ) -> tuple[bytes, Checkpoint]:
        answer = host.get(f"/record?step={step}", seconds=seconds, limit=RECORD_BYTES)
        if answer.status == 404:
            raise StepNotFoundError(f"no step {step} at {host.url}", step=step)
        _check(host, answer)
        if answer.headers.get("Torchrelay-Snapshot", snapshot) != snapshot:
            raise StepNotFoundError(f"step {step} was replaced while it was opened", step=step)
        try:
            record = decode(answer.body)
        except ManifestError as fault:
            raise _DamagedRecordError(f"{host.url} has no valid record: {fault.message}") from fault
        if record.step != step or content_digest(record) != snapshot:
            raise EndpointError(f"{host.url} has a record of something else than it says")
        return answer.body, record

    def _suppliers(
        self, hosts: list[Host], record: Checkpoint, snapshot: str, deadline: Deadline
    ) -> Suppliers:
        """Each volume is at a URL, or at the ranks that it names."""
        known: dict[str, Supplier] = {}
        volumes: dict[str, list[Supplier]] = {file.name: [] for file in record.files}
        path = f"/places.json?snapshot={snapshot}"
        for host in hosts:
            seconds = min(ASK_SECONDS, _share_of(deadline, host is hosts[-1] and not known))
            facts = self._asked(
                host,
                lambda h=host, s=seconds: _decoded(h, _places, h.get(path, seconds=s)),  # type: ignore[misc]
            )
            if facts is None:
                continue
            for name, urls in facts.volumes.items():
                for url in urls[:MAX_URLS] if name in volumes else ():
                    place = url or host.url
                    if place not in known:
                        known[place] = Supplier(host if place == host.url else self.host(place))
                    if known[place] not in volumes[name]:
                        volumes[name].append(known[place])
        return Suppliers(volumes, deadline, f"step {record.step}")

    def end(self, reason: str = "") -> None:
        """Tell the endpoints how it went; never raises."""
        hosts = {host.url: host for host in self.hosts if host.url not in self.failed}
        for step in self._opened:
            hosts.update({one.host.url: one.host for one in step.suppliers.all if not one.dropped})
        end = time.monotonic() + 1.0
        for host in hosts.values():
            left = end - time.monotonic()
            if left > 0:
                host.tell_end(reason, seconds=left)
            host.close()

    @property
    def supplied(self) -> dict[str, int]:
        """Bytes that came from each URL."""
        found: dict[str, int] = {}
        for step in self._opened:
            for url, nbytes in step.suppliers.bytes.items():
                found[url] = found.get(url, 0) + nbytes
        return found

    @property
    def faulty(self) -> dict[str, str]:
        """Why URLs were left out or dropped."""
        found = dict(self.failed)
        for step in self._opened:
            found.update(step.suppliers.faulty)
        return found


def _share_of(deadline: Deadline, alone: bool) -> float:
    """Seconds that an endpoint may take to answer: half of what is left, unless it is `alone`."""
    return max(deadline.left() / (1 if alone else 2), 0.01)


def _reason(fault: Exception) -> str:
    if isinstance(fault, EndpointError):
        return fault.message
    text = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
    return f"does not answer: {text if text.isprintable() else ascii(text)}"


def _check(host: Host, answer: Reply) -> None:
    if answer.status == 401:
        raise EndpointError(f"{host.url} does not take this token: {answer.text}")
    if answer.status != 200:
        raise EndpointError(f"{host.url} answered {answer.status}: {answer.text}")


def _decoded(host: Host, decoder: msgspec.json.Decoder[Result], answer: Reply) -> Result:
    _check(host, answer)
    try:
        return decoder.decode(answer.body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        raise EndpointError(
            f"{host.url} answers in another way than an endpoint: {fault}"
        ) from None
