"""Servers as a source: which steps they have, and a step that some of them have, opened.

Several endpoints each have the whole step, the keepers of a job have parts of it: `server_kinds`
has what differs.
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
from typing import TypeVar

from torchrelay.arguments import items_of
from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    EndpointError,
    PeerLostError,
    RelayError,
    StepNotFoundError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.memory.thread_pool import ThreadPool
from torchrelay.record.schema import Record
from torchrelay.results import Loaded, Outcome, Peer
from torchrelay.shortage import raise_shortage
from torchrelay.sources.access import Access
from torchrelay.sources.connection import Host
from torchrelay.sources.lent_memory import LentMemory, LocalFacts
from torchrelay.sources.remote_step import RemoteStep, Supplier, Suppliers
from torchrelay.sources.requests import (
    DamagedRecordError,
    holders_of,
    listed_steps,
    local_facts,
    record_of,
    time_share,
)
from torchrelay.sources.server_kinds import Endpoints, Holders, ServerKind, by_snapshot

POLL_SECONDS = 30.0  # that one request waits for a newer step,
SHORT_POLL = 0.5  # and where another server did not answer and is asked again
END_SECONDS = 1.0  # to tell all servers that a read is over
MAX_HOLDERS = 64  # servers of a volume that one names
_AT_ONCE = 16
_SHOWN = 3  # volumes in a message
_MARGIN = 0.1  # seconds that an answer may take on its way

Result = TypeVar("Result")

# These are tried once more. A connection that is refused is not.
_PASSING = (ConnectionResetError, BrokenPipeError, DamagedRecordError)


class EndpointSource:
    """Servers by their URLs: endpoints, unless `kind` says otherwise.

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
        kind: ServerKind | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.kind: ServerKind = kind or Endpoints()
        listed = items_of("url", urls, str, "an endpoint's URL")
        if len(listed) > self.kind.most:
            raise UsageError(f"give at most {self.kind.most} URLs, not {len(listed)}")
        self.access = access or Access()
        self._token, self._context = self.access.secret(), self.access.client_context()
        self._tokens = tokens or {}
        self._same_host, self._verify = same_host, verify or self.kind.verifies
        self.reader = secrets.token_hex(16)
        self.hosts = [self.host(url) for url in dict.fromkeys(listed)]
        self.local: dict[str, LocalFacts] = {}  # of servers by URL, for those who ask them again
        self._begin_again()

    def _begin_again(self) -> None:
        self.failed: dict[str, str] = {}
        self._silent: set[str] = set()  # URLs that did not answer when they were asked last
        self.instead: dict[str, str] = {}
        self._listed: dict[int, Holders] = {}
        self._opened: list[RemoteStep] = []
        self.helpers: Iterable[Supplier] = ()  # other pullers that give parts of a step
        self._requested_step = False  # a server may keep a step for this reader

    def host(self, url: str, like: Host | None = None) -> Host:
        """Another server, with the same access. A token that `like` gets encrypted is not sent to
        it in clear text: `UsageError`, as for a malformed URL."""
        if like is not None and like.tls and not url.startswith("https://"):
            raise UsageError(f"{like.url} names a server without TLS, {url!r}, which gets no token")
        token = self._tokens.get(url, self._token)
        return Host(url, token=token, context=self._context, reader=self.reader)

    @property
    def name(self) -> str:
        return self.kind.name([host.url for host in self.hosts])

    @property
    def cost(self) -> int:
        return self.kind.cost(bool(self.hosts) and all(host.is_here for host in self.hosts))

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
        seconds = time_share(deadline, alone=bool(query) or len(hosts) == 1)
        seconds = min(self.kind.seconds + wait, seconds)
        answers = ThreadPool(_AT_ONCE).each(
            lambda host: self._requested(host, lambda: listed_steps(host, query, seconds)), hosts
        )
        if all(answer is None for answer in answers):
            self._listed = {}
            raise self._nobody(deadline)
        found = ((host, answer or ()) for host, answer in zip(hosts, answers, strict=True))
        self._listed, lacking = self.kind.list(found)
        if lacking and not self._listed:
            raise EndpointError("; ".join([*lacking, *self._faults()]))
        return list(self._listed)

    def _requested(self, host: Host, get: Callable[[], Result]) -> Result | None:
        """A server's answer; None where it does not answer as one, and `failed` has the reason."""
        self._silent.discard(host.url)
        for again in (True, False):
            try:
                return get()
            except (EndpointError, OSError) as fault:
                raise_shortage(fault, f"ask {host.url}")
                if again and isinstance(fault, _PASSING):
                    continue
                if isinstance(fault, EndpointError):
                    self.failed[host.url] = fault.message
                else:
                    self.failed[host.url] = f"does not answer: {_reason(fault)}"
                    self._silent.add(host.url)
                break
        return None

    def _faults(self) -> list[str]:
        return [f"{url}: {why}" for url, why in self.failed.items()]

    def _nobody(self, deadline: Deadline, cause: str = "") -> RelayError:
        reasons = "; ".join([*([cause] if cause else []), *self._faults()])
        refused = self._silent.isdisjoint(self.failed)
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
        holders = max(by_snapshot(listed).values(), key=len)
        for host in self.hosts if self.kind.whole else ():
            if all(host is not one for one, _ in holders):
                other = any(host is one for one, _ in listed)
                why = f"has other bytes of step {step}" if other else f"has no step {step}"
                self.failed.setdefault(host.url, why)
        snapshot, found = holders[0][1].snapshot, None
        self._requested_step = True
        for host, _ in holders:
            seconds = time_share(deadline, alone=host is holders[-1][0])
            found = self._requested(host, partial(record_of, host, step, snapshot, seconds))
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
        holders = by_snapshot(self._listed.get(step, []))
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
        for host, _ in able if self.kind.whole and not all(volumes.values()) else ():
            left = time_share(deadline, alone=host is able[-1][0])
            get = partial(holders_of, host, snapshot, min(self.kind.seconds, left))
            for name, urls in (self._requested(host, get) or {}).items():
                for url in urls[:MAX_HOLDERS]:
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
                if self.kind.whole:  # of keepers each may have other volumes
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
            if left > 0 and self._requested_step:
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
        chosen = supplied or loaded.report.sources
        peers: dict[Peer, Outcome] = {
            url: Outcome(route=route, bytes=nbytes) for url, nbytes in chosen.items()
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


def _reason(fault: Exception) -> str:
    text = getattr(fault, "strerror", None) or str(fault) or type(fault).__name__
    return text if text.isprintable() else ascii(text)
