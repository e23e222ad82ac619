"""The receiving side of a live transfer: connections, threads and the clock for a
`ReceiverMachine`.

    meet -> plan -> accept -> fetch -> confirm -> commit

One loop, in the thread that called `recv`, does what the machine says next, with one holder or
with several at once. An error anywhere closes the connections, with the reason if there is one to
send. Nothing of the caller's is written before the commit, unless `atomic=False` asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    DigestError,
    ManifestError,
    MismatchError,
    PeerError,
    RelayError,
    RemoteProtocolError,
    TornStateError,
    TransferTimeoutError,
)
from torchrelay.landing.commit.landing import TORN, Landed
from torchrelay.memory.gpu.side import settle
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.memory.uninterrupted import hurried, uninterrupted
from torchrelay.planning.destination import Destination
from torchrelay.results import Loaded
from torchrelay.transports.protocol.holder import REFUSED, LiveHolder, last_message, report_of
from torchrelay.transports.protocol.options import ReceiveOptions, TransferCall
from torchrelay.transports.protocol.receive_plan import ReceivePlan
from torchrelay.transports.protocol.receiver_machine import Action, ReceiverMachine
from torchrelay.transports.resources import Member
from torchrelay.transports.wire import messages as m

# A holder that fails in one of these ways is lost; the others may have what it has.
LOST = (PeerError, TransferTimeoutError, RemoteProtocolError, ManifestError, DigestError)


class Receiving:
    """One receive, from one rank or from several."""

    _plan: ReceivePlan | None = None
    _landed: Landed | None = None

    def __init__(
        self, member: Member, ranks: Sequence[int], options: ReceiveOptions, call: TransferCall
    ) -> None:
        self._member, self._ranks, self._options = member, ranks, options
        self._deadline, self._watch, self._progress = call.deadline, call.watch, call.progress
        self._machine = ReceiverMachine(ranks, options.step)
        self._holders: dict[int, LiveHolder] = {}  # all that a `Join` was sent to
        # One holder alone delays no one: the deadline counts for it.
        self._alone = len(ranks) == 1
        self._offers_due = self._deadline
        if not self._alone:
            self._offers_due = Deadline(max(self._deadline.left(), 0.001))

    def run(self) -> Loaded:
        try:
            return self._run()
        finally:
            # Faults of lost holders refer to frames of this receive, and those to it.
            self._machine.lost.clear()

    def _run(self) -> Loaded:
        try:
            self._into = _inspected(self._options.into)  # while senders describe their states
            while (todo := self._machine.next()) is not None:
                self._do(todo.action, todo.ranks)
        except BaseException as fault:
            self._end(fault)
            raise
        finally:
            for holder in self._holders.values():
                holder.close()
        plan, landed, machine = self._plan, self._landed, self._machine
        assert plan is not None and landed is not None
        holders = [self._holders[rank] for rank in machine.here]
        step, nbytes = machine.step, plan.nbytes
        report = report_of(holders, machine.lost, step, nbytes, landed, self._watch)
        return Loaded(landed.state, step, report)

    def _do(self, action: Action, ranks: Sequence[int]) -> None:
        if action is Action.MEET:
            with self._watch("call"):
                self._meet(ranks)
        elif action is Action.PLAN:
            with self._watch("join"):
                self._fit()
        elif action is Action.ACCEPT:
            with self._watch("join"):
                self._accept(ranks)
        elif action is Action.FETCH:
            with self._watch("data"):
                self._fetch(ranks)
        elif action is Action.CONFIRM:
            with self._watch("data"):
                self._confirm(ranks)
        else:
            with self._watch("commit"):
                self._commit()
            if not self._options.reshard:
                with self._watch("pass on"):
                    self._holders[ranks[0]].finish()

    def _end(self, fault: BaseException) -> None:
        """Tell all holders that the receive has failed. Raises `TornStateError` if tensors of the
        caller are part old, part new."""
        plan, phase = self._plan, self._watch.phase
        torn = plan is not None and self._landed is None and plan.landing.touched
        for holder in self._holders.values():
            holder.talk.send(last_message(fault, torn=torn))
        rank = step = None
        if self._alone and self._holders:
            ((rank, holder),) = self._holders.items()
            step = holder.talk.step
            if isinstance(fault, REFUSED) and fault.rank is None:
                fault.rank, fault.phase = rank, phase
        if isinstance(fault, TornStateError):  # it names what is old and what is new
            fault.rank, fault.step, fault.phase = rank, step, fault.phase or phase
        elif torn and isinstance(fault, Exception):
            raise TornStateError(TORN, rank=rank, step=step, phase=phase) from fault

    # The actions

    def _meet(self, ranks: Sequence[int]) -> None:
        """Ask all holders what they have. The first to come waits a window for the others."""
        window, several = self._options.window, not self._alone

        def ask(rank: int) -> None:
            holder = LiveHolder(self._member, rank, self._options, self._offers_due, self._watch)
            self._holders[rank] = holder
            holder.wait_for_offer()
            if several:
                self._offers_due.hasten(window)
                holder.talk.deadline = self._deadline
                holder.talk.patience = min(window, self._deadline.seconds / 4)
            holder.read_offer()
            self._machine.offered(rank, holder.record.step, several=self._mixed(holder))

        self._each(ranks, ask)
        lost = self._machine.lost
        overdue = [rank for rank in lost if isinstance(lost[rank], TransferTimeoutError)]
        for rank in overdue if several and not self._deadline.passed else ():
            text = f"did not come within {window:.3g} s of the first source"
            lost[rank] = TransferTimeoutError(text, rank=rank, phase="call")

    def _mixed(self, holder: LiveHolder) -> bool:
        """Whether parts of several states could be taken for one."""
        return self._options.reshard and holder.offer.several

    def _fit(self) -> None:
        """Fit what is offered to the destination, and plan the reads; everything that can be
        refused is refused. `MismatchError` if the holders do not have what is wanted; the first
        that was lost is named if it would have."""
        machine, options, plan = self._machine, self._options, self._plan
        try:
            if plan is not None:
                self._plan = plan = plan.without(machine.lost)
            else:
                self._plan = plan = ReceivePlan(
                    {rank: self._holders[rank].record for rank in machine.here},
                    self._into,
                    options.landing,
                    self._member.workspace,
                    reshard=options.reshard,
                    chunk_bytes=options.chunk_bytes,
                )
        except MismatchError as fault:
            if machine.lost:
                raise next(iter(machine.lost.values())) from fault
            raise
        machine.planned(plan.reads)

    def _accept(self, ranks: Sequence[int]) -> None:
        """Tell holders what is read of them, and by which route."""
        plan = self._plan
        assert plan is not None
        total, coming = plan.nbytes, sum(one.nbytes for one in plan.reads.values())
        done: dict[int, int] = {}
        # Not `self`: the routes keep this function, and would keep the state that was received.
        report, reshard = self._progress, self._options.reshard

        def progress(rank: int, nbytes: int, of: int) -> None:
            done[rank] = nbytes
            if not reshard:
                report(nbytes, of)
            else:
                report(min(total, total - coming + sum(list(done.values()))), total)

        def accept(rank: int) -> None:
            self._holders[rank].accept(plan.reads_of(rank), partial(progress, rank))
            self._machine.accepted(rank)

        self._each(ranks, accept)

    def _fetch(self, ranks: Sequence[int]) -> None:
        """Have all bytes come that were accepted."""

        def fetch(rank: int) -> None:
            try:
                self._holders[rank].fetch()
            finally:
                if self._options.reshard:
                    self._holders[rank].stop()
            self._machine.fetched(rank)

        self._each(ranks, fetch)

    def _confirm(self, ranks: Sequence[int]) -> None:
        """Ask holders whether their states are unchanged."""

        def ask(rank: int) -> None:
            self._holders[rank].confirm()
            self._machine.confirmed(rank)

        self._each(ranks, ask)

    def _commit(self) -> None:
        """Everything that can fail comes before the first write."""
        plan = self._plan
        assert plan is not None
        plan.make()

        def commit() -> None:
            self._landed = plan.commit()
            settle()
            for rank in self._machine.here:
                self._holders[rank].note_commit()

        uninterrupted(commit)
        for rank in self._machine.here:
            self._holders[rank].talk.send(m.Done())
        self._machine.committed()

    # Several holders at once

    def _each(self, ranks: Sequence[int], act: Callable[[int], object]) -> None:
        """Do something with each holder at once; those with which it fails are lost. Returns, or
        raises, when none of them is under way."""

        def attempt(rank: int) -> None:
            try:
                act(rank)
            except LOST as fault:
                self._lose(rank, fault)
            except BaseException:  # the call fails with it: no other holder is waited for
                if not self._alone:
                    hurry()
                raise

        def hurry() -> None:
            for deadline in (self._deadline, self._offers_due):
                deadline.hasten(0.0)

        if self._alone:
            attempt(*ranks)
        else:
            hurried(partial(run_on_threads, ranks, lambda: attempt, len(ranks)), hurry)

    def _lose(self, rank: int, fault: RelayError) -> None:
        """A holder is lost; the machine decides what that means."""
        self._machine.lose(rank, fault)
        if self._alone:
            return
        fault.rank = rank
        if rank in self._holders:
            self._holders[rank].talk.send(last_message(fault, torn=False))
            self._holders[rank].close()


def _inspected(into: object) -> object:
    """What can be found out about a destination before a state is offered."""
    if into is None:
        return None
    try:
        return Destination(into)
    except Exception:
        return into  # raised again when a state is offered for it, so that the sender receives it
