"""Servers as a source: which steps they have, and a step that some of them have, opened.

Several endpoints each have the whole step. The keepers of a job have parts of it: a step is
available where they have all of its volumes together.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Annotated, TypeVar

import msgspec

from torchrelay.arguments import items_of
from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    EndpointError,
    ManifestError,
    PeerLostError,
    RelayError,
    StepNotFoundError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.memory.thread_pool import ThreadPool
from torchrelay.record.encoding import content_digest, decode_at_rest
from torchrelay.record.schema import Record
from torchrelay.results import Loaded, Outcome, Peer
from torchrelay.shortage import raise_shortage
from torchrelay.sources.access import Access
from torchrelay.sources.connection import RECORD_BYTES, Host, Reply
from torchrelay.sources.lent_memory import Count, LentMemory, LocalFacts
from torchrelay.sources.remote_step import RemoteStep, Supplier, Suppliers
from torchrelay.steps import MAX_STEP

ASK_SECONDS = 20.0  # that a server may take to answer a small request
KEEPER_SECONDS = 5.0  # that a keeper may take: it may be gone with its host
POLL_SECONDS = 30.0  # that one request waits for a newer step,
SHORT_POLL = 0.5  # and where another server did not answer and is asked again
END_SECONDS = 1.0  # to tell all servers that a read is over
MAX_URLS, MAX_KEEPERS = 64, 4096
_AT_ONCE = 16
_SHOWN = 3  # volumes in a message
_MARGIN = 0.1  # seconds that an answer may take on its way

Result = TypeVar("Result")
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
SnapshotId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class StepFacts(msgspec.Struct):
    """A line of `/steps.json`, as far as a reader needs it. `here`: the volumes, of `volumes`, that
    the server has itself. `state`: a digest that steps with the same state share, if it is known.
    """

    step: Step
    snapshot: SnapshotId
    bytes: Count
    volumes: Count = 0
    here: list[str] = []
    state: str = ""


class _StepList(msgspec.Struct):
    steps: list[StepFacts]


class PlaceFacts(msgspec.Struct):
    """`/places.json`: the URLs that have each volume. An empty text is the server itself."""

    volumes: dict[str, list[str]]


Holders = list[tuple[Host, StepFacts]]


_step_list = msgspec.json.Decoder(_StepList)
_places = msgspec.json.Decoder(PlaceFacts)
_local = msgspec.json.Decoder(LocalFacts)


class _DamagedRecordError(EndpointError):
    """A record with wrong bytes, which may have been changed on their way."""


# These are tried once more. A connection that is refused is not.
_PASSING = (ConnectionResetError, BrokenPipeError, _DamagedRecordError)


class EndpointSource:
    """Endpoints by their URLs, or with `job` the keepers of a job.

    On this host, for this user, memory is mapped in place of reading it over TCP, unless
    `same_host` is false; `instead` says why it is not. `verify`: mapped memory is verified too.
    `failed` says which URLs were left out, and why. `tokens`: those of URLs that have their own.
    """

    lends_gpus = True  # whether steps in memory of its GPUs are looked for

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        access: Access | None = None,
        same_host: bool = True,
        verify: bool = False,
        job: str = "",
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        listed = items_of("url", urls, str, "an endpoint's URL")
        most = MAX_KEEPERS if job else MAX_URLS
        if len(listed) > most:
            raise UsageError(f"give at most {most} URLs, not {len(listed)}")
        self.access = access or Access()
        self._token, self._context = self.access.secret(), self.access.client_context()
        self._tokens = tokens or {}
        self._same_host, self._verify, self.job = same_host, verify or bool(job), job
        self.reader = secrets.token_hex(16)
        self.hosts = [self.host(url) for url in dict.fromkeys(listed)]
        self.local: dict[str, LocalFacts] = {}  # of servers by URL, for those who ask them again
        self._begin_again()

    def _begin_again(self) -> None:
        self.failed: dict[str, str] = {}
        self.instead: dict[str, str] = {}
        self._listed: dict[int, Holders] = {}
        self._opened: list[RemoteStep] = []
        self.helpers: Iterable[Supplier] = ()  # other pullers that give parts of a step
        self._asked_for_step = False  # a server may keep a step for this reader

    def host(self, url: str, like: Host | None = None) -> Host:
        """Another server, with the same access. A token that `like` gets encrypted is not sent to
        it in clear text: `UsageError`, as for a malformed URL."""
        if like is not None and like.tls and not url.startswith("https://"):
            raise UsageError(f"{like.url} names a server without TLS, {url!r}, which gets no token")
        token = self._tokens.get(url, self._token)
        return Host(url, token=token, context=self._context, reader=self.reader)

    @property
    def name(self) -> str:
        return f"keeper {self.job}" if self.job else ", ".join(host.url for host in self.hosts)

    @property
    def cost(self) -> int:
        here = bool(self.hosts) and all(host.is_here for host in self.hosts)
        return 0 if self.job or here else 1

    @property
    def mapped(self) -> bool:
        """Whether the step that was opened last is in memory of this host."""
        return bool(self._opened) and self._opened[-1].mapped

    # Which steps there are.

    def steps(self, deadline: Deadline) -> list[int]:
        """The steps that can be read. Raises where no server answers."""
        return self._list(deadline, "", 0.0)

    def wait(self, newer_than: int, deadline: Deadline) -> list[int]:
        """The same, once there is a step above `newer_than` (-1: any), or when the time is over.
        Servers that cannot be reached are asked again until then."""
        # The first look finds what is there, also where one of several cannot be reached.
        query, wait = "", 0.0
        while True:
            begun = time.monotonic()
            self.failed.clear()
            found: list[int] = []
            try:
                found = self._list(deadline, query, wait)
            except RelayError as fault:
                refused = all(host.url in self.failed for host in self.hosts)
                for_good = refused and isinstance(fault, EndpointError)
                if for_good or deadline.early() < 2 * _MARGIN:
                    raise
            if any(step > newer_than for step in found) or deadline.early() < 2 * _MARGIN:
                return found
            if self.failed or not found:
                pause = SHORT_POLL - (time.monotonic() - begun)
                time.sleep(max(0.0, min(pause, deadline.early())))
            poll = SHORT_POLL if self.failed else POLL_SECONDS
            wait = min(max(deadline.early() - _MARGIN, _MARGIN), poll)
            query = f"?newer_than={newer_than}&wait_ms={1000 * wait:.0f}" if newer_than >= 0 else ""

    def _list(self, deadline: Deadline, query: str, wait: float) -> list[int]:
        hosts = [host for host in self.hosts if host.url not in self.failed]
        # A server that waits for a step answers late; else one that is silent leaves others time.
        seconds = _share(deadline, alone=bool(query) or len(hosts) == 1)
        seconds = min((KEEPER_SECONDS if self.job else ASK_SECONDS) + wait, seconds)
        get = partial(_get, _step_list, f"/steps.json{query}", seconds)
        answers = ThreadPool(_AT_ONCE).each(partial(self._asked, get), hosts)
        self._listed = {}
        for host, answer in zip(hosts, answers, strict=True):
            # Of two steps with one number the last replaced the first; keepers may need both.
            steps = () if answer is None else answer.steps
            newest = {(one.step, self.job and one.snapshot): one for one in steps}
            for facts in newest.values():
                self._listed.setdefault(facts.step, []).append((host, facts))
        if not any(answers):
            raise self._nobody(deadline)
        if self.job:
            self._keep_complete()
        return list(self._listed)

    def _keep_complete(self) -> None:
        """Drop steps whose volumes the keepers do not have together."""
        complete: dict[int, Holders] = {}
        lacking = []
        for step, some in self._listed.items():
            for holders in _by_snapshot(some).values():
                there = {name for _, facts in holders for name in facts.here}
                wanted = max(facts.volumes for _, facts in holders)
                if len(there) >= wanted:
                    complete.setdefault(step, []).extend(holders)
                else:
                    lacking.append(f"step {step} has {len(there)} of its {wanted} volumes")
        self._listed = complete
        if lacking and not complete:
            faults = [f"{url}: {why}" for url, why in self.failed.items()]
            raise EndpointError("; ".join([*lacking, *faults]))

    def _asked(self, get: Callable[[Host], Result], host: Host) -> Result | None:
        """A server's answer; None where it does not answer as one, and `failed` has the reason."""
        for again in (True, False):
            try:
                return get(host)
            except (EndpointError, OSError) as fault:
                raise_shortage(fault, f"ask {host.url}")
                if not (again and isinstance(fault, _PASSING)):
                    self.failed[host.url] = _reason(fault)
                    break
        return None

    def _nobody(self, deadline: Deadline, cause: str = "") -> RelayError:
        faults = [f"{url}: {why}" for url, why in self.failed.items()]
        reasons = "; ".join([*([cause] if cause else []), *faults])
        refused = all("does not answer: " not in why for why in self.failed.values())
        if deadline.passed and not refused:
            text = f"no endpoint could be read in {deadline.seconds:g} s: {reasons}"
            return TransferTimeoutError(text, phase="open")
        kind = EndpointError if refused else PeerLostError
        return kind(f"no endpoint can be read: {reasons}", phase="open")

    # One step.

    def open(self, step: int | None, deadline: Deadline) -> RemoteStep:
        """A step, or the newest, of all servers that have the same bytes of it; the others are left
        out."""
        if step is None or step not in self._listed:
            self.steps(deadline)
        step = max(self._listed, default=None) if step is None else step
        if step is None or step not in self._listed:
            there = ", ".join(map(str, sorted(self._listed))) or "none"
            text = f"no step {step} at {self.name}; available: {there}"
            raise StepNotFoundError(text, step=step)
        listed = self._listed.pop(step)  # another look asks again
        holders = max(_by_snapshot(listed).values(), key=len)
        for host in () if self.job else self.hosts:
            if all(host is not one for one, _ in holders):
                other = any(host is one for one, _ in listed)
                why = f"has other bytes of step {step}" if other else f"has no step {step}"
                self.failed.setdefault(host.url, why)
        snapshot, found = holders[0][1].snapshot, None
        self._asked_for_step = True
        for host, _ in holders:
            seconds = _share(deadline, alone=host is holders[-1][0])
            found = self._asked(partial(_record, step, snapshot, seconds), host)
            if found is not None:
                break
        if found is None:
            raise self._nobody(deadline)
        data, record = found
        suppliers = self._suppliers_of(holders, record, snapshot, deadline)
        self._map(suppliers, record, snapshot)
        opened = RemoteStep(self.name, data, record, snapshot, suppliers, verify=self._verify)
        self._opened.append(opened)
        return opened

    def digests_of(self, step: int) -> tuple[str, str]:
        """The snapshot and the state of a step that was listed last, as most of the servers have
        it; empty where they are not known."""
        holders = _by_snapshot(self._listed.get(step, []))
        most = max(holders.values(), key=len, default=[])
        states = (facts.state for _, facts in most if facts.state)
        return (most[0][1].snapshot, next(states, "")) if most else ("", "")

    def _suppliers_of(
        self, holders: Holders, record: Record, snapshot: str, deadline: Deadline
    ) -> Suppliers:
        """Each volume is at servers that list it, or at the ranks that an endpoint names."""
        known: dict[str, Supplier] = {}
        volumes: dict[str, list[Supplier]] = {file.name: [] for file in record.volumes}

        def add(name: str, url: str, host: Host) -> None:
            supplier = known.setdefault(url, Supplier(host, snapshot))
            if supplier not in volumes.get(name, [supplier]):
                volumes[name].append(supplier)

        able = [(host, facts) for host, facts in holders if host.url not in self.failed]
        for host, facts in able:
            for name in facts.here:
                add(name, host.url, host)
        for host, _ in () if all(volumes.values()) or self.job else able:
            seconds = min(ASK_SECONDS, _share(deadline, alone=host is able[-1][0]))
            get = partial(_get, _places, f"/places.json?snapshot={snapshot}", seconds)
            found = self._asked(get, host)
            for name, urls in () if found is None else found.volumes.items():
                for url in urls[:MAX_URLS]:
                    try:
                        add(name, url or host.url, self.host(url, host) if url else host)
                    except UsageError as fault:
                        self.failed[ascii(url)] = fault.message
        what = f"step {record.step} of {self.name}"
        if lacking := [name for name, some in volumes.items() if not some]:
            raise self._nobody(deadline, f"no server has {_some(lacking)} of {what}")
        return Suppliers(volumes, deadline, what)

    def _map(self, suppliers: Suppliers, record: Record, snapshot: str) -> None:
        """Have the servers of this host lend their memory, where it is that of the record."""
        if not self._same_host:
            self.instead["mapped"] = "same_host=False"
            return
        sizes = {file.name: file.nbytes for file in record.volumes}
        for supplier in suppliers.all:
            try:
                lent = LentMemory(local_facts(supplier.host), snapshot, self.reader)
                supplier.take(lent, sizes)
            except (OSError, EndpointError) as fault:
                self.instead["mapped"] = getattr(fault, "strerror", None) or str(fault)
                if not self.job:  # else the memory of some keepers is read, and others by HTTP
                    return

    # The end.

    def renewed(self) -> EndpointSource:
        """The same servers for another read, over the connections that were kept."""
        other = copy(self)
        other._begin_again()
        return other

    def end(self, reason: str = "", nbytes: int = 0, *, keep: bool = False) -> None:
        """Tell the servers how the read ended; never raises. `nbytes`: how much was landed. `keep`:
        connections to the servers that were named are kept, for a `renewed` source."""
        hosts = {host.url: host for host in self.hosts if host.url not in self.failed}
        for step in self._opened:
            hosts |= {one.name: one.host for one in step.suppliers.all if not one.dropped}
        mapped = nbytes if self.mapped else 0
        end = time.monotonic() + END_SECONDS

        def tell(host: Host) -> None:
            left = end - time.monotonic()
            if left > 0 and self._asked_for_step:
                host.report_end(reason, mapped, seconds=left)
            if not keep or host not in self.hosts:
                host.close()

        # At the same time: a server that does not hear of it keeps the step for a while, and skips
        # a publish. So one that is silent must not take the time of the others.
        ThreadPool(_AT_ONCE).each(tell, hosts.values())

    @property
    def supplied(self) -> dict[str, int]:
        """Bytes that came from each URL."""
        found = Counter[str]()
        for one in self._suppliers:
            found[one.name] += one.bytes
        return dict(+found)

    @property
    def faulty(self) -> dict[str, str]:
        """Why URLs were left out or dropped."""
        return self.failed | {one.name: one.why for one in self._suppliers if one.why}

    @property
    def _suppliers(self) -> list[Supplier]:
        steps = (step.suppliers.all for step in self._opened)
        return [*chain.from_iterable(steps), *self.helpers]

    def reported(
        self,
        loaded: Loaded,
        route: str,
        *,
        verify: bool = False,
        instead: Mapping[str, str] | None = None,
    ) -> Loaded:
        """A result with what each server gave, by a route where it was not mapped. `instead`: why
        other routes were not taken."""
        supplied = self.supplied
        route = "mapped" if self.mapped else route
        # Memory that is mapped is not counted by URL.
        given = supplied or loaded.report.sources
        peers: dict[Peer, Outcome] = {
            url: Outcome(route=route, bytes=nbytes) for url, nbytes in given.items()
        }
        for url, why in self.faulty.items():
            peers[url] = Outcome("failed", why, bytes=supplied.get(url))
        reasons = {**self.instead, **(instead or {}), **loaded.report.instead}
        verified = loaded.report.verified and (verify or not self.mapped)
        report = replace(loaded.report, peers=peers, verified=verified, instead=reasons)
        return replace(loaded, report=report)


def _some(volumes: list[str]) -> str:
    shown = ", ".join(map(ascii, volumes[:_SHOWN]))
    more = len(volumes) - _SHOWN
    return f"volume{'s' if len(volumes) > 1 else ''} {shown}{f' and {more} more' * (more > 0)}"


def _by_snapshot(listed: Holders) -> dict[str, Holders]:
    found: dict[str, Holders] = {}
    for host, facts in listed:
        found.setdefault(facts.snapshot, []).append((host, facts))
    return found


def _record(step: int, snapshot: str, seconds: float, host: Host) -> tuple[bytes, Record]:
    answer = host.get(f"/record?step={step}", seconds=seconds, limit=RECORD_BYTES)
    if answer.status == 404:
        raise StepNotFoundError(f"no step {step} at {host.url}", step=step)
    _check(host, answer)
    if answer.headers.get("torchrelay-snapshot", snapshot) != snapshot:
        raise StepNotFoundError(f"step {step} was replaced meanwhile: pull again", step=step)
    return answer.body, checked_record(host.url, answer.body, step, snapshot)


def checked_record(url: str, data: bytes, step: int, snapshot: str) -> Record:
    """The record that a server sent; `EndpointError` unless it is that of this step and content."""
    try:
        record = decode_at_rest(data)
    except ManifestError as fault:
        raise _DamagedRecordError(f"{url} has no valid record: {fault.message}") from fault
    if record.step != step or content_digest(record) != snapshot:
        raise EndpointError(f"{url} sends a record of something else than it lists")
    return record


def local_facts(host: Host) -> LocalFacts:
    """Where a server lends memory; raises `OSError` or `EndpointError` if it does not say."""
    return _get(_local, "/local.json", KEEPER_SECONDS, host)


def _share(deadline: Deadline, *, alone: bool) -> float:
    """Seconds that a server may take to answer: half of what is left, unless it is `alone`."""
    return max(deadline.left() / (1 if alone else 2), 0.01)


def _reason(fault: Exception) -> str:
    if isinstance(fault, EndpointError):
        return fault.message
    text = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
    return f"does not answer: {text if text.isprintable() else ascii(text)}"


def _check(host: Host, answer: Reply) -> None:
    if answer.status == 401:
        text = f"{host.url} does not take this token ({answer.text}): give Access(token=) its token"
        raise EndpointError(text)
    if answer.status != 200:
        raise EndpointError(f"{host.url} answered {answer.status}: {answer.text}")


def _get(decoder: msgspec.json.Decoder[Result], path: str, seconds: float, host: Host) -> Result:
    answer = host.get(path, seconds=seconds)
    _check(host, answer)
    try:
        return decoder.decode(answer.body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as fault:
        text = f"{host.url} answers in another way than an endpoint: {fault}"
        raise EndpointError(text) from None
