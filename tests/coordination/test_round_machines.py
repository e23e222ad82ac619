"""The state machines of a round, driven by hand: each row of their tables."""

from __future__ import annotations

import pytest

from torchrelay.coordination.coordinator_round import (
    Answer,
    CallMade,
    CoordinatorRound,
    RoundOutcome,
    RoundRequest,
    RoundStage,
    RoundVerb,
    WaitEnd,
)
from torchrelay.coordination.member_round import MemberRound, MemberStage
from torchrelay.coordination.messages import CallName

SAVE, NEXT, LOAD = CallName("save", 7), CallName("save", 8), CallName("load")


def driven(machine: CoordinatorRound, *answers: Answer) -> tuple[CoordinatorRound, list[str]]:
    """The machine after these answers, and the requests that they were for."""
    requests = []
    for answer in answers:
        requests.append(shown(machine.request))
        machine = machine.after(answer)
    return machine, requests


def shown(request: RoundRequest) -> str:
    return f"{request.verb.name} {request.rank}" if request.rank else request.verb.name


def coordinator(name: CallName = SAVE, *, first: bool = True) -> CoordinatorRound:
    return CoordinatorRound(name, (1, 2), first)


def test_ranks_that_make_one_call_get_a_decision() -> None:
    answers = [WaitEnd.HERE, CallMade(SAVE), CallMade(SAVE), None, None, None]
    made, requests = driven(coordinator(), *answers)
    assert requests == ["WAIT", "READ 1", "READ 2", "DECIDE", "ANSWER 1", "ANSWER 2"]
    assert made.stage is RoundStage.OVER and made.outcome is RoundOutcome.DECIDED


def test_messages_of_later_rounds_are_removed_before_the_decision() -> None:
    answers = [WaitEnd.HERE, CallMade(SAVE), CallMade(SAVE), None, None, None, None, None]
    made, requests = driven(coordinator(first=False), *answers)
    assert requests[3:] == ["REMOVE 1", "REMOVE 2", "DECIDE", "ANSWER 1", "ANSWER 2"]
    assert made.outcome is RoundOutcome.DECIDED


def test_a_message_that_is_gone_is_waited_for_again() -> None:
    made, requests = driven(
        coordinator(), WaitEnd.HERE, None, CallMade(SAVE), WaitEnd.HERE, WaitEnd.HERE
    )
    assert requests == ["WAIT", "READ 1", "READ 2", "PAUSE", "WAIT"]
    assert made.stage is RoundStage.READING and made.gone == [1, 2] and made.request.rank == 1


def test_the_pause_ends_with_the_time() -> None:
    made, _ = driven(coordinator(), WaitEnd.HERE, None, CallMade(SAVE), WaitEnd.OVERDUE)
    assert made.stage is RoundStage.ENDING


def test_a_rank_that_is_behind_is_answered_and_waited_for() -> None:
    made, requests = driven(coordinator(NEXT), WaitEnd.HERE, CallMade(SAVE), CallMade(NEXT), None)
    assert requests[3:] == ["ANSWER 1"]
    assert made.stage is RoundStage.GATHERING and made.behind == ((1, 7),)
    made, _ = driven(made, WaitEnd.HERE, CallMade(SAVE), CallMade(NEXT))
    assert dict(made.rejected).keys() == {0, 2}, "it does not come further"
    made, requests = driven(made, None)
    assert requests == ["ANSWER 2"] and made.outcome is RoundOutcome.REJECTED


def test_a_coordinator_that_is_behind_fails_alone() -> None:
    made, _ = driven(coordinator(), WaitEnd.HERE, CallMade(NEXT), CallMade(NEXT))
    assert made.stage is RoundStage.OVER and made.outcome is RoundOutcome.REJECTED
    assert "save of step 7" in dict(made.rejected)[0]


def test_calls_of_different_kinds_all_fail() -> None:
    made, requests = driven(coordinator(), WaitEnd.HERE, CallMade(LOAD), CallMade(SAVE), None, None)
    assert requests[3:] == ["ANSWER 1", "ANSWER 2"] and made.outcome is RoundOutcome.REJECTED


@pytest.mark.parametrize(
    "answers", [[WaitEnd.OVERDUE], [WaitEnd.HERE, CallMade(SAVE), WaitEnd.DAMAGED]]
)
def test_a_call_that_fails_does_so_on_the_ranks_that_came(answers: list[Answer]) -> None:
    made, _ = driven(coordinator(), *answers)
    assert made.stage is RoundStage.ENDING
    made, requests = driven(made, None, CallMade(SAVE), None, CallMade(NEXT))
    assert requests == ["NOTE", "READ 1", "ANSWER 1", "READ 2"], "rank 2 makes another call"
    assert made.outcome is RoundOutcome.FAILED
    made, _ = driven(coordinator(first=False), *answers)
    made, requests = driven(made, None, WaitEnd.DAMAGED, CallMade(SAVE), None, None)
    assert requests == ["NOTE", "READ 1", "READ 2", "REMOVE 2", "ANSWER 2"]


def test_there_is_no_note_for_a_call_that_may_be_the_next_one() -> None:
    made, _ = driven(coordinator(LOAD), WaitEnd.OVERDUE)
    assert shown(made.request) == "READ 1"


@pytest.mark.parametrize("answers", [[WaitEnd.OFF], [WaitEnd.HERE, CallMade(SAVE), WaitEnd.OFF]])
def test_a_call_that_was_called_off_is_over(answers: list[Answer]) -> None:
    made, _ = driven(coordinator(), *answers)
    assert made.stage is RoundStage.OVER and made.outcome is RoundOutcome.OFF


def test_each_request_has_a_name_of_its_own() -> None:
    assert len(RoundVerb) == 7


# Of another rank


@pytest.mark.parametrize("first", [True, False])
def test_a_member_takes_its_answer(first: bool) -> None:
    made = MemberRound(first).sent().waited(WaitEnd.HERE)
    assert made.stage is MemberStage.TAKING
    made = made.took(True)
    assert made.answered and not made.unread
    assert made.stage is (MemberStage.LEAVING if first else MemberStage.OVER)
    assert made.left().stage is MemberStage.OVER


@pytest.mark.parametrize("first", [True, False])
def test_a_member_removes_the_message_of_a_call_that_was_called_off(first: bool) -> None:
    made = MemberRound(first).sent().waited(WaitEnd.OFF)
    assert made.stage is MemberStage.LEAVING and made.answered and made.unread


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", ["late", "gone", "interrupted"])
def test_a_member_that_gives_up_leaves_a_message_in_later_rounds(first: bool, how: str) -> None:
    made = MemberRound(first).sent()
    if how == "gone":
        made = made.waited(WaitEnd.HERE).took(False)
    else:
        made = made.waited(WaitEnd.OVERDUE) if how == "late" else made.broken_off()
    assert not made.answered and made.unread
    assert made.stage is (MemberStage.LEAVING if first else MemberStage.OVER)
    if first:
        assert made.broken_off().stage is MemberStage.OVER, "the store is lost"
