"""Live state between ranks of a process group: `Relay.send` and `Relay.recv`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchrelay.arguments import items_of
from torchrelay.coordination.groups import check_group, current_group, store_of
from torchrelay.deadlines import Deadline, Timeout, seconds_of
from torchrelay.errors import UsageError
from torchrelay.frames import emptied_frames
from torchrelay.landing.checks.shards import Shards, check_choice
from torchrelay.landing.options import LandingOptions, checked_device
from torchrelay.memory.gpu.kernels import warm_up
from torchrelay.memory.gpu.side import in_use, settle
from torchrelay.memory.pool import Pool, Pooled
from torchrelay.metrics import Measurement
from torchrelay.options import Verify, checked_verify
from torchrelay.owner import Owner
from torchrelay.progress import ProgressCallback, reporter
from torchrelay.results import Loaded, Report
from torchrelay.steps import check_step
from torchrelay.system import needs_linux
from torchrelay.transports.meeting.node import Meeting, meet
from torchrelay.transports.protocol.options import ReceiveOptions, SendOptions, TransferCall
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.protocol.sender import Sending
from torchrelay.transports.resources import Member, Resources
from torchrelay.transports.routes.choice import check_route
from torchrelay.transports.routes.tcp import usual_connections
from torchrelay.transports.streams.chunk_sender import MAX_CONNECTIONS

if TYPE_CHECKING:
    from torchrelay.endpoint.share import SharedState
    from torchrelay.sources.peer import PeerNotes, PeerSource


class Relay:
    """Moves states between ranks of a process group. Ranks are ranks of that group, as it is when a
    call begins: torchft's groups have others after each quorum.

    Ranks find each other in the group's store; everything else goes over sockets between them, so
    any backend will do, and a rank that died does not affect transfers between the others. Every
    group of torch has a store. A group of other making needs `rank()` and `size()`, and if it has
    no store, `store` is a `torch.distributed.Store` that its ranks share.

    `timeout` bounds each call. With several receivers `join_window` is how long the first to come
    wait for the others, and how long a receiver may make no progress before the others continue
    without it.

    Bytes take the fastest route that works: memory of a GPU opened by the receiver ("cuda_ipc"),
    host memory read by the receiver ("memory"), device memory moved by a backend such as nccl
    ("group"), or TCP connections ("tcp"). `route` allows one alone.
    `verify` is described in `torchrelay.options`. On route "tcp" a state goes over at most
    `connections` connections at a time: two to eight by default, by the number of cores.

    Calls from several threads at once are fine. The relay keeps its transfer buffers and the memory
    of received states that are gone (at most `pool` bytes while idle; by default all processes of
    a host keep a tenth of its memory together, or of the limit of their control group) until
    `close`.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        timeout: Timeout = 300.0,
        join_window: float = 10.0,
        chunk_bytes: int | None = None,
        verify: Verify = True,
        route: str | None = None,
        pool: int | None = None,
        connections: int | None = None,
        store: Any = None,
    ) -> None:
        needs_linux("Relay")
        if group is None:
            if not dist.is_initialized():
                raise UsageError(
                    "no group given, and torch.distributed is not initialized: call "
                    "tr.init_process_group first"
                )
            group = dist.group.WORLD
        check_group(group)
        if chunk_bytes is not None and not (isinstance(chunk_bytes, int) and chunk_bytes > 0):
            raise UsageError(f"chunk_bytes is a positive number, not {chunk_bytes!r}")
        if pool is not None and not (isinstance(pool, int) and pool >= 0):
            raise UsageError(f"pool is a number of bytes, not {pool!r}")
        most = MAX_CONNECTIONS
        if connections is not None and connections not in range(1, most + 1):
            raise UsageError(f"connections is a number from 1 to {most}, not {connections!r}")
        stores: type = dist.Store  # type: ignore[attr-defined]
        if store is not None and not isinstance(store, stores):
            raise UsageError(f"store is a torch.distributed.Store, not {type(store).__name__}")
        Deadline(timeout)
        self._group, self._store = group, store
        self._timeout = timeout
        self._join_window = seconds_of(join_window, "join_window")
        self._chunk_bytes = chunk_bytes
        # On the wire: None compares what crosses one, True also what the kernel copies.
        self._verify = {False: False, True: None, "all": True}[checked_verify(verify)]
        self._route = check_route(route)
        self._connections = usual_connections() if connections is None else connections
        self._resources = Resources()
        # With 0 torch allocates, and nothing is kept.
        self._pool = None if pool == 0 else Pool(pool)
        self._workspace = Pooled(self._pool)
        self._closed = False
        self._owner = Owner("Relay", "move states in the parent, which has the group's connections")
        self._joining = threading.Lock()
        self._joined: tuple[Any, Meeting] | None = None
        found = None
        with suppress(UsageError):  # a group that is configured later is joined by the first call
            found = current_group(group)
        if found is not None:
            self._join(found)

    @property
    def rank(self) -> int:
        rank: int = current_group(self._group).rank()
        return rank

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

        Objects with `state_dict` and `load_state_dict` may be in it at any depth, or be it. The
        state must not change until this returns. Receivers that are absent, late or lost are named
        in `report.failed` and do not keep the others from getting it. A receiver that was lost
        after the sender asked it to commit may have the state: it is in `report.unknown`, and
        `settled` of the report of the next send to it has the outcome. Raises if no receiver is
        known to have the state, and if one refused it: `PeerRefusedError`, `StepMismatchError` or
        `RouteError`; `report` of the error has the outcome of each receiver. `timeout` bounds the
        whole call; `join_timeout` is how long to wait for the first receiver to come, if less than
        that. `route` is as for the relay, for this call.
        """
        ranks = self._peers(to)
        deadline = Deadline(self._timeout if timeout is None else timeout)
        join = deadline.seconds
        if join_timeout is not None:
            join = seconds_of(join_timeout, "join_timeout")
        if step is not None:
            step = check_step(step)
        only = check_route(route) or self._route
        call = TransferCall(deadline, progress=reporter(progress))
        settle()  # receivers read a GPU's memory without waiting for its streams
        options = SendOptions(
            step,
            self._join_window,
            join,
            self._verify,
            only,
            self._connections,
            self._chunk_bytes,
        )
        sending = Sending(self._member(), ranks, options, call)
        measured = Measurement("send", step, rank=self.rank, role="sender")
        with measured, emptied_frames():
            report = sending.run(state)
            measured.end(report)
        return report

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
    ) -> Loaded:
        """Receive the state that rank `source` sends.

        `into=None` creates tensors, on `device` or on the kind of device they come from. With
        `into` its tensors are written in place, by path, whatever their strides or device; dtype,
        shape and placement must agree, and with `strict` the paths too. Modules in it are filled in
        place, other objects with `load_state_dict` are given their state. `atomic=True` stages the
        state and writes it once it is whole and verified; `atomic=False` writes as bytes arrive and
        raises `TornStateError` if it cannot finish. `step` refuses any other step.

        A distributed tensor that is created, because `into` has none in its place, is the sender's
        part of it. `shards="own"` refuses one that is not this rank's own by the sender's mesh;
        "replica" also takes it if this rank is not in that mesh, and "as_sent" in any case. `route`
        is as for the relay, for this call.

        With several sources each has a part of the state, by the placements of its own mesh. Only
        the boxes that this rank lacks are fetched, each from one of the ranks that have it, and
        resharded for the tensors of `into`, whatever their mesh. `into=None` creates whole tensors.
        It is always staged, and commits only when all sources have confirmed that their states are
        unchanged. A source that is lost, or silent for `join_window`, is in `report.failed` if the
        others have its part. Values and plain tensors are those of the first source. Pass `step`
        if a source may send this rank several states at once: without it such sends are refused.
        """
        sources = self._peers(source)
        if not sources:
            raise UsageError("no source to receive from: name a rank")
        if step is not None:
            step = check_step(step)
        deadline = Deadline(self._timeout if timeout is None else timeout)
        check_choice(shards)
        several = not isinstance(source, int)
        if several and shards != "own":
            raise UsageError("shards is for one source: leave it out, parts are resharded")
        options = ReceiveOptions(
            into,
            step,
            LandingOptions(strict, atomic, _usable(device), shards, rank=self.rank),
            check_route(route) or self._route,
            self._connections,
            self._chunk_bytes,
            reshard=several,
            window=self._join_window,
        )
        return self.receive(sources, options, TransferCall(deadline, progress=reporter(progress)))

    def receive(
        self, sources: Sequence[int], options: ReceiveOptions, call: TransferCall
    ) -> Loaded:
        """`recv`, with all options."""
        settle()  # what is written to on a GPU may still be in use by its streams
        if in_use():
            warm_up(torch.cuda.current_device())
        measured = Measurement("recv", options.step, rank=self.rank, role="receiver")
        with measured, emptied_frames():
            loaded = Receiving(self._member(), sources, options, call).run()
            measured.end(loaded.report)
        return loaded

    def share(self, state: object, *, step: int) -> SharedState:
        """Let other ranks recover this rank's state while it continues: see `peer`.

        The state is copied, to memory that another process serves; it may change when this
        returns. `publish` of the result shares a later step, `close` ends it.
        """
        from torchrelay.endpoint.share import SharedState  # most relays need no server

        self._check_open()
        return SharedState(self._notes(), self.rank, state, step, self._timeout)

    def peer(self, rank: int) -> PeerSource:
        """The state that a rank of the group offers with `share`, as a source of `recover`."""
        from torchrelay.sources.peer import PeerSource

        self._check_rank(rank)
        return PeerSource(self._notes(), rank)

    def close(self) -> None:
        """Free the memory that was kept. The group and the states received are the caller's."""
        self._closed = True
        self._resources.close()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _notes(self) -> PeerNotes:
        from torchrelay.sources.peer import PeerNotes

        return PeerNotes(store_of(current_group(self._group), self._store))

    def _join(self, group: Any) -> Meeting:
        """Where this process meets the other ranks of the group of the moment."""
        with self._joining:
            if self._joined is None or self._joined[0] is not group:
                if self._joined is not None:
                    self._resources.close()  # its processes have other ids in this group
                self._joined = group, meet(group, self._store)
            return self._joined[1]

    def _member(self) -> Member:
        group = current_group(self._group)
        return Member(self._join(group), group, group.rank(), self._resources, self._workspace)

    def _peers(self, chosen: int | Iterable[int]) -> list[int]:
        ranks = items_of("a peer", chosen, int, "a rank")
        for rank in ranks:
            self._check_rank(rank)
            if rank == self.rank:
                raise UsageError(f"rank {rank} is this rank itself: name another")
        for rank in ranks:
            if ranks.count(rank) > 1:
                raise UsageError(f"rank {rank} is listed twice in {ranks}: name each rank once")
        return ranks

    def _check_open(self) -> None:
        self._owner.check()
        if self._closed:
            raise UsageError("this relay is closed: make another one")

    def _check_rank(self, rank: int) -> None:
        self._check_open()
        size = current_group(self._group).size()
        if type(rank) is not int or not 0 <= rank < size:
            raise UsageError(f"rank {rank!r} is not in a group of {size}: name 0 to {size - 1}")


def _usable(device: torch.device | str | None) -> torch.device | None:
    """A device that has memory here; `UsageError` for any other."""
    found = checked_device(device)
    if found is not None:
        if found.type == "meta":
            raise UsageError(
                "tensors on device 'meta' have no memory to receive into: name another"
            )
        try:
            torch.empty(0, device=found)
        except (RuntimeError, AssertionError) as fault:
            raise UsageError(f"device {str(found)!r} cannot be used here: {fault}") from fault
    return found
