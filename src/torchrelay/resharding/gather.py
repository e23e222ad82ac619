"""A receive from several ranks that each have a part of a state.

Every source offers its record. `GatherPlan` says what to read of each, and where that goes. The
reads come as verified transfers, and become the state when all of them are here and every source
has confirmed that its own state is unchanged. If a source is lost, its reads are planned again on
the sources that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    DigestError,
    ManifestError,
    MismatchError,
    PeerError,
    RelayError,
    RemoteProtocolError,
    StepMismatchError,
    TornStateError,
    TransferTimeoutError,
)
from torchrelay.landing.commit.landing import TORN, Landed
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.memory.uninterrupted import hurried, uninterrupted
from torchrelay.record.rank_reads import encode_reads
from torchrelay.resharding.plan import GatherPlan, PartReads
from torchrelay.results import Loaded, Outcome
from torchrelay.transports.protocol.options import ReceiveOptions, TransferCall
from torchrelay.transports.protocol.receiver import SourceRank, last_message, report_of
from torchrelay.transports.resources import Member
from torchrelay.transports.wire import messages as m

LOST = (PeerError, TransferTimeoutError, RemoteProtocolError, ManifestError, DigestError)


class Gather:
    """One receive from several ranks."""

    def __init__(
        self,
        member: Member,
        sources: Sequence[int],
        options: ReceiveOptions,
        call: TransferCall,
        window: float,
    ) -> None:
        self._member, self._ranks = member, sources
        self._options, self._window = options, window
        self._deadline, self._watch, self._progress = call.deadline, call.watch, call.progress
        # One source alone delays no one: the deadline counts for it.
        several = len(sources) > 1
        self._patience = min(window, call.deadline.seconds / 4) if several else 0.0
        self._called: list[SourceRank] = []
        self._sources: dict[int, SourceRank] = {}  # those that have made an offer, and are not lost
        self._lost: dict[int, RelayError] = {}
        self._plan: GatherPlan | None = None

    def run(self) -> Loaded:
        try:
            with self._watch("join"):
                self._join()
            while not self._fetch():
                pass
            assert self._plan is not None
            with self._watch("commit"):
                landed = uninterrupted(partial(self._commit, self._plan))
            for source in self._sources.values():
                source.talk.send(m.Done())
        except BaseException as fault:
            torn = self._plan is not None and self._plan.touched
            for source in self._called:
                source.talk.send(last_message(fault, torn=torn))
            raise
        finally:
            for source in self._called:
                source.close()
        sources, nbytes = self._sources.values(), self._plan.nbytes
        report = report_of(sources, self._step, nbytes, landed, self._watch)
        report.peers.update({rank: Outcome("failed", str(why)) for rank, why in self._lost.items()})
        return Loaded(landed.state, self._step, report)

    # Meeting the sources

    def _join(self) -> None:
        """Ask all sources what they have. The first to come waits a window for the others."""
        join = self._join_deadline = Deadline(max(self._deadline.left(), 0.001))

        def ask(rank: int) -> None:
            call = TransferCall(join)
            call.watch.phase = "join"
            source = SourceRank(self._member, rank, self._options, call, parts=True)
            self._called.append(source)
            source.offer = source.talk.expect(m.Offer)
            join.hasten(self._window)
            source.talk.deadline, source.talk.patience = self._deadline, self._patience
            source.record  # noqa: B018  # read here, on the thread of this source
            self._sources[rank] = source

        self._each(self._ranks, ask)
        for rank, fault in self._lost.items():
            if isinstance(fault, TransferTimeoutError) and not self._deadline.passed:
                text = f"did not come within {self._window:.3g} s of the first source"
                self._lost[rank] = TransferTimeoutError(text, rank=rank, phase="join")
        # In the order that the caller gave: values are those of the first.
        self._sources = {r: self._sources[r] for r in self._ranks if r in self._sources}

    def _each(self, ranks: Collection[int], act: Callable[[int], object]) -> None:
        """Do something with each source at once; those with which it fails are lost. Returns, or
        raises, when none of them is under way."""

        def attempt(rank: int) -> None:
            try:
                act(rank)
            except LOST as fault:
                self._lose(rank, fault)
            except BaseException:  # the call fails with it: no other source is waited for
                hurry()
                raise

        def hurry() -> None:
            for deadline in (self._deadline, self._join_deadline):
                deadline.hasten(0.0)

        hurried(partial(run_on_threads, ranks, lambda: attempt, len(ranks)), hurry)

    def _lose(self, rank: int, fault: RelayError) -> None:
        """A source is lost, and what came from it does not count: its state may have changed."""
        fault.rank = rank
        self._lost[rank] = fault
        source = self._sources.pop(rank, None)
        if source is not None:
            source.talk.send(last_message(fault, torn=False))
            source.close()

    # Fetching

    def _fetch(self) -> bool:
        """Plan, fetch what is missing, and have it confirmed; False if a source was lost."""
        with self._watch("plan"):
            self._step = self._agreed_step()
            self._plan = plan = self._planned(self._plan)
        lost = len(self._lost)
        with self._watch("data"):
            self._bring(plan)
            if len(self._lost) == lost:
                self._confirm()
        return len(self._lost) == lost

    def _agreed_step(self) -> int | None:
        if not self._sources:
            raise next(iter(self._lost.values()))
        steps = {rank: source.record.step for rank, source in self._sources.items()}
        found = set(steps.values())
        if len(found) > 1:
            listed = ", ".join(f"rank {rank} has {step}" for rank, step in steps.items())
            raise StepMismatchError(f"the ranks do not send one step: {listed}; send the same")
        for rank, source in self._sources.items():
            if self._options.step is None and source.offer.several:
                raise StepMismatchError(
                    f"rank {rank} sends several states to this rank: say which by step=", rank=rank
                )
        return found.pop()

    def _planned(self, before: GatherPlan | None) -> GatherPlan:
        """`MismatchError` if the sources do not have what is wanted; the first that was lost is
        named if it would have."""
        options = self._options
        try:
            if before is not None:
                return before.without(self._lost)
            records = {rank: source.record for rank, source in self._sources.items()}
            into, landing, size = options.into, options.landing, options.chunk_bytes
            return GatherPlan(records, into, landing, self._member.workspace, chunk_bytes=size)
        except MismatchError as fault:
            for lost in self._lost.values():
                raise lost from fault
            raise

    def _bring(self, plan: GatherPlan) -> None:
        total = plan.nbytes
        before = total - sum(part.chunks.nbytes for part in plan.parts.values())
        done: dict[int, int] = {}

        def moved(rank: int, nbytes: int, _: int) -> None:
            done[rank] = nbytes
            self._progress(min(total, before + sum(list(done.values()))), total)

        def take(rank: int) -> None:
            self._take(rank, plan.part_of(rank), partial(moved, rank))

        # Every source is asked once: one that gives nothing confirms its values.
        asked = {rank for rank, source in self._sources.items() if not source.choices}
        self._each(asked.union(plan.parts), take)

    def _take(self, rank: int, part: PartReads, progress: Callable[[int, int], None]) -> None:
        """Fetch the reads of one source."""
        source = self._sources[rank]
        source.talk.watch.phase, source.confirmed = "data", False
        try:
            source.accept(part.target, progress, encode_reads(part.asked))()
        finally:
            source.stop()

    def _confirm(self) -> None:
        """Ask every source whether its state is unchanged."""

        def ask(rank: int) -> None:
            source = self._sources[rank]
            source.talk.send(m.Fetched())
            source.talk.expect(m.Confirmed)
            source.confirmed = True

        self._each([rank for rank, one in self._sources.items() if not one.confirmed], ask)

    # The end

    def _commit(self, plan: GatherPlan) -> Landed:
        """Everything that can fail comes before the first write."""
        try:
            landed = plan.commit()
        except RelayError as fault:
            if not plan.touched or isinstance(fault, TornStateError):
                raise
            raise TornStateError(TORN, phase="commit") from fault
        settle()
        for source in self._sources.values():
            source.note_commit()
        return landed
