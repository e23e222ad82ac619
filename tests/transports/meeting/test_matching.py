"""Which receiver goes to which send, in any order of their coming and going."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.rounds import rounds
from torchrelay.transports.meeting.matching import (
    UNDECIDED_SECONDS,
    Matcher,
    OpenSend,
    ReceiverJoined,
)

WINDOW = 10.0


def opened(matcher: Matcher, step: int | None, *ranks: int, window: float = WINDOW) -> OpenSend:
    send = OpenSend(step, frozenset(ranks), window)
    matcher.open(send)
    return send


def joined(matcher: Matcher, rank: int, step: int | None = None) -> ReceiverJoined:
    join = ReceiverJoined(rank, step)
    matcher.join(join)
    return join


def pairs(matcher: Matcher) -> list[tuple[ReceiverJoined, OpenSend]]:
    return list(matcher.matches())


def test_whichever_comes_first_waits() -> None:
    for join_first in (True, False):
        matcher = Matcher()
        for first in (join_first, not join_first):
            assert pairs(matcher) == []
            if first:
                join = joined(matcher, 1)
            else:
                send = opened(matcher, None, 1)
        assert pairs(matcher) == [(join, send)]
        assert pairs(matcher) == []


def test_the_oldest_send_that_fits_is_taken() -> None:
    matcher = Matcher()
    sends = [opened(matcher, step, 1, 2) for step in (5, 6, 6)]
    joins = [joined(matcher, 1, 6), joined(matcher, 1), joined(matcher, 2, 6), joined(matcher, 1)]
    assert pairs(matcher) == list(zip(joins, (sends[i] for i in (1, 0, 1, 2)), strict=True))


def test_a_send_serves_a_rank_once() -> None:
    matcher = Matcher()
    send = opened(matcher, 5, 1)
    first, second = joined(matcher, 1), joined(matcher, 1)
    assert pairs(matcher) == [(first, send)]
    matcher.leave(first)
    assert pairs(matcher) == []
    another = opened(matcher, 5, 1)
    assert pairs(matcher) == [(second, another)]


@pytest.mark.parametrize(("asked", "step"), [(6, 5), (6, None)])
def test_another_step_is_not_taken(asked: int, step: int | None) -> None:
    matcher = Matcher()
    opened(matcher, step, 1)
    joined(matcher, 1, asked)
    assert pairs(matcher) == []


def test_nothing_is_kept_for_later() -> None:
    matcher = Matcher()
    send, join = opened(matcher, 5, 1), joined(matcher, 2)
    matcher.close(send)
    matcher.leave(join)
    late = joined(matcher, 1)
    opened(matcher, 5, 2)
    assert pairs(matcher) == []
    matcher.close(send)  # once more
    matcher.leave(join)
    assert pairs(matcher) == [] and late in matcher._joins


def test_a_receiver_is_told_that_it_could_have_got_another_state() -> None:
    def several(*, sends: int, joins: int) -> list[bool]:
        matcher = Matcher()
        for _ in range(sends):
            opened(matcher, None, 1)
        for _ in range(joins):
            joined(matcher, 1)
        return [join.several for join, _ in matcher.matches()]

    assert several(sends=1, joins=1) == [False]
    assert several(sends=2, joins=1) == [True]
    assert several(sends=2, joins=2) == [True, True]
    assert several(sends=1, joins=2)[0] is True


def test_a_send_that_is_being_served_counts() -> None:
    """A second state comes while the first is on its way: both callers get some state."""
    matcher = Matcher()
    opened(matcher, None, 1)
    joined(matcher, 1)
    assert [join.several for join, _ in matcher.matches()] == [False]
    opened(matcher, None, 1)
    joined(matcher, 1)
    assert [join.several for join, _ in matcher.matches()] == [True]


def test_sends_that_were_open_at_once_stay_marked() -> None:
    """The first is refused to a receiver that asked for no step. The second alone would not do
    either: that receiver asked other ranks too, and they may have served it the other state."""
    matcher = Matcher()
    first, second = opened(matcher, None, 1), opened(matcher, None, 1)
    opened(matcher, None, 2)
    assert first.overlaps == second.overlaps == {1}
    matcher.close(first)
    joined(matcher, 1)
    joined(matcher, 2)
    assert [join.several for join, _ in matcher.matches()] == [True, False]


# Steps that do not fit


def test_a_wrong_step_is_refused_after_a_while() -> None:
    matcher = Matcher()
    first, second = opened(matcher, 5, 1), opened(matcher, 6, 1)
    join = joined(matcher, 1, 9)
    assert matcher.wrong_steps(100.0) == ([], 100.0 + UNDECIDED_SECONDS)
    assert matcher.wrong_steps(101.0) == ([], 100.0 + UNDECIDED_SECONDS)
    assert matcher.wrong_steps(102.0) == ([(join, first)], None)
    # Neither comes up again, and the send serves nobody else of that rank.
    assert matcher.wrong_steps(200.0) == ([], None)
    assert pairs(matcher) == [] and not first.wanted and second.wanted == {1}


def test_the_right_send_may_come_a_little_later() -> None:
    matcher = Matcher()
    wrong, join = opened(matcher, 5, 1), joined(matcher, 1, 9)
    matcher.wrong_steps(100.0)
    right = opened(matcher, 9, 1)
    assert pairs(matcher) == [(join, right)]
    assert matcher.wrong_steps(200.0) == ([], None) and wrong.wanted == {1}


def test_a_receiver_with_no_send_at_all_waits_for_its_own_deadline() -> None:
    matcher = Matcher()
    joined(matcher, 1, 9)
    opened(matcher, 5, 2)  # for another
    assert matcher.wrong_steps(1e9) == ([], None)


def test_the_time_counts_anew_when_the_other_sends_end() -> None:
    matcher = Matcher()
    send = opened(matcher, 5, 1)
    joined(matcher, 1, 9)
    matcher.wrong_steps(100.0)
    matcher.close(send)
    assert matcher.wrong_steps(101.9) == ([], None)
    opened(matcher, 6, 1)
    assert matcher.wrong_steps(110.0) == ([], 110.0 + UNDECIDED_SECONDS)


def test_a_short_window_is_a_short_wait() -> None:
    matcher = Matcher()
    opened(matcher, 5, 1, window=0.5)
    joined(matcher, 1, 9)
    assert matcher.wrong_steps(100.0) == ([], 100.5)


# Any order


RANKS, STEPS = st.integers(0, 3), st.none() | st.integers(0, 2)


class AnyOrder(RuleBasedStateMachine):
    """Sends and joins that come and go, matched after each as the node does. What was given to a
    send is kept here, and compared with the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher, self.now = Matcher(), 0.0
        self.sends: list[OpenSend] = []
        self.waiting: list[ReceiverJoined] = []
        self.served: dict[OpenSend, list[int]] = {}
        self.refused: list[ReceiverJoined] = []
        self.undecided: dict[ReceiverJoined, float] = {}
        self.overlaps: dict[OpenSend, set[int]] = {}  # ranks for which another was open meanwhile
        self.rivals: set[ReceiverJoined] = (
            set()
        )  # joins that waited while another of their rank did

    def match(self) -> None:
        for join, send in self.matcher.matches():
            assert join in self.waiting and send in self.sends
            assert join.rank in send.ranks and join.step in (None, send.step)
            assert join.rank not in self.served[send], "served twice"
            older = self.sends[: self.sends.index(send)]
            assert not any(self.fits(one, join) for one in older), "an older one fits"
            assert join.several == (join.rank in self.overlaps[send] or join in self.rivals)
            self.waiting.remove(join)
            self.served[send].append(join.rank)
        found, again = self.matcher.wrong_steps(self.now)
        for join, send in found:
            assert join in self.waiting and send in self.sends
            assert join.step is not None and not any(self.fits(one, join) for one in self.sends)
            assert join.rank in send.ranks and join.rank not in self.served[send]
            assert self.now >= self.undecided[join] + min(UNDECIDED_SECONDS, WINDOW)
            self.waiting.remove(join)
            self.refused.append(join)
            self.served[send].append(join.rank)  # it counts as served: both are told
        assert again is None or again > self.now

    def fits(self, send: OpenSend, join: ReceiverJoined) -> bool:
        free = join.rank in send.ranks and join.rank not in self.served[send]
        return free and join.step in (None, send.step)

    def note_undecided(self) -> None:
        for join in self.waiting:
            others = any(
                join.rank in one.ranks and join.rank not in self.served[one] for one in self.sends
            )
            if others:
                self.undecided.setdefault(join, self.now)
            else:
                self.undecided.pop(join, None)

    @rule(step=STEPS, ranks=st.frozensets(RANKS, min_size=1))
    def open(self, step: int | None, ranks: frozenset[int]) -> None:
        send = OpenSend(step, ranks, WINDOW)
        self.overlaps[send] = set()
        for other in self.sends:
            self.overlaps[send] |= ranks & other.ranks
            self.overlaps[other] |= ranks & other.ranks
        self.sends.append(send)
        self.served[send] = []
        self.matcher.open(send)
        self.match()

    @rule(rank=RANKS, step=STEPS)
    def join(self, rank: int, step: int | None) -> None:
        join = ReceiverJoined(rank, step)
        if others := [one for one in self.waiting if one.rank == rank]:
            self.rivals.update([join, *others])
        self.waiting.append(join)
        self.matcher.join(join)
        self.match()

    @precondition(lambda self: self.sends)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        send = data.draw(st.sampled_from(self.sends))
        self.sends.remove(send)
        self.matcher.close(send)
        self.match()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        join = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(join)
        self.matcher.leave(join)
        self.match()

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.note_undecided()
        self.now += seconds
        self.match()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.note_undecided()
        assert self.matcher._joins == self.waiting
        assert self.matcher._sends == self.sends
        for join in self.waiting:
            assert not any(self.fits(send, join) for send in self.sends), "it waits for nothing"

    @invariant()
    def who_is_refused_is_refused_in_time(self) -> None:
        for join in self.waiting:
            since = self.undecided.get(join)
            assert since is None or self.now < since + UNDECIDED_SECONDS


AnyOrder.TestCase.settings = settings(
    max_examples=rounds(300, 3), stateful_step_count=40, deadline=None
)
TestAnyOrder = AnyOrder.TestCase
