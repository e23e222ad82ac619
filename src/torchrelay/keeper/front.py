"""`Keeper`: staged steps that outlive the worker."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import msgspec

from torchrelay.deadlines import Deadline, Timeout, seconds_of
from torchrelay.endpoint.publishing import Published
from torchrelay.endpoint.security import (
    Address,
    check_certificate,
    check_listening,
    find_token,
    trusted,
)
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, UsageError
from torchrelay.keeper.process import (
    LEASE_SECONDS,
    RATE,
    STEPS,
    KeeperName,
    KeeperProcess,
    full_paths,
)
from torchrelay.keeper.server import messages as k
from torchrelay.keeper.stager import LentSlot, Stager
from torchrelay.machine import machine
from torchrelay.owner import Owner, enrol
from torchrelay.sources.keeper import KeeperSource
from torchrelay.steps import check_step
from torchrelay.stores.shares import plans
from torchrelay.stores.shares.drafting import Share
from torchrelay.transports.group.assembly import Assembly
from torchrelay.version import __version__

_MIN_MEMORY = 1 << 20


class _Present(msgspec.Struct, array_like=True):
    """What a rank says of its keeper. `token` is the keeper's, `given` is the caller's own."""

    url: str
    token: str
    given: bool
    machine: str
    members: list[str]


class _Together(msgspec.Struct, array_like=True):
    """The keepers of all ranks, those that the job had before, and the token of them all."""

    urls: list[str]
    known: list[str]
    token: str


_present = msgspec.msgpack.Decoder(_Present)
_together = msgspec.msgpack.Decoder(_Together)


class Keeper:
    """Memory of a process beside the workers, which has their newest staged steps when they are
    gone. Workers that are started again recover from it, as many of them as there are then.

    There is one process for each user, job and host; whoever needs it first starts it. It ends when
    no worker has been connected for `lease` seconds, when `end` is called, or with the host. Its
    memory goes with it.

    - `job`: a name that the workers of a job share, now and when they are started again. Two runs
      with one name would share a keeper, and recover each other's steps.
    - `group`: the ranks that stage one state together; by default all, where torch.distributed is
      initialized. `False`: this process alone.
    - `host`: which of a job's keepers is this worker's; by default the machine's name.
    - `memory`: bytes that a keeper has at most; None: as many as it takes. Two steps and, where
      there are copies, two copies have to fit in, else `stage` raises `UsageError`.
    - `steps`: how many steps a keeper has of its workers at most. With 2, one that is staged while
      the one before is copied is skipped, and `Published.skipped` says so; with 4 none is.
    - `copies`: how many other hosts have a copy of each host's part of a step.
    - `rate`: bytes a second at which a keeper fetches copies, at most.
    - `lease`: seconds.
    - `address`: HOST:PORT where keepers listen for each other and for workers of other hosts; the
      port is a free one. Several machines need an address that the others reach, as 0.0.0.0:0.
    - `token`, or `token_file`, or the environment's TORCHRELAY_TOKEN: what lets one read. Without
      one the job makes one, which its ranks and keepers alone know.
    - `certfile`, `keyfile`: keepers serve by TLS. `cafile`: certificates that those of all keepers
      are signed by; without, what the system trusts.
    - `timeout` bounds each call.

    Ranks of a group make the same calls in the same order. `tr.recover` takes a keeper as a source.
    """

    def __init__(
        self,
        job: str,
        *,
        group: Any = None,
        host: str | None = None,
        memory: int | None = None,
        steps: int = STEPS,
        copies: int = 1,
        rate: float = RATE,
        lease: float = LEASE_SECONDS,
        address: str = "127.0.0.1:0",
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        certfile: str | None = None,
        keyfile: str | None = None,
        cafile: str | None = None,
        timeout: Timeout = 300.0,
    ) -> None:
        self._all = Assembly.of(group, "keeper")
        with self._all.joining():
            self._timeout = seconds_of(timeout)
            self._address = Address.parse(address)
            if self._address.port:
                raise UsageError(f"a keeper listens at a free port: {self._address.host}:0")
            given = find_token(token, token_file)
            if given is not None:
                check_listening(self._address, given)
            check_certificate(certfile, keyfile)
            self._trusted = trusted(cafile)
            self._scheme = "http" if certfile is None else "https"
            if memory is not None and memory < _MIN_MEMORY:
                raise UsageError(f"memory is at least {_MIN_MEMORY} bytes or None, not {memory!r}")
            if type(steps) is not int or steps < STEPS:
                raise UsageError(f"steps is a number from {STEPS}, not {steps!r}")
            if type(copies) is not int or copies < 0:
                raise UsageError(f"copies is a number from 0, not {copies!r}")
            if not 0 < lease < 1e8:
                raise UsageError(f"lease is a number of seconds, not {lease!r}")
            if not rate > 0:
                raise UsageError(f"rate is a number of bytes a second, not {rate!r}")
            self._owner = Owner("Keeper")
            join = k.JoinKeeper(
                self._address.host,
                given or "",
                memory or 0,
                steps,
                rate,
                copies,
                lease,
                __version__,
                False,
                *full_paths(certfile, keyfile, cafile),
            )
            self._name = KeeperName.of(job, host)
            self._process = KeeperProcess(self._name, join)
            self._process.start(self._timeout)
        self._token, self._known = "", list[str]()
        self._closed = False
        self._calls = threading.RLock()
        self._stager = Stager(self._all, self._process, self._own_url, self._tell, join)
        try:
            self._gather(given is not None)
        except BaseException:
            self._process.close()
            raise
        enrol(self)

    def _own_url(self) -> str:
        assert self._process.joined is not None
        return f"{self._scheme}://{self._address.shown}:{self._process.joined.port}"

    def _gather(self, given: bool) -> None:
        """All ranks tell each other where their keepers are, and agree on one token."""
        deadline = Deadline(self._timeout)
        joined = self._process.joined
        assert joined is not None
        call = self._all.call("join")

        def mine() -> bytes:
            word = _Present(self._own_url(), joined.token, given, machine(), joined.members)
            return msgspec.msgpack.encode(word)

        def decide(said: list[bytes]) -> list[bytes]:
            words = [_present.decode(data) for data in said]
            if self._address.is_loopback and len({word.machine for word in words}) > 1:
                raise UsageError(
                    f"keepers on several machines do not reach each other at "
                    f"{self._address.host}: give an address that the others reach, as 0.0.0.0:0"
                )
            tokens = {word.token for word in words if word.given}
            if len(tokens) > 1:
                raise UsageError("ranks were given different tokens")
            # One that a keeper has had before is what keepers without a worker here know.
            before = [word.token for word in words if word.members]
            token = next(iter(tokens), before[0] if before else words[0].token)
            urls = list(dict.fromkeys(word.url for word in words))
            known = dict.fromkeys([*urls, *(url for word in words for url in word.members)])
            answer = _Together(urls, list(known), token)
            return [msgspec.msgpack.encode(answer)] * len(said)

        found = _together.decode(call.round("join", mine, decide, deadline))
        self._token, self._known = found.token, found.known
        self._process.know_token(found.token)

        def meet() -> bytes:
            self._stager.meet(found.urls, deadline)
            return b""

        call.round("meet", meet, lambda said: said, deadline)
        call.farewell()

    def _tell(self, urls: list[str]) -> None:
        members = k.Members(urls, self._own_url(), self._token)
        self._process.ask(members, m.Obeyed, self._timeout)
        self._known = list(dict.fromkeys([*urls, *self._known]))

    @property
    def url(self) -> str:
        """Where this host's keeper is read."""
        return self._own_url()

    @property
    def urls(self) -> list[str]:
        """Where the keepers of all ranks are read."""
        return list(self._stager.urls)

    @property
    def pid(self) -> int | None:
        """The process of this host's keeper."""
        return self._process.pid

    def stage(self, step: int, state: object, *, timeout: Timeout | None = None) -> Published:
        """Copy a state to the keeper's memory and return; the keeper hashes it and shows it.

        The state may change as soon as this returns. A step is there to be recovered when all ranks
        have staged it; until then, and if that fails, the step before is. Where it would go over
        the keeper's budget the step is skipped, and `Published.skipped` says why. A keeper that was
        lost is started again. Ranks of a group call it together.
        """
        self._owner.check()
        check_step(step)
        with self._calls:
            if self._closed:
                raise UsageError("this keeper was closed")
            deadline = Deadline(self._timeout if timeout is None else timeout)
            return self._stager.publish(state, step, deadline)

    def _lend(
        self, step: int, share: Share, outlines: plans.Outlines | None, timeout: float
    ) -> LentSlot | None:
        """For a `Checkpointer`: stage what it has planned, and lend it the memory to write from;
        None where the step has to be skipped."""
        self._owner.check()
        with self._calls:
            if self._closed:
                return None
            return self._stager.lend(share, outlines, step, Deadline(min(timeout, self._timeout)))

    def _is_for(self, rank: int, world: int) -> bool:
        """Whether the ranks that stage together are these."""
        return (self._all.rank, self._all.world) == (rank, world)

    def source(self) -> KeeperSource:
        """The steps of all keepers of the job, as a source of `recover`."""
        self._owner.check()
        name = f"keeper {self._name.job}"
        return KeeperSource(self._known, name=name, token=self._token, context=self._trusted)

    def status(self) -> dict[str, Any]:
        """What this host's keeper has, and who reads it."""
        self._owner.check()
        return self._process.status(self._timeout)

    def close(self) -> None:
        """Let go of the keeper, which goes on for the length of its lease."""
        if not self._owner.here or self._closed:
            return
        self._closed = True
        self._stager.settle(self._timeout)
        self._process.close()
        self._stager.close()

    def end(self) -> None:
        """End this host's keeper, and with it all that it has."""
        self._owner.check()
        if not self._closed:
            self._stager.settle(self._timeout)
        with suppress(EndpointError):  # another rank has ended it
            self._process.ask(k.End(), m.Obeyed, self._timeout)
        self.close()

    def _forsake(self) -> None:
        self._process.forsake()
        self._stager.forsake()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
