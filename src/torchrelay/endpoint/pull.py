"""`pull`: a state from one or several endpoints.

It is a load whose steps are at URLs: the same planning, the same landing, the same rounds where
several ranks pull together.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from torchrelay.checkpointer.loader import Loaded, Loader, Wanted
from torchrelay.deadlines import Deadline, Timeout
from torchrelay.endpoint.security import check_certificate, find_token, server_context, trusted
from torchrelay.endpoint.seed import Seed, SeededFiles
from torchrelay.errors import (
    RelayError,
    StorageTimeoutError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.memory.pool import Pool, Pooled, usual_limit
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.sources.endpoint import EndpointSource, OpenedEndpoint
from torchrelay.sources.remote_step import RemoteStep
from torchrelay.sources.swarm import Swarm
from torchrelay.steps import check_step
from torchrelay.stores.retry import ONCE, Retry
from torchrelay.transports.group.assembly import Assembly

KEPT_SECONDS = 60.0  # that memory of earlier pulls is kept for another


@dataclass(frozen=True)
class PullReport:
    """How a pull went. `sources`: bytes that came from each URL; `failed`: URLs that were left out
    or dropped, and why; `instead`: why a faster way was not taken."""

    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    route: str = "http"
    sources: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    verified: bool = True
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    instead: dict[str, str] = field(default_factory=dict)


class PullResult(NamedTuple):
    """What `pull` returns: the state, its step, and how it went. With `reshare=True`, `seed` goes
    on serving the step until it is closed."""

    state: Any
    step: int
    report: PullReport
    seed: Seed | None = None


class _Shelf:
    """Endpoints as what a loader finds steps on, for one call."""

    def __init__(self, source: EndpointSource, deadline: Deadline, newer_than: int | None) -> None:
        self._source, self._deadline, self._newer_than = source, deadline, newer_than
        self.waits = newer_than is not None  # for a step that is not there yet

    @property
    def url(self) -> str:
        return self._source.name

    def steps(self, patience: Retry = ONCE) -> list[int]:
        found = self._source.steps(self._deadline, self._newer_than)
        if self._newer_than is None:
            return list(found)
        newer = [step for step in found if step > self._newer_than]
        if not newer:
            raise self.in_vain()
        self.waits = False
        return newer

    def in_vain(self) -> TransferTimeoutError:
        return TransferTimeoutError(
            f"no step above {self._newer_than} at {self.url} in {self._deadline.seconds:g} s",
            phase="wait",
        )

    def open(self, step: int, patience: Retry = ONCE) -> OpenedEndpoint:
        return self._source.open(step, self._deadline)

    def note_damaged(self, step: int) -> None:
        pass


class SeedingShelf(_Shelf):
    """The same, where a step is put together in memory that others read from meanwhile."""

    def __init__(
        self,
        source: EndpointSource,
        deadline: Deadline,
        newer_than: int | None,
        token: str | None,
        context: ssl.SSLContext | None,
        progress: ProgressCallback | None,
    ) -> None:
        super().__init__(source, deadline, newer_than)
        self._token, self._context, self._progress = token, context, progress
        self.seed: Seed | None = None
        self.swarm: Swarm | None = None

    def open(self, step: int, patience: Retry = ONCE) -> OpenedEndpoint:
        opened = super().open(step, patience)
        remote, record = opened.files, opened.record
        if not isinstance(remote, RemoteStep):
            return opened  # in memory of this host: there is nothing to fetch
        origin = next(host for host in self._source.hosts if host.url not in self._source.failed)
        self.close()
        snapshot = opened.digest.hex()
        self.seed = seed = Seed(origin.address, self._token, record.files, self._context)
        seed.show(step, snapshot, remote.manifest())
        self.swarm = Swarm(
            origin,
            remote,
            snapshot,
            record.files,
            seed,
            own=seed.url,
            connect=self._source.host,
            deadline=self._deadline,
            progress=Bar(self._progress, sum(file.nbytes for file in record.files)).add,
        )
        self.swarm.run()
        seed.announce(self._source.host(origin.url), snapshot)
        files = SeededFiles(seed, remote.url, remote.manifest(), record.files)
        return OpenedEndpoint(record, files, snapshot)

    def close(self) -> None:
        if self.swarm is not None:
            self.swarm.stop()
        if self.seed is not None:
            self.seed.close()


def pull(
    url: str | Iterable[str],
    *,
    into: object = None,
    step: int | None = None,
    newer_than: int | None = None,
    strict: bool = True,
    only: str | Sequence[str] = (),
    atomic: bool = True,
    device: torch.device | str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    cafile: str | None = None,
    group: Any = None,
    same_host: bool = True,
    verify: bool | None = None,
    reshare: bool = False,
    certfile: str | None = None,
    keyfile: str | None = None,
    timeout: Timeout = 300.0,
    progress: ProgressCallback | None = None,
) -> PullResult:
    """Read a state from an endpoint, or from several that have the same step.

    - `into`: a state of tensors and objects that takes the values, of any layout or mesh; `None`
      makes new tensors, on `device`.
    - `step`: this one, or `StepNotFoundError`; `newer_than`: waits for a higher one than this.
    - `strict`: missing and extra paths are refused. `only`: patterns of paths, and nothing else.
    - `atomic`: nothing of `into` is written before every digest held. `False` writes as bytes
      come, and raises `TornStateError` if it cannot finish.
    - `token`, or `token_file`, or the environment's TORCHRELAY_TOKEN. `cafile`: certificates that
      an https endpoint's is signed by, beside the system's.
    - `group`: ranks that pull one step together, each its part of `into`: all of them land it, or
      none. By default this process is on its own.
    - `same_host`: whether memory of an endpoint of this host and this user is shared in place of
      reading it over TCP. `verify=True`: digests are checked there too, as they are over TCP.
    - `reshare`: serve what has come while the rest arrives, and take from others who do so too.
      The whole step is read, into memory of its own, which new tensors keep; `seed` of the result
      serves it on. `certfile`, `keyfile`: what it serves by where the endpoint is https; its
      certificate names the address of this host, and is signed by what others have as `cafile`.
    """
    secret = find_token(token, token_file)
    source = EndpointSource(
        url,
        token=secret,
        context=trusted(cafile),
        same_host=same_host and not reshare,
        verify=bool(verify),
    )
    for one in (step, newer_than):
        if one is not None:
            check_step(one)
    if step is not None and newer_than is not None:
        raise UsageError("give step= or newer_than=, not both")
    deadline = Deadline(timeout)
    assembly = Assembly.lasting(group, "pull")
    wanted = Wanted.of(
        into,
        step,
        strict=strict,
        only=only,
        atomic=atomic,
        device=device,
        progress=None if reshare else progress,  # then it tells of what is fetched, not placed
    )
    seeding = None
    if reshare:
        context = _own_certificate(source, certfile, keyfile)
        seeding = SeedingShelf(source, deadline, newer_than, secret, context, progress)
    shelf = seeding or _Shelf(source, deadline, newer_than)
    loader = Loader(shelf, assembly, None, Pooled(_pool(os.getpid())))
    reason = "it was interrupted"
    try:
        loaded = loader.load(assembly.call(), wanted, deadline)
        reason = ""
    except StorageTimeoutError as fault:
        reason = "it took too long"
        if shelf.waits:
            raise shelf.in_vain() from fault
        raise TransferTimeoutError(
            f"{source.name} did not give the state in {deadline.seconds:g} s; it gave "
            f"{sum(source.supplied.values())} bytes",
            step=step,
            phase="data",
        ) from fault
    except RelayError as fault:
        reason = fault.message
        raise
    finally:
        source.end(reason)
        if reason and seeding is not None:
            seeding.close()
    return _pulled(loaded, source, bool(verify), seeding)


@cache
def _pool(process: int) -> Pool:
    """Memory that a pull of this process leaves for the next one. A child of a fork has its own."""
    return Pool(usual_limit(), seconds=KEPT_SECONDS)


def _pulled(
    loaded: Loaded, source: EndpointSource, verify: bool, seeding: SeedingShelf | None
) -> PullResult:
    swarm = None if seeding is None else seeding.swarm
    report = PullReport(
        bytes=loaded.report.bytes,
        seconds=loaded.report.seconds,
        route="mapped" if source.mapped else "http",
        sources={**source.supplied, **(swarm.supplied if swarm else {})},
        failed={**source.faulty, **(swarm.faulty if swarm else {})},
        missing=loaded.report.missing,
        extra=loaded.report.extra,
        verified=not source.mapped or verify,
        instead={**source.instead, **loaded.report.instead},
    )
    seed = None if seeding is None else seeding.seed
    return PullResult(loaded.state, loaded.step, report, seed)


def _own_certificate(
    source: EndpointSource, certfile: str | None, keyfile: str | None
) -> ssl.SSLContext | None:
    """What a seed serves by: TLS where the endpoint does."""
    check_certificate(certfile, keyfile)
    if not any(host.url.startswith("https") for host in source.hosts):
        return None
    if certfile is None:
        raise UsageError("reshare=True from https needs certfile=: others verify this seed by it")
    return server_context(certfile, keyfile)
