"""`Keeper`: staged steps that outlive the worker."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import msgspec

from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline, Timeout, seconds_of
from torchrelay.endpoint.address import Address
from torchrelay.endpoint.publish.publisher import Publisher
from torchrelay.endpoint.publish.show_rounds import StagedStep
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError, UsageError
from torchrelay.keeper.process import ASK_SECONDS, KeeperName, KeeperProcess
from torchrelay.keeper.server import messages as k
from torchrelay.keeper.server.messages import JoinKeeper
from torchrelay.machine import machine
from torchrelay.memory.arena import Arena
from torchrelay.options import KeeperOptions, checked_options
from torchrelay.owner import close_at_exit
from torchrelay.pending import Pending
from torchrelay.record.schema import Record
from torchrelay.shares.planner import PlannedShare
from torchrelay.shares.share import Share
from torchrelay.sources.access import Access
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.server_kinds import Keepers
from torchrelay.system import needs_linux


class _Present(msgspec.Struct, array_like=True):
    """A rank's keeper. `token` is the keeper's; `given` is the caller's own."""

    url: str
    token: str
    chosen: bool
    machine: str
    members: list[str]


class _Together(msgspec.Struct, array_like=True):
    """The keepers of all ranks, those that the job had before, and the token of all of them."""

    urls: list[str]
    known: list[str]
    token: str


_present = msgspec.msgpack.Decoder(_Present)
_together = msgspec.msgpack.Decoder(_Together)


class Keeper:
    """A process that holds the newest staged steps of the workers when they are gone. Restarted
    workers recover from it, whatever their number.

    Each user, job and host has one such process; the first worker that needs it starts it. It ends
    when no worker has been connected for `options.lease_seconds`, when `end` is called, or with the
    host. Its memory is freed with it.

    - `job`: a name that the workers of a job share, now and when they are started again. Two runs
      with one name would share a keeper, and recover each other's steps. `JOB@HOST` names the
      keeper of another host than this machine, which is for tests.
    - `group`: the ranks that stage one state together; by default all, where torch.distributed is
      initialized. `no_dist`: this process alone.
    - `address`: HOST:0 at which keepers listen for each other and for workers of other hosts. On
      several machines use an address that the others can reach, such as 0.0.0.0:0.
    - `access`: the token that readers must send, and certificates: keepers serve TLS with
      `certfile`, and trust each other by `cafile`. Without a token the job creates one that only
      its ranks and keepers know.
    - `timeout` bounds each call.
    - `options`: the rare ones, as `tr.options.KeeperOptions`.

    Ranks of a group make the same calls in the same order. `tr.recover` takes a keeper as a source.
    """

    def __init__(
        self,
        job: str,
        *,
        address: str = "127.0.0.1:0",
        timeout: Timeout = 300.0,
        access: Access | None = None,
        group: Any = None,
        no_dist: bool = False,
        options: KeeperOptions | None = None,
    ) -> None:
        needs_linux("Keeper")
        self._all = Coordinator.of(group, "keeper", no_dist=no_dist)
        with self._all.joining():
            self._timeout = seconds_of(timeout)
            self._name = KeeperName.of(job)
            self._access, listen_at = access or Access(), Address.parse(address)
            listen = m.Listen.at(*listen_at, self._access)
            chosen: KeeperOptions = checked_options(options, KeeperOptions)
            join = JoinKeeper(
                listen,
                memory=chosen.memory_budget,
                steps=chosen.steps,
                copies=chosen.copies,
                rate=chosen.copy_bytes_per_second,
                lease=chosen.lease_seconds,
            )
            has_token = join.listen.token is not None
            self._server = KeeperProcess(self._name, join)
            self._server.start(self._timeout)
        self._publisher = Publisher(
            self._all, self._server, self._timeout, "Keeper", "make another of the same job"
        )
        try:
            self._gather(has_token, listen_at)
        except BaseException:
            self._server.process.close()
            raise
        close_at_exit(self)

    def _gather(self, chosen: bool, listen_at: Address) -> None:
        """All ranks learn where the keepers are, and agree on one token."""
        deadline = Deadline(self._timeout)
        joined = self._server.joined
        call = self._all.call("join")

        here = _Present(self.url, joined.token, chosen, machine(), joined.members)

        def decide(messages: list[bytes]) -> list[bytes]:
            ranks = [_present.decode(data) for data in messages]
            if listen_at.is_loopback and len({rank.machine for rank in ranks}) > 1:
                raise UsageError(
                    f"keepers on several machines do not reach each other at {listen_at.host}: "
                    "give an address that the others reach, as 0.0.0.0:0"
                )
            tokens = {rank.token for rank in ranks if rank.chosen}
            if len(tokens) > 1:
                raise UsageError("ranks were given different tokens: give all of them the same")
            # A token that a keeper has had before is known to keepers without a worker here.
            before = [rank.token for rank in ranks if rank.members]
            token = next(iter(tokens), before[0] if before else ranks[0].token)
            urls = list(dict.fromkeys(rank.url for rank in ranks))
            known = dict.fromkeys([*urls, *(url for rank in ranks for url in rank.members)])
            return [msgspec.msgpack.encode(_Together(urls, list(known), token))] * len(messages)

        answer = call.round("join", lambda: msgspec.msgpack.encode(here), decide, deadline)
        found = _together.decode(answer)
        self._server.agree(found.token, found.known)

        def meet() -> None:
            self._server.meet(found.urls, deadline)
            self._publisher.urls = found.urls

        call.together("meet", meet, deadline)
        call.drain()

    @property
    def url(self) -> str:
        """The URL of this host's keeper."""
        return self._server.url

    @property
    def urls(self) -> list[str]:
        """The URLs of the keepers of all ranks."""
        return list(self._publisher.urls)

    @property
    def pid(self) -> int | None:
        """The process of this host's keeper."""
        return self._server.joined.pid

    def stage(self, step: int, state: object, *, timeout: Timeout | None = None) -> Pending:
        """All ranks call it together: copy a state to the keeper's memory and return.

        The keeper hashes it and shows it. The state may change as soon as this returns. A step can
        be recovered when all ranks have staged it; until then, and if that fails, the step before
        can. Where it would go over the keeper's budget the step is skipped, and `Pending.skipped`
        says why. A keeper that was lost is started again.
        """
        return self._publisher.publish(state, step, timeout)

    def source(self) -> EndpointSource:
        """The steps of all keepers of the job, as a source of `recover`."""
        self._publisher.owner.check()
        access = Access(token=self._server.token, cafile=self._access.cafile)
        kind = Keepers(self._name.job)
        return EndpointSource(self._server.known, access=access, kind=kind)

    def status(self) -> dict[str, Any]:
        """The steps, copies and readers of this host's keeper."""
        return self._publisher.status()

    def close(self) -> None:
        """Disconnect from the keeper, which continues for the length of its lease."""
        self._publisher.close()

    def end(self) -> None:
        """End this host's keeper and free its steps."""
        self._publisher.owner.check()
        if not self._publisher.closed:
            self._publisher.settle(self._timeout)
        with suppress(EndpointError):  # another rank has ended it
            self._server.ask(k.End(), m.Obeyed, self._timeout)
        self.close()

    def _detach_after_fork(self) -> None:
        self._publisher.detach_after_fork()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LentSlot:
    """The memory of a staged step, for a `Checkpointer` that writes it to disk: files as in an
    `Arena`, and where each volume starts. It stays as it is until `release`, whatever becomes of
    the keeper."""

    def __init__(
        self, keeper: KeeperProcess, arena: Arena, staged: StagedStep, left: float
    ) -> None:
        keeper.ask(k.HoldSlot(staged.slot, True), m.Obeyed, left)
        self._keeper, self._generation = keeper, keeper.process.generation
        self._slot = staged.slot
        self.fds = [os.dup(fd) for fd in arena.fds]
        self.each, self.nbytes = arena.each, arena.nbytes
        self.starts = [volume.start for volume in staged.volumes]

    def release(self) -> None:
        """Another step may be staged there. Never raises."""
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)
        if fds and self._keeper.process.generation == self._generation:
            with suppress(EndpointError):  # it is lost, and its slots with it
                self._keeper.ask(k.HoldSlot(self._slot, False), m.Obeyed, ASK_SECONDS)


# For a `Checkpointer`, which writes a step from the keeper's memory.


def stages_for(keeper: Keeper, rank: int, world: int) -> bool:
    """Whether the ranks that stage together in it are these."""
    return (keeper._all.rank, keeper._all.world) == (rank, world)


def lend(
    keeper: Keeper, step: int, share: Share, outlined: Record | None, timeout: float
) -> LentSlot | None:
    """Stage what was planned for a step, and lend the memory to write it from; None where the step
    has to be skipped."""
    publisher = keeper._publisher
    if publisher.closed:
        return None
    with publisher.open(min(timeout, keeper._timeout)) as deadline:
        planned = PlannedShare(share, outlined)
        _, staged = publisher.publish_planned(lambda _: planned, step, deadline)
        if staged is None:
            return None
        arena = publisher.memory_of(staged)
        return LentSlot(keeper._server, arena, staged, deadline.left())
