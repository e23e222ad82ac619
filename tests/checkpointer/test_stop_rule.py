"""The rule by which ranks stop at the same step, in every order that events can come in.

Three ranks call it for the same steps, as far ahead of each other as they like. A signal comes to
any of them, at any step. Each request to the store is answered, is lost, loses its answer, or is
carried out at any later time, while its rank trains. The tests look at every reachable state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import pytest

from torchrelay.checkpointer.stop_rule import (
    Known,
    Passed,
    StopRequest,
    StopState,
    Verb,
    Verdict,
    come_to,
    decide,
    learn,
    may_pass,
)
from torchrelay.errors import CheckpointError

WORLD = 3
Answer = bool | Passed | None


class Store(NamedTuple):
    asked: bool = False
    passed: Passed = Passed()
    joined: frozenset[int] = frozenset()


class Sent(NamedTuple):
    """A request that its rank has no answer to."""

    request: StopRequest
    done: bool = False  # it was carried out, and `answer` is on its way
    answer: Answer = None


class Rank(NamedTuple):
    """A rank at a step, where it waits for an answer; or how it ended."""

    known: Known
    step: int = 0
    signal: bool = False
    look: bool = False
    sent: Sent | None = None
    over: str = ""  # "stopped", "raised" an error, or "done" with all steps


Move = tuple[Rank, Store]


@dataclass(frozen=True)
class Job:
    """Three ranks, and what may happen to them. The acts of a rank between two accesses to the
    store concern no other: they are one move, with every choice of the rank and of its caller."""

    last: int  # the last step
    faults: bool = True
    heedless: bool = False  # callers may ignore an error
    # Mistakes, which have to be found:
    impatient: bool = False  # ranks pass a step without the answer that they need
    early: bool = False  # ranks join before they say which step they pass
    miscounted: bool = False  # one rank counts twice

    def begun(self, rank: Rank, step: int) -> Iterator[Rank]:
        """A call at a step, up to its first need of an answer."""
        if step > self.last:
            yield rank._replace(over="done")
            return
        rank = rank._replace(known=come_to(rank.known, step), step=step)
        free = rank.known.state is StopState.FREE
        for signal in {rank.signal, True} if self.faults else {rank.signal}:
            for look in (True, False) if free and self.faults else (True,):
                yield from self._at(rank._replace(signal=signal, look=look))

    def _at(self, rank: Rank) -> Iterator[Rank]:
        if rank.sent is not None:
            yield rank
            return
        known = rank.known
        if self.early and known.state is StopState.REQUESTED:
            known = known._replace(state=StopState.BOUND)
        try:
            known, todo = decide(known, signal=rank.signal, look=rank.look)
        except CheckpointError:
            yield rank._replace(over="raised")
            return
        rank = rank._replace(known=known)
        if isinstance(todo, StopRequest):
            yield rank._replace(sent=Sent(todo))
        elif todo is Verdict.STOP:
            yield rank._replace(over="stopped")
        else:
            yield from self.begun(rank, rank.step + 1)

    def _answered(self, rank: Rank) -> Iterator[Rank]:
        assert rank.sent is not None and rank.sent.done
        request = rank.sent.request
        known = learn(rank.known, request, rank.sent.answer)
        look = rank.look and request.verb not in (Verb.LOOK, Verb.COUNT)
        yield from self._at(rank._replace(known=known, look=look, sent=None))

    def _unanswered(self, rank: Rank) -> Iterator[Rank]:
        if may_pass(rank.known) or self.impatient:
            yield from self.begun(rank, rank.step + 1)
            return
        yield rank._replace(over="raised")
        if rank.sent is None:  # the caller tries again
            yield from self._at(rank._replace(look=True))
        if self.heedless:
            yield from self.begun(rank, rank.step + 1)

    def _carried_out(self, store: Store, number: int, request: StopRequest) -> tuple[Store, Answer]:
        verb = request.verb
        if verb is Verb.LOOK:
            return store, store.asked
        if verb is Verb.ASK:
            return store._replace(asked=True), None
        if verb is Verb.JOIN:
            return store._replace(joined=store.joined | {number}), None
        if verb is Verb.COUNT:
            return store, len(store.joined) >= WORLD - self.miscounted
        if store.passed == request.expected:
            store = store._replace(passed=request.desired)
        return store, store.passed

    def moves(self, number: int, rank: Rank, store: Store) -> Iterator[Move]:
        """What may happen next at a rank, and to the store."""
        if rank.sent is None:
            return
        done, after = rank, store
        if not rank.sent.done:
            after, answer = self._carried_out(store, number, rank.sent.request)
            done = rank._replace(sent=rank.sent._replace(done=True, answer=answer))
        if rank.over:  # a request that it left behind
            yield rank._replace(sent=None), after
            return
        ends = [(self._answered(done), after)]
        if self.faults:  # the answer is late, or lost; or so is the request
            lost = rank._replace(sent=None)
            ends += [(self._unanswered(one), after) for one in (done, lost)]
            ends += [(self._unanswered(one), store) for one in (rank, lost)]
        for ranks, then in ends:
            yield from ((there, then) for there in ranks)


def plain(rank: Rank) -> Rank:
    """The same without what makes no difference any more."""
    known = rank.known
    if rank.over:
        return Rank(Known(False), rank.step, sent=rank.sent, over=rank.over)
    free = known.state is StopState.FREE
    look = rank.look and (free or (known.closes and known.state is StopState.BOUND))
    return rank._replace(look=look, signal=rank.signal and free)


Point = tuple[int, int, int, int]  # the numbers of three ranks, and of the store


class Search:
    """All that can happen in a job. Ranks and stores have numbers, and moves are looked up. Ranks 1
    and 2 follow the same rule: points that differ in which of them is which are one."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.ranks: list[Rank] = []
        self.stores: list[Store] = []
        self._numbers: dict[Rank | Store, int] = {}
        self._swapped: dict[int, int] = {}
        self._moves: dict[tuple[int, int, int], list[tuple[int, int]]] = {}

    def rank(self, rank: Rank) -> int:
        rank = plain(rank)
        if rank not in self._numbers:
            self._numbers[rank] = len(self.ranks)
            self.ranks.append(rank)
        return self._numbers[rank]

    def store(self, store: Store) -> int:
        if store not in self._numbers:
            self._numbers[store] = len(self.stores)
            self.stores.append(store)
        return self._numbers[store]

    def point(self, a: int, b: int, c: int, store: int) -> Point:
        if b <= c:
            return a, b, c, store
        if store not in self._swapped:
            one = self.stores[store]
            others = frozenset({0: 0, 1: 2, 2: 1}[rank] for rank in one.joined)
            self._swapped[store] = self.store(one._replace(joined=others))
        return a, c, b, self._swapped[store]

    def moves(self, place: int, rank: int, store: int) -> list[tuple[int, int]]:
        key = (place, rank, store)
        if key not in self._moves:
            found = self._job.moves(place, self.ranks[rank], self.stores[store])
            self._moves[key] = list({(self.rank(one), self.store(two)) for one, two in found})
        return self._moves[key]

    def points(self) -> Iterator[Point]:
        """All that can be reached."""
        store = self.store(Store())
        first = [
            {self.rank(one) for one in self._job.begun(Rank(Known(closes=place == 0)), 0)}
            for place in range(WORLD)
        ]
        seen = {self.point(*ranks, store) for ranks in product(*first)}
        todo = list(seen)
        yield from todo
        while todo:
            a, b, c, store = todo.pop()
            after = [self.point(one, b, c, then) for one, then in self.moves(0, a, store)]
            after += [self.point(a, one, c, then) for one, then in self.moves(1, b, store)]
            after += [self.point(a, b, one, then) for one, then in self.moves(2, c, store)]
            for point in after:
                if point not in seen:
                    seen.add(point)
                    todo.append(point)
                    yield point

    def is_mixed(self, point: Point) -> bool:
        """Whether a rank stopped at a step, and another at a different one, or has passed it."""
        ranks = [self.ranks[one] for one in point[:3]]
        stops = {rank.step for rank in ranks if rank.over == "stopped"}
        if not stops:
            return False
        passed = [rank.step - (rank.over != "done") for rank in ranks]
        return len(stops) > 1 or (not self._job.heedless and max(passed) >= min(stops))

    def first_mixed(self) -> str:
        """A point that must not be; "" if there is none."""
        for point in self.points():
            if self.is_mixed(point):
                return self.shown(point)
        return ""

    def shown(self, point: Point) -> str:
        a, b, c, store = point
        return "\n".join(map(str, [*(self.ranks[one] for one in (a, b, c)), self.stores[store]]))


@pytest.mark.parametrize(
    "last",
    [1, 2, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=lambda last: f"{last + 1} steps",
)
def test_ranks_stop_at_the_same_step_or_not_at_all(last: int) -> None:
    search = Search(Job(last))
    assert search.first_mixed() == ""
    stopped = {rank.step for rank in search.ranks if rank.over == "stopped"}
    assert stopped == set(range(1, last + 1)), "each step but the first may be the one"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_whose_callers_ignore_errors_never_save_different_steps() -> None:
    assert Search(Job(2, heedless=True)).first_mixed() == ""


@pytest.mark.parametrize("mistake", ["impatient", "early", "miscounted"])
def test_the_search_finds_mistakes(mistake: str) -> None:
    assert Search(Job(2, **{mistake: True})).first_mixed() != ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "last", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_wherever_faults_end_all_ranks_stop_soon(last: int) -> None:
    """From each state in which a rank asks the others to stop, and every rank still runs."""
    search = Search(Job(last))
    calm = Search(Job(last + 100, faults=False))
    ends: set[Point] = set()
    for point in search.points():
        ranks, store = [search.ranks[one] for one in point[:3]], search.stores[point[3]]
        asked = store.asked or any(rank.known.state is StopState.ASKING for rank in ranks)
        if not asked or any(rank.over for rank in ranks):
            continue
        path: list[Point] = []
        here = calm.point(*map(calm.rank, ranks), calm.store(store))
        while here not in ends:
            path.append(here)
            assert len(path) < 50, search.shown(point)
            now = [calm.ranks[one].over for one in here[:3]]
            if all(now):
                assert now == ["stopped"] * WORLD
                break
            here = answered(calm, here)
        ends.update(path)
    assert ends


def answered(search: Search, point: Point) -> Point:
    """Each rank gets an answer, unless it is ahead of another by more than a step: collectives of
    a job allow no more."""
    *ranks, store = point
    slowest = min(search.ranks[one].step for one in ranks)
    for place, one in enumerate(ranks):
        rank = search.ranks[one]
        if not rank.over and rank.step <= slowest + 1:
            ((ranks[place], store),) = search.moves(place, one, store)
    return search.point(*ranks, store)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Passed(), ""),
        (Passed(closed=True), " closed"),
        (Passed(0), "0"),
        (Passed(12), "12"),
        (Passed(12, closed=True), "12 closed"),
    ],
)
def test_the_value_in_the_store_is_a_text(value: Passed, text: str) -> None:
    assert (str(value), Passed.parse(text)) == (text, value)
