"""A receive from several ranks that each have a part of a state.

All of them say what they have. That is one record of a whole state, and the load that reads
checkpoints plans what this rank lacks of it: only these boxes are asked for. They come as verified
transfers into memory of their own; when all are here, they are landed as a load lands. Where a
rank is lost, what it was to send is planned anew on those that are left.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from torchrelay.checkpointer.loading import Loading
from torchrelay.deadlines import TICK, Deadline, InterruptedTransfer, Stopwatch
from torchrelay.errors import (
    DigestError,
    ManifestError,
    MismatchError,
    PeerError,
    RelayError,
    RemoteProtocolError,
    StateError,
    StepMismatchError,
    TornStateError,
    TransferTimeoutError,
)
from torchrelay.landing.commit.ending import TORN
from torchrelay.landing.places import Landed
from torchrelay.landing.terms import Terms
from torchrelay.memory import threads
from torchrelay.plan.reads import BoxRead
from torchrelay.record.dtypes import itemsize
from torchrelay.resharding.owners import Whole, whole_of
from torchrelay.resharding.record import LiveRank, decode
from torchrelay.transports.group.lines import GroupLines
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.events import refusal
from torchrelay.transports.protocol.options import TransferCall
from torchrelay.transports.protocol.parts import Conversation, part_from
from torchrelay.transports.protocol.receiver import answer, transfer_of
from torchrelay.transports.protocol.report import Received, Report

T = TypeVar("T")
Key = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offsets in the whole tensor, sizes
LOST = (PeerError, TransferTimeoutError, RemoteProtocolError, ManifestError, DigestError)


class Receive(Protocol):
    """Takes a transfer whose first message has been read, into new tensors."""

    def __call__(self, source: int, transfer: int, part: TransferCall) -> Received: ...


class Destination(NamedTuple):
    """What a caller of a receive wants."""

    into: object
    strict: bool
    step: int | None
    device: torch.device | None
    rank: int


@dataclass
class Gathered:
    """What has come, and from whom."""

    landed: Landed
    step: int | None
    nbytes: int
    reports: list[Report]
    sources: dict[int, int] = field(default_factory=dict)  # bytes, by rank
    lost: dict[int, str] = field(default_factory=dict)  # why, by rank

    def report(self, rank: int, watch: Stopwatch) -> Report:
        routes = {one.route for one in self.reports}
        by = routes.pop() if len(routes) == 1 else "mixed" if routes else "group"
        return Report(
            step=self.step,
            bytes=self.nbytes,
            wire_bytes=sum(one.wire_bytes for one in self.reports),
            messages=sum(one.messages for one in self.reports),
            seconds=watch.seconds,
            route=by,
            routes={rank: by},
            instead={why: text for one in self.reports for why, text in one.instead.items()},
            verified=all(one.verified for one in self.reports),
            receivers=(rank,),
            failed=self.lost,
            missing=tuple(self.landed.missing),
            extra=tuple(self.landed.extra),
            connections=sum(one.connections for one in self.reports),
            sources=self.sources,
        )


class Gather:
    """One receive from several ranks. `receive` takes a transfer of boxes from one of them."""

    def __init__(
        self,
        group_lines: GroupLines,
        sources: Sequence[int],
        wanted: Destination,
        receive: Receive,
        call: TransferCall,
        window: float,
    ) -> None:
        self._group_lines, self._sources, self._wanted = group_lines, sources, wanted
        self._receive, self._deadline, self._window = receive, call.deadline, window
        self._watch, self._progress = call.watch, call.progress
        self._talks: dict[int, Conversation] = {}
        self._records: dict[int, LiveRank] = {}
        self._lost: dict[int, RelayError] = {}
        self._plain: set[str] = set()  # names of tensors that are not distributed
        self._dtypes: dict[str, str] = {}  # of tensors
        self._boxes: dict[Key, torch.Tensor] = {}
        self._givers: dict[Key, int] = {}
        self._came: dict[int, int] = {}
        self._reports: list[Report] = []

    def run(self) -> Gathered:
        try:
            with self._watch("join"):
                self._survey()
            loading, step = self._fetch()
            with self._watch("commit"):
                landed = self._land(loading)
        except BaseException as fault:
            self._part(fault)
            raise
        part_from(list(self._talks.values()), wire.Done())
        lost = {rank: str(why) for rank, why in self._lost.items()}
        return Gathered(landed, step, self._nbytes, self._reports, self._came, lost)

    @property
    def _nbytes(self) -> int:
        return sum(box.nbytes for box in self._boxes.values())

    def _part(self, fault: BaseException) -> None:
        word: wire.Refuse | wire.Leave
        if isinstance(fault, (StateError, StepMismatchError)):
            word = refusal(fault)
        else:
            text = wire.text(fault.message if isinstance(fault, RelayError) else fault)
            late = isinstance(fault, (TransferTimeoutError, InterruptedTransfer))
            word = wire.Leave(text, late)
        part_from(list(self._talks.values()), word)

    # What there is.

    def _survey(self) -> None:
        """Ask all sources what they have. The first to come waits a window for the others."""
        wait = Deadline(self._deadline.seconds)
        wait.hasten(self._deadline.left())
        came: list[float] = []

        def hurry() -> None:
            if came and time.monotonic() > came[0] + self._window and not wait.cancelled:
                wait.cancel(TimeoutError())

        def ask(rank: int) -> None:
            with self._group_lines.exchange.call(rank):
                try:
                    first = answer(self._group_lines, rank, wait)
                except TransferTimeoutError:
                    if not wait.cancelled or self._deadline.passed:
                        raise
                    raise TransferTimeoutError(
                        f"did not come within {self._window:.3g} s of the first source",
                        rank=rank,
                        phase="join",
                    ) from None
                transfer = transfer_of(self._group_lines, rank, first)
                talk = Conversation(self._group_lines, rank, transfer, self._deadline)
            self._talks[rank] = talk
            came.append(time.monotonic())
            self._records[rank] = record = decode(talk.survey())
            self._plain.update(record.replicas)

        self._each({rank: partial(ask, rank) for rank in self._sources}, wait.cancel, hurry)
        if not self._records:
            raise next(iter(self._lost.values()))

    def _each(
        self,
        acts: dict[int, Callable[[], object]],
        cancel: Callable[[BaseException], None] = lambda cause: None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Do something with each source, on a thread each; those with which it fails are lost.

        `cancel` is told where this call is given up, `look` is called now and then.
        """
        over: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def run(rank: int, act: Callable[[], object]) -> None:
            fault: BaseException | None = None
            try:
                act()
            except BaseException as found:
                fault = found
            over.put((rank, fault))

        for rank, act in acts.items():
            threads.run(partial(run, rank, act), "part")
        raised: BaseException | None = None
        todo = len(acts)
        with self._deadline.wakes(over):
            while todo:
                look()
                try:
                    event = over.get(timeout=TICK)  # each act ends by the deadline
                except queue.Empty:
                    continue
                if isinstance(event, InterruptedTransfer):
                    raised = event
                    cancel(event)
                    continue
                todo -= 1
                rank, fault = event
                if isinstance(fault, LOST) and not isinstance(fault, InterruptedTransfer):
                    fault.rank = rank
                    self._lost[rank] = fault
                    self._records.pop(rank, None)
                    if (talk := self._talks.pop(rank, None)) is not None:
                        part_from([talk], wire.Leave(wire.text(fault.message)))
                elif fault is not None:
                    raised = fault
        if raised is not None:
            raise raised

    # What is wanted of it.

    def _fetch(self) -> tuple[Loading, int | None]:
        """Plan and fetch until every box is here, or is out of reach."""
        step, loading = None, None
        while loading is None:
            with self._watch("plan"):
                step = self._agreed_step()
                whole, loading = self._plan()
                cuts = self._missing(whole, loading)
            lost = len(self._lost)
            with self._watch("data"):
                self._bring(cuts)
            if len(self._lost) > lost:
                loading = None  # others have to give what these were to
                self._forget_plain()
        loading.arrive(self._take)
        return loading, step

    def _forget_plain(self) -> None:
        """Plain tensors go with the values of their rank: none of a rank that is lost is used."""
        for key, rank in list(self._givers.items()):
            if rank in self._lost and key[0] in self._plain:
                del self._boxes[key], self._givers[key]

    def _agreed_step(self) -> int | None:
        if not self._records:
            raise next(iter(self._lost.values()))
        steps = {rank: record.step for rank, record in self._records.items()}
        found = set(steps.values())
        if len(found) > 1:
            told = ", ".join(f"rank {rank} has {step}" for rank, step in steps.items())
            raise StepMismatchError(f"the ranks do not send one step: {told}")
        step = found.pop()
        if self._wanted.step is not None and step != self._wanted.step:
            raise StepMismatchError(
                f"step {step} is offered, step {self._wanted.step} was asked for", step=step
            )
        return step

    def _plan(self) -> tuple[Whole, Loading]:
        """`MismatchError` where what the sources have does not do; the first that was lost is named
        if it would have."""
        ordered = {rank: self._records[rank] for rank in self._sources if rank in self._records}
        try:
            whole = whole_of(ordered)
            wanted = self._wanted
            terms = Terms(wanted.strict, True, False, wanted.device, wanted.rank)
            # No world: what each rank has is laid over the first one's.
            loading = Loading(None, whole.record, wanted.into, terms, world=0)
        except MismatchError as fault:
            for lost in self._lost.values():
                raise lost from fault
            raise
        return whole, loading

    def _missing(self, whole: Whole, loading: Loading) -> dict[int, dict[Key, wire.Cut]]:
        """The boxes that have not come yet, by the rank that is asked for them."""
        ranks = [rank for rank in self._sources if rank in self._records]
        found: dict[int, dict[Key, wire.Cut]] = {}
        for wish in loading.wishes():
            key = _key(wish)
            if not prod(wish.sizes) or key in self._boxes:
                continue
            place = wish.shard.file
            box = whole.places[place][wish.tensor.name, (wish.shard.offsets, wish.shard.sizes)]
            asked = found.setdefault(ranks[place], {})
            asked[key] = wire.Cut(box, wish.offsets, wish.sizes)
            self._dtypes[wish.tensor.name] = wish.tensor.dtype
        return found

    def _bring(self, cuts: dict[int, dict[Key, wire.Cut]]) -> None:
        total = self._nbytes + sum(
            prod(cut.sizes) * itemsize(self._dtypes[key[0]])
            for asked in cuts.values()
            for key, cut in asked.items()
        )
        done: dict[int, int] = {}
        before = self._nbytes

        def fetch(rank: int, asked: dict[Key, wire.Cut]) -> None:
            def moved(nbytes: int, _: int) -> None:
                done[rank] = nbytes
                self._progress(min(total, before + sum(list(done.values()))), total)

            talk = self._talks[rank]
            transfer = talk.select(list(asked.values()))
            part = TransferCall(self._deadline, progress=moved)
            got = self._receive(rank, transfer, part)
            boxes = list(_checked(got.state, asked, self._dtypes))
            self._boxes.update(zip(asked, boxes, strict=True))
            self._givers.update(dict.fromkeys(asked, rank))
            self._came[rank] = self._came.get(rank, 0) + sum(box.nbytes for box in boxes)
            self._reports.append(got.report)

        self._each({rank: partial(fetch, rank, asked) for rank, asked in cuts.items()})

    def _take(self, wish: BoxRead) -> torch.Tensor:
        return self._boxes[_key(wish)]

    # The end.

    def _land(self, loading: Loading) -> Landed:
        """As a load does: everything that can fail comes before the first write."""
        loading.compare_twins()
        loading.make(verify=False)  # digests were compared when the boxes came
        try:
            return loading.end(verify=False)
        except RelayError as fault:
            if not loading.touched or isinstance(fault, TornStateError):
                raise
            raise TornStateError(TORN, phase="commit") from fault


def _key(wish: BoxRead) -> Key:
    start = tuple(a + b for a, b in zip(wish.shard.offsets, wish.offsets, strict=True))
    return wish.tensor.name, start, wish.sizes


def _checked(
    state: object, asked: dict[Key, wire.Cut], dtypes: dict[str, str]
) -> Iterator[torch.Tensor]:
    """The tensors that came; `RemoteProtocolError` unless they are those that were asked for."""
    if not isinstance(state, list) or len(state) != len(asked):
        raise RemoteProtocolError("other boxes came than were asked for")
    for found, (key, cut) in zip(state, asked.items(), strict=True):
        if (
            type(found) is not torch.Tensor
            or tuple(found.shape) != cut.sizes
            or str(found.dtype).removeprefix("torch.") != dtypes[key[0]]
        ):
            raise RemoteProtocolError("another box came than was asked for")
        yield found
