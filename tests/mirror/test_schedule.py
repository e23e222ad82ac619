"""Which step is copied next: the table of `CopySchedule`, event by event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.mirror.schedule import CopyEnd, CopySchedule

DONE, FAILED = CopyEnd.DONE, CopyEnd.FAILED


def test_every_step_is_copied_where_the_mirror_keeps_up() -> None:
    schedule = CopySchedule(1)
    for step in (5, 6, 7):
        schedule.committed(step)
        assert schedule.next() == step and schedule.retained == {step}
        schedule.ended(DONE)
        assert schedule.next() is None and schedule.retained == set()


def test_the_first_step_and_every_third() -> None:
    schedule, copied = CopySchedule(3), []
    for step in range(1, 9):
        schedule.committed(step)
        if (due := schedule.next()) is not None:
            copied.append(due)
            schedule.ended(DONE)
    assert copied == [1, 4, 7]


def test_the_step_that_was_restored_is_the_first() -> None:
    schedule, copied = CopySchedule(3), []
    schedule.restored(10)
    assert schedule.next() == 10
    schedule.ended(DONE)
    for step in range(11, 15):
        schedule.committed(step)
        if (due := schedule.next()) is not None:
            copied.append(due)
            schedule.ended(DONE)
    assert copied == [13]
    schedule.restored(2)  # in the middle of a job it means nothing
    assert schedule.next() is None


def test_the_newest_takes_the_place_of_one_that_waits() -> None:
    schedule = CopySchedule(1)
    schedule.committed(1)
    assert schedule.next() == 1
    schedule.committed(2)
    schedule.committed(3)
    assert schedule.next() is None and schedule.retained == {1, 3}
    schedule.ended(DONE)
    assert schedule.next() == 3


def test_after_a_failure_the_next_step_is_copied_due_or_not() -> None:
    schedule = CopySchedule(10)
    schedule.committed(1)
    assert schedule.next() == 1
    schedule.ended(FAILED)
    assert schedule.next() is None and schedule.retained == {1}
    schedule.committed(2)
    assert schedule.next() == 2 and schedule.retained == {2}
    schedule.ended(DONE)
    schedule.committed(3)
    assert schedule.next() is None


def test_a_step_that_waits_is_next_after_a_failure() -> None:
    schedule = CopySchedule(1)
    schedule.committed(1)
    assert schedule.next() == 1
    schedule.committed(2)
    schedule.ended(FAILED)
    assert schedule.next() == 2 and schedule.retained == {2}


def test_at_the_end_a_step_that_is_owed_is_tried_once_more() -> None:
    schedule = CopySchedule(5)
    schedule.committed(1)
    schedule.next()
    schedule.ended(FAILED)
    schedule.close()
    assert schedule.next() == 1
    schedule.ended(FAILED)
    assert schedule.next() is None and schedule.retained == set()


def test_a_step_that_was_saved_again_is_copied_again() -> None:
    schedule = CopySchedule(5)
    schedule.committed(1)
    schedule.next()
    schedule.ended(DONE)
    schedule.committed(1, replaces=True)
    assert schedule.next() == 1


@pytest.mark.parametrize("state", ["copying", "waiting", "owed"])
def test_a_step_that_is_removed_is_not_copied(state: str) -> None:
    schedule = CopySchedule(1)
    schedule.committed(4)
    schedule.next()
    if state == "waiting":
        schedule.committed(5)
        assert schedule.forget({5}) is False
        schedule.ended(DONE)
    elif state == "owed":
        schedule.ended(FAILED)
        assert schedule.forget({4}) is False
        schedule.close()
    else:
        assert schedule.forget({4, 5}) is True
        schedule.ended(DONE)
    assert schedule.next() is None and schedule.retained == set()


@given(
    every=st.integers(1, 4),
    events=st.lists(st.sampled_from(["commit", "done", "failed"]), max_size=40),
)
def test_no_step_is_older_than_one_copied_before_and_the_last_due_one_is_copied(
    every: int, events: list[str]
) -> None:
    schedule, copied, step = CopySchedule(every), [], 0
    copying: int | None = None
    for event in [*events, "done", "done", "close", "done", "done"]:
        if event == "commit":
            step += 1
            schedule.committed(step)
        elif event == "close":
            schedule.close()
        elif copying is not None:
            schedule.ended(DONE if event == "done" else FAILED)
            copied += [copying] if event == "done" else []
            copying = None
        if copying is None:
            copying = schedule.next()
        assert copying is None or copying in schedule.retained
    assert copying is None and schedule.retained == set()
    assert copied == sorted(set(copied))
    if step:
        assert copied[-1] > step - every
