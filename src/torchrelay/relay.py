"""Live state between ranks of a process group: `Relay.send` and `Relay.recv`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchrelay.deadlines import Deadline, Stopwatch, Timeout, seconds_of
from torchrelay.errors import RelayError, StateError, UsageError
from torchrelay.items import items_of
from torchrelay.landing.checks.shards import Shards, check_choice
from torchrelay.landing.destination import PreparedDestination, prepare
from torchrelay.landing.seam import land
from torchrelay.landing.terms import checked_device
from torchrelay.memory.gpu.kernels import warm_up
from torchrelay.memory.gpu.side import in_use, settle
from torchrelay.memory.pool import Pool, Pooled, usual_limit
from torchrelay.owner import Owner
from torchrelay.plan.blueprint import Blueprint
from torchrelay.plan.snapshot import Snapshot, capture
from torchrelay.progress import Progress, ProgressCallback, reporter
from torchrelay.steps import check_step
from torchrelay.transports.group.c10d import check_group
from torchrelay.transports.group.lines import GRACE, ControlLine, GroupLines, lines_of
from torchrelay.transports.group.shield import shielded
from torchrelay.transports.protocol.options import (
    ReceiveOptions,
    ReceiveTarget,
    SendOptions,
    TransferCall,
)
from torchrelay.transports.protocol.parts import Branch, MakeBranch, once
from torchrelay.transports.protocol.receiver import Receiving, answer, transfer_of
from torchrelay.transports.protocol.report import Received, Report
from torchrelay.transports.protocol.sender import Sending
from torchrelay.transports.protocol.summary import received_report, sent_report
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes.choice import check_route
from torchrelay.transports.routes.sockets.channels import MOST_CONNECTIONS, usual_connections

if TYPE_CHECKING:
    from torchrelay.endpoint.share import SharedState
    from torchrelay.resharding.gather import Destination
    from torchrelay.resharding.holding import Holding
    from torchrelay.sources.peer import PeerSource

__all__ = ["Progress", "Received", "Relay", "Report"]


class Relay:
    """Moves states between ranks of a process group. Ranks are ranks of that group.

    Any backend of torch serves. Where it moves host memory (gloo), GPU states are staged there;
    a backend of the device itself (nccl, xccl) moves them from device to device. `timeout` bounds
    each call. With several receivers `join_window` is how long the first to come wait for the
    others, and how long a receiver may make no progress before the others go on without it.

    Bytes take the fastest way that works: memory of a GPU opened by the receiver ("cuda_ipc"), host
    memory read by the receiver ("host"), or messages over the group ("group"). `route` allows one
    alone. `verify=None` compares digests of what crosses a wire; True, also of what the kernel
    copies on one machine; False, of nothing.

    A large state goes over `connections` of its own to one receiver, or to each of several on the
    sender's host, made when they are first needed and kept with the group: two to eight by default,
    by the number of cores. With 0 it goes over the group's, which is slower.

    Calls from several threads at once are fine. The relay keeps its transfer buffers (at most
    `IN_FLIGHT` chunks each way, `BufferPool.limit` in all) and memory that received states were in
    (at most `pool` bytes while idle, a quarter of the machine's by default) until `close`.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        timeout: Timeout = 300.0,
        join_window: float = 10.0,
        chunk_bytes: int | None = None,
        verify: bool | None = None,
        route: str | None = None,
        pool: int | None = None,
        connections: int | None = None,
    ) -> None:
        if group is None:
            if not dist.is_initialized():
                raise UsageError("no group given, and torch.distributed is not initialized")
            group = dist.group.WORLD
        check_group(group)
        if chunk_bytes is not None and not (isinstance(chunk_bytes, int) and chunk_bytes > 0):
            raise UsageError(f"chunk_bytes is a positive number, not {chunk_bytes!r}")
        if pool is not None and not (isinstance(pool, int) and pool >= 0):
            raise UsageError(f"pool is a number of bytes, not {pool!r}")
        if connections is not None and connections not in range(MOST_CONNECTIONS + 1):
            most = MOST_CONNECTIONS
            raise UsageError(f"connections is a number up to {most}, not {connections!r}")
        Deadline(timeout)
        self._group = group
        self._group_lines: GroupLines = lines_of(group)
        self._timeout = timeout
        self._join_window = seconds_of(join_window, "join_window")
        self._chunk_bytes = chunk_bytes
        self._verify = verify
        self._route = check_route(route)
        self._connections = usual_connections() if connections is None else connections
        self._resources = Resources()
        # With 0 torch allocates, and nothing is kept.
        self._pool = None if pool == 0 else Pool(usual_limit() if pool is None else pool)
        self._means = Pooled(self._pool)
        # What planning found out, for the next transfer of the same state. None of the tensors.
        self._drawn: Blueprint | None = None
        self._closed = False
        self._owner = Owner("Relay", "move states in the parent, which has the group's connections")

    @property
    def rank(self) -> int:
        return self._group_lines.group.rank()

    def send(
        self,
        state: object,
        to: int | Iterable[int],
        *,
        step: int | None = None,
        timeout: Timeout | None = None,
        join_timeout: Timeout | None = None,
        route: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> Report:
        """Send a state to one or several ranks; returns when each has it or has failed.

        Objects with `state_dict` and `load_state_dict` may stand in it at any depth, or be it. The
        state must not change until this returns. Receivers that are absent, late or lost are
        named in `report.failed` and do not keep the others from getting it. One that was lost after
        all had been sent may have the state: it is in `report.unknown`, and the report of the next
        send to it tells in `settled`. Raises where no receiver is known to have the state, and
        where one refused it: `PeerRefusedError`, `StepMismatchError` or `RouteError`; the error's
        `report` tells how each fared. `timeout` bounds the whole call;
        `join_timeout` is how long to wait for the first receiver to come, if less than that.
        `route` is as for the relay, for this call.
        """
        ranks = self._receivers(to)
        settle()  # whoever reads a GPU's memory next does not wait for its streams
        deadline = Deadline(self._timeout)

        def act() -> Report:
            # Receivers are called before the state is looked at: they answer meanwhile.
            lines = {rank: self._group_lines.call(rank) for rank in ranks}
            watch = Stopwatch()
            try:
                deadline.set(self._timeout if timeout is None else timeout)
                join = deadline.seconds
                if join_timeout is not None:
                    join = seconds_of(join_timeout, "join_timeout")
                if step is not None:
                    check_step(step)
                told, way = reporter(progress), check_route(route) or self._route
                with watch("capture"):
                    snapshot = self._capture(state, step, len(ranks))
            except BaseException as fault:
                reason = f"the sender cannot send its state: {type(fault).__name__}: {fault}"
                self._group_lines.excuse(lines.values(), reason, min(2 * GRACE, deadline.left()))
                raise
            call, options = TransferCall(deadline, watch, told), self._options(join, way)
            branch = self._branches(state, step, call, options)
            return self._send(
                Sending(self._group_lines, snapshot, lines, options, call, self._resources, branch),
                way,
            )

        return shielded(deadline, act)

    def _options(self, join_timeout: float, route: str | None) -> SendOptions:
        return SendOptions(self._join_window, join_timeout, self._verify, route, self._connections)

    def _branches(
        self, state: object, step: int | None, call: TransferCall, options: SendOptions
    ) -> MakeBranch:
        """How receivers are served that take parts of a state."""

        def make() -> Holding:
            # Most senders never need it, and it brings torch's checkpoint package along.
            from torchrelay.resharding.holding import Holding

            return Holding(state, step)

        describe = once(make)

        def serve(views: list[torch.Tensor], line: ControlLine) -> int:
            snapshot = capture(views, step, chunk_bytes=self._chunk_bytes)
            part = TransferCall(call.deadline)
            sending = Sending(
                self._group_lines, snapshot, {line.peer: line}, alone, part, self._resources
            )
            sending.run()
            return sending.wire_bytes

        alone = replace(options, join_timeout=call.deadline.seconds)
        return lambda peer, line, over: Branch(
            self._group_lines, peer, line, describe, serve, call.deadline, over
        )

    def _capture(self, state: object, step: int | None, receivers: int) -> Snapshot:
        snapshot = capture(
            state,
            step,
            receivers=receivers,
            chunk_bytes=self._chunk_bytes,
            like=self._drawn,
            objects=True,
        )
        self._drawn = snapshot.plan
        return snapshot

    def _send(self, sending: Sending, route: str | None) -> Report:
        wondered = self._group_lines.wondered(sending.peers)

        def report() -> Report:
            return sent_report(sending, route, self._verify, self._group_lines.settled(wondered))

        try:
            sending.run()
        except RelayError as fault:
            fault.report = report()
            raise
        return report()

    def recv(
        self,
        source: int | Sequence[int],
        *,
        into: object = None,
        step: int | None = None,
        strict: bool = True,
        atomic: bool = True,
        device: torch.device | str | None = None,
        shards: Shards = "own",
        timeout: Timeout | None = None,
        route: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> Received:
        """Receive the state that rank `source` sends.

        `into=None` makes new tensors, on `device` or on the kind of device they come from.
        With `into` its tensors are written in place, by path, whatever their strides or device;
        dtype, shape and placement must agree, and with `strict` the paths too. Modules in it are
        filled in place, other objects with `load_state_dict` are told their state. `atomic=True`
        stages the state and writes it once it is whole and verified; `atomic=False` writes as bytes
        arrive and raises `TornStateError` if it cannot finish. `step` refuses any other step.

        A distributed tensor that is made anew, with no place in `into`, is the sender's part of it.
        `shards="own"` refuses one that is not this rank's own by the sender's mesh; "replica" also
        takes it where this rank is not in that mesh, and "as_sent" in any case.
        `route` is as for the relay, for this call.

        With several sources each has a part of the state, by placements of its own mesh: only what
        this rank lacks is fetched, each box from one of those that have it, and cut anew for the
        tensors of `into`, whatever their mesh. `into=None` makes whole tensors. It is always
        staged. A source that is lost is named in `report.failed` if the others have its part.
        Values and plain tensors are those of the first source.
        """
        several = not isinstance(source, int)
        sources = self._receivers(source)
        if not sources:
            raise UsageError("no source to receive from")
        if step is not None:
            check_step(step)
        deadline = Deadline(self._timeout if timeout is None else timeout)
        check_choice(shards)
        where, way = checked_device(device), check_route(route) or self._route
        told = reporter(progress)
        settle()  # what is written to on a GPU may still be in use by its streams
        if several:
            if shards != "own":
                raise UsageError("shards is for one source: of several, parts are cut anew")
            from torchrelay.resharding.gather import Destination  # as above

            wanted = Destination(into, strict, step, where, self.rank)
            return shielded(deadline, lambda: self._gather(sources, wanted, deadline, way, told))
        source = sources[0]

        def act() -> Received:
            if in_use():
                warm_up(torch.cuda.current_device())
            watch = Stopwatch()
            with watch("prepare"):
                ready = self.prepared(into)
            with self._group_lines.exchange.call(source):
                with watch("call"):
                    first = answer(self._group_lines, source, deadline)
                target = ReceiveTarget(ready, strict, atomic, where, shards)
                return self.receive_from(
                    source,
                    transfer_of(self._group_lines, source, first),
                    TransferCall(deadline, watch, told),
                    target,
                    step=step,
                    route=way,
                )

        return shielded(deadline, act)

    def _gather(
        self,
        sources: Sequence[int],
        wanted: Destination,
        deadline: Deadline,
        route: str | None,
        progress: Callable[[int, int], None],
    ) -> Received:
        from torchrelay.resharding.gather import Gather

        def receive(source: int, transfer: int, part: TransferCall) -> Received:
            return self.receive_from(
                source, transfer, part, ReceiveTarget(shards="as_sent"), route=route
            )

        call = TransferCall(deadline, Stopwatch(), progress)
        gathered = Gather(
            self._group_lines, sources, wanted, receive, call, self._join_window
        ).run()
        report = gathered.report(self.rank, call.watch)
        return Received(gathered.landed.state, gathered.step, report)

    def share(self, state: object, *, step: int) -> SharedState:
        """Let other ranks recover this rank's state while it goes on: see `peer`.

        The state is copied, to memory that a process beside this one serves; it may change when
        this returns. `publish` of what is returned shares a later step, `close` ends it.
        """
        from torchrelay.endpoint.share import SharedState  # as above

        self._check_open()
        return SharedState(self._group, state, step, self._timeout)

    def peer(self, rank: int) -> PeerSource:
        """What a rank of the group shares by `share`, as a source of `recover`."""
        from torchrelay.sources.peer import PeerNotes, PeerSource

        self._check_in_group(rank)
        return PeerSource(PeerNotes(self._group), rank)

    def receive_from(
        self,
        source: int,
        transfer: int,
        call: TransferCall,
        target: ReceiveTarget,
        *,
        step: int | None = None,
        route: str | None = None,
    ) -> Received:
        """The rest of `recv`, after a sender's first message has been read."""
        into = target.into
        wanted = ReceiveOptions(
            step,
            lambda manifest: land(
                manifest,
                into=into,
                strict=target.strict,
                atomic=target.atomic,
                device=target.device,
                rank=self.rank,
                make_missing=target.make_missing,
                shards=target.shards,
                means=self._means,
            ),
            into if isinstance(into, PreparedDestination) else None,
            route or self._route,
            self._connections,
        )
        receiving = Receiving(self._group_lines, source, transfer, wanted, call, self._resources)
        landed = receiving.run()
        report = received_report(receiving, landed, self.rank)
        return Received(landed.state, report.step, report)

    def prepared(self, into: object) -> object:
        """What can be known of a destination before a sender has come."""
        if into is None:
            return None
        try:
            return prepare(into)
        except StateError:
            return into  # refused when it is offered a state, so that the sender hears of it

    def forget(self) -> None:
        """Drop what earlier transfers found out about states; memory and buffers are kept."""
        self._drawn = None
        self._resources.forget()

    def close(self) -> None:
        """Free the memory that was kept. The group and the states received are the caller's."""
        self._closed = True
        self.forget()
        self._resources.close()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _receivers(self, to: int | Iterable[int]) -> list[int]:
        ranks = items_of("a peer", to, int, "a rank")
        for rank in ranks:
            self._check_rank(rank)
        for rank in ranks:
            if ranks.count(rank) > 1:
                raise UsageError(f"rank {rank} is listed twice: {ranks}")
        return ranks

    def _check_open(self) -> None:
        self._owner.check()
        if self._closed:
            raise UsageError("this relay is closed")

    def _check_in_group(self, rank: int) -> None:
        self._check_open()
        size = self._group_lines.group.size()
        if type(rank) is not int or not 0 <= rank < size:
            raise UsageError(f"rank {rank!r} is not in a group of {size}")

    def _check_rank(self, rank: int) -> None:
        self._check_in_group(rank)
        if rank == self.rank:
            raise UsageError(f"rank {rank} is this rank itself")
