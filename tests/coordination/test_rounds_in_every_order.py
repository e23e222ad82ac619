"""The rounds of a call, in every order that the requests of three ranks to the store can have.

Three ranks make the same calls: one of two rounds, then one of a single round. In the first call a
rank may stop waiting at any time, an answer may get lost or come twice, a message may be damaged,
and a rank may die at any time, the coordinator as well. In the last call all ranks that live are
patient, unless one has died. The tests look at every reachable state, and find changed rules wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from torchrelay.coordination.coordinator_round import (
    CallMade,
    CoordinatorRound,
    RoundOutcome,
    RoundRequest,
    RoundStage,
    RoundVerb,
    WaitEnd,
)
from torchrelay.coordination.member_round import MemberRound, MemberStage
from torchrelay.coordination.messages import COORDINATOR, CallName

WORLD = 3
OTHERS = tuple(range(1, WORLD))
# Each with the number of its rounds. Calls without a step have no order but that of the messages.
SAVES = (CallName("save", 1), 2), (CallName("save", 2), 1)
LOADS = (CallName("load"), 1), (CallName("load"), 1)

LAST = 1  # the second call

Key = tuple[Any, ...]


class Left(NamedTuple):
    """A message in the store."""

    call: int
    round: int
    answer: Key  # where its rank waits for the answer


class Given(NamedTuple):
    """An answer in the store. `prefix`: of the keys of the next round."""

    call: int
    round: int
    decided: bool
    prefix: Key


class Rank(NamedTuple):
    """A rank in a round, or before its next one, if it has no `machine`."""

    call: int = 0
    round: int = 1
    prefix: Key = ("first",)
    machine: CoordinatorRound | MemberRound | None = None
    read: tuple[tuple[int, Left], ...] = ()  # the coordinator's
    numbers: int = 0  # of keys that it has used
    behind: tuple[tuple[int, int], ...] = ()
    answered: tuple[tuple[int, Key], ...] = ()
    stale: frozenset[Key] = frozenset()
    taken: Given | None = None
    done: tuple[tuple[int, int], ...] = ()  # call and round of each answer that it got
    dead: bool = False

    @property
    def over(self) -> bool:
        return self.dead or self.call == LAST + 1


class World(NamedTuple):
    ranks: tuple[Rank, ...] = (Rank(),) * WORLD
    store: frozenset[tuple[Key, Left | Given | None]] = frozenset()
    late: bool = False  # whether ranks may stop waiting
    faults: int = 0  # that may still happen to what is in the store
    deaths: int = 0

    def after(self, number: int, rank: Rank, **changes: Any) -> World:
        ranks = (*self.ranks[:number], rank, *self.ranks[number + 1 :])
        return self._replace(ranks=ranks, **changes)


@dataclass(frozen=True)
class Mistakes:
    """Changes of the rules. The tests find each."""

    keeps: bool = False  # a rank leaves its message behind
    forgets: bool = False  # the coordinator takes a message that it has answered for a new one
    removes: bool = False  # the coordinator removes the messages of first rounds


NONE = Mistakes()


class Job:
    """Three ranks that carry out what their machines request, one request at a time."""

    def __init__(self, mistakes: Mistakes = NONE, calls: Any = SAVES) -> None:
        self._mistakes, self._calls = mistakes, calls

    def _name(self, rank: Rank) -> CallName:
        name: CallName = self._calls[rank.call][0]
        return name

    def moves(self, world: World) -> Iterator[World]:
        for number, rank in enumerate(world.ranks):
            if rank.over:
                continue
            if world.deaths:
                dead = rank._replace(dead=True, machine=None, read=(), taken=None)
                yield world.after(number, dead, deaths=world.deaths - 1)
            if rank.machine is None:
                yield self._begun(world, number, rank)
            elif isinstance(rank.machine, CoordinatorRound):
                yield from self._leads(world, rank, rank.machine)
            else:
                yield from self._takes_part(world, number, rank, rank.machine)

    def _begun(self, world: World, number: int, rank: Rank) -> World:
        """A round begins: what is stale is removed."""
        there = dict(world.store)
        stale = frozenset(key for key in rank.stale if key not in there)
        store = frozenset(one for one in world.store if one[0] not in rank.stale)
        first = rank.round == 1
        machine: Any = MemberRound(first)
        if number == COORDINATOR:
            machine = CoordinatorRound(self._name(rank), OTHERS, first, rank.behind)
        begun = rank._replace(machine=machine, stale=stale, numbers=rank.numbers + (number > 0))
        return world.after(number, begun, store=store)

    def _ended(self, rank: Rank, given: Given | None) -> Rank:
        """A round is over: the next round follows, or after a failure the next call."""
        rank = rank._replace(machine=None, read=(), taken=None)
        if given is not None and given.decided:
            rank = rank._replace(done=(*rank.done, (rank.call, rank.round)))
            if rank.round < self._calls[rank.call][1]:
                return rank._replace(round=rank.round + 1, prefix=given.prefix)
        return rank._replace(call=rank.call + 1, round=1, prefix=("first",))

    def _may_be_late(self, world: World, rank: Rank) -> bool:
        if any(one.dead for one in world.ranks):
            return True
        return world.late and rank.call < LAST

    # A rank other than the coordinator.

    def _takes_part(
        self, world: World, number: int, rank: Rank, machine: MemberRound
    ) -> Iterator[World]:
        key, answer = (*rank.prefix, rank.round, number), ("answer", number, rank.numbers)
        there = dict(world.store)
        store, after = world.store, machine
        if machine.stage is MemberStage.SENDING:
            store |= {(key, Left(rank.call, rank.round, answer))}
            after = machine.sent()
        elif machine.stage is MemberStage.WAITING:
            if answer in there:
                after = machine.waited(WaitEnd.HERE)
            else:
                if self._may_be_late(world, rank):
                    gone = self._moved(number, rank, machine.waited(WaitEnd.OVERDUE), answer)
                    yield world.after(number, gone)
                if ("failed", rank.prefix, self._name(rank)) not in there:
                    return
                after = machine.waited(WaitEnd.OFF)
        elif machine.stage is MemberStage.TAKING:
            given = there.get(answer)
            assert isinstance(given, Given)
            assert (given.call, given.round) == (rank.call, rank.round), "of another round"
            rank, after = rank._replace(taken=given), machine.took(True)
            store -= {(answer, given)}
            if world.faults and rank.call == 0:  # it comes twice
                twice = self._moved(number, rank, after, answer)
                yield world.after(number, twice, faults=world.faults - 1)
        elif machine.stage is MemberStage.LEAVING:
            if not self._mistakes.keeps:
                store = frozenset(one for one in store if one[0] != key)
            after = machine.left()
        yield world.after(number, self._moved(number, rank, after, answer), store=store)

    def _moved(self, number: int, rank: Rank, machine: MemberRound, answer: Key) -> Rank:
        if machine.stage is not MemberStage.OVER:
            return rank._replace(machine=machine)
        if machine.unread:
            rank = rank._replace(stale=rank.stale | {answer})
        return self._ended(rank, rank.taken)

    # The coordinator.

    def _leads(self, world: World, rank: Rank, machine: CoordinatorRound) -> Iterator[World]:
        verb, other = request = machine.request
        key = (*rank.prefix, rank.round, other)
        there, store = dict(world.store), world.store
        if verb in (RoundVerb.WAIT, RoundVerb.PAUSE):
            keys = [(*rank.prefix, rank.round, other) for other in OTHERS]
            if verb is RoundVerb.PAUSE or all(one in there for one in keys):
                yield self._led(world, rank, machine.after(WaitEnd.HERE))
            if self._may_be_late(world, rank) and not all(one in there for one in keys):
                yield self._led(world, rank, machine.after(WaitEnd.OVERDUE))
        elif verb is RoundVerb.READ:
            left = there.get(key)
            if isinstance(left, Left) and left.answer != dict(rank.answered).get(other):
                found = rank._replace(read=(*rank.read, (other, left)))
                yield self._led(world, found, machine.after(CallMade(self._calls[left.call][0])))
                if world.faults and rank.call == 0:
                    damaged = self._led(world, rank, machine.after(WaitEnd.DAMAGED))
                    yield damaged._replace(faults=world.faults - 1)
            else:
                yield self._led(world, rank, machine.after(None))
        elif verb is RoundVerb.REMOVE:
            store = frozenset(one for one in store if one[0] != key)
            yield self._led(world._replace(store=store), rank, machine.after(None))
        elif verb is RoundVerb.ANSWER:
            answered = self._answered(rank, machine, other)
            if self._mistakes.removes and machine.first:
                store = frozenset(one for one in store if one[0] != key)
            if not self._mistakes.forgets:
                last = dict(rank.answered) | {other: answered[0]}
                rank = rank._replace(answered=tuple(sorted(last.items())))
            yield self._led(world._replace(store=store | {answered}), rank, machine.after(None))
            if world.faults and rank.call == 0:  # it gets lost
                lost = world._replace(faults=world.faults - 1)
                yield self._led(lost, rank, machine.after(None))
        elif verb is RoundVerb.NOTE:
            note = "failed", rank.prefix, self._name(rank)
            store |= {(note, None)}
            rank = rank._replace(stale=rank.stale | {note})
            yield self._led(world._replace(store=store), rank, machine.after(None))
        else:
            assert request == RoundRequest(RoundVerb.DECIDE)
            for _, left in rank.read[-len(OTHERS) :]:
                assert (left.call, left.round) == (rank.call, rank.round), "decided with another"
            numbers = rank.numbers + 1
            prefix = ("call", numbers) if machine.first else rank.prefix
            rank = rank._replace(numbers=numbers, prefix=prefix)
            yield self._led(world, rank, machine.after(None))

    def _answered(self, rank: Rank, machine: CoordinatorRound, other: int) -> tuple[Key, Given]:
        left = dict(rank.read)[other]
        # A rank that is behind gets the answer to its own call.
        decided = machine.stage is RoundStage.DECIDING
        return left.answer, Given(left.call, left.round, decided, rank.prefix)

    def _led(self, world: World, rank: Rank, machine: CoordinatorRound) -> World:
        if machine.stage is not RoundStage.OVER:
            read = () if machine.stage is RoundStage.GATHERING else rank.read
            after = rank._replace(machine=machine, read=read)
        else:
            decided = machine.outcome is RoundOutcome.DECIDED
            given = Given(rank.call, rank.round, decided, rank.prefix)
            behind = machine.behind if machine.first else rank.behind
            after = self._ended(rank._replace(behind=behind), given)
        return world.after(COORDINATOR, after)


def explored(job: Job, begin: World) -> dict[World, list[World]]:
    """Every state that can be reached, with those that follow."""
    found: dict[World, list[World]] = {}
    todo = [begin]
    while todo:
        world = todo.pop()
        if world not in found:
            found[world] = list(job.moves(world))
            todo.extend(found[world])
    return found


def checked(job: Job, begin: World) -> list[World]:
    """The ends of all orders, after a check of each."""
    found = explored(job, begin)
    before: dict[World, list[World]] = {}
    for world, following in found.items():
        for after in following:
            before.setdefault(after, []).append(world)
    ends = [world for world in found if all(rank.over for rank in world.ranks)]
    reaching, todo = set(ends), list(ends)
    while todo:
        for world in before.get(todo.pop(), []):
            if world not in reaching:
                reaching.add(world)
                todo.append(world)
    assert len(reaching) == len(found), "a rank waits for ever"
    for world in ends:
        check_end(begin, world)
    return ends


def check_end(begin: World, world: World) -> None:
    if not any(rank.dead for rank in world.ranks):
        assert all((LAST, 1) in rank.done for rank in world.ranks), "a later call fails"
        if begin.faults == 0:
            left = [key for key, _ in world.store if key[0] == "first"]
            assert not left, "a message of a first round is left behind"
    if not (begin.late or begin.faults or begin.deaths):
        assert len({rank.done for rank in world.ranks}) == 1 and not world.store


@pytest.mark.parametrize("calls", [SAVES, LOADS])
def test_calls_of_ranks_in_step_succeed_and_leave_nothing(calls: Any) -> None:
    ends = checked(Job(calls=calls), World())
    rounds = sum(number for _, number in calls)
    assert {len(rank.done) for world in ends for rank in world.ranks} == {rounds}


def test_ranks_that_stop_waiting_fail_no_later_call() -> None:
    ends = checked(Job(), World(late=True))
    found = {tuple(len(rank.done) for rank in world.ranks) for world in ends}
    assert {(3, 3, 3), (1, 1, 1), (3, 2, 3), (2, 2, 2)} <= found


def test_the_other_ranks_end_where_one_dies() -> None:
    ends = checked(Job(), World(deaths=1))
    for number in range(WORLD):
        assert any(world.ranks[number].dead for world in ends)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"faults": 1}, {"deaths": 1}])
def test_lost_and_double_answers_damaged_messages_and_deaths(more: dict[str, int]) -> None:
    assert checked(Job(), World(late=True, **more))


@pytest.mark.parametrize(
    ("mistakes", "calls", "late", "found"),
    [
        (Mistakes(keeps=True), SAVES, True, "waits for ever"),
        (Mistakes(forgets=True), LOADS, False, "with another"),
        (Mistakes(removes=True), SAVES, True, "waits for ever"),
    ],
)
def test_a_mistake_is_found(mistakes: Mistakes, calls: Any, late: bool, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        checked(Job(mistakes, calls), World(late=late))
