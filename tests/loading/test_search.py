"""Which step a load tries next: each row of the table, without a source."""

from __future__ import annotations

import pytest

from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    MismatchError,
    RelayError,
    ReplicaError,
    StepNotFoundError,
    TornStateError,
)
from torchrelay.loading.search import AttemptProgress, Look, StepLook, StepSearch, compare

OPENING, PLANNED, WRITING = (
    AttemptProgress(False, False),
    AttemptProgress(True, False),
    AttemptProgress(True, True),
)


def search(*steps: int, named: int | None = None) -> StepSearch:
    found = StepSearch("file:///runs/a", named)
    found.listed(steps)
    return found


def test_the_newest_step_that_was_not_skipped_is_next() -> None:
    found = search(9, 7, 5)
    assert found.next() == 9
    found.skip(9, DamagedError("wrong digest"))
    assert found.next() == 7
    found.listed([11, 9, 7, 5])
    assert [found.next(), found.next()] == [11, 7]


def test_the_last_error_has_the_reason_for_each_step() -> None:
    found = search(9)
    found.skip(found.next(), DamagedError("wrong digest"))
    with pytest.raises(StepNotFoundError, match=r"no step that verifies in file:///runs/a\n.*9: w"):
        found.next()


@pytest.mark.parametrize(
    ("fault", "progress", "doubtful"),
    [
        (DamagedError("x"), OPENING, True),
        (DamagedError("x"), PLANNED, True),
        (DamagedError("x"), WRITING, True),
        (StepNotFoundError("x"), OPENING, True),
        (StepNotFoundError("x"), PLANNED, False),
        (MismatchError("x"), PLANNED, False),
        (CheckpointError("x"), OPENING, False),
    ],
)
def test_only_damage_and_a_step_that_was_gone_are_looked_at_again(
    fault: RelayError, progress: AttemptProgress, doubtful: bool
) -> None:
    assert search(9).is_doubtful(fault, progress) == doubtful


def test_a_step_that_the_caller_named_is_not_skipped() -> None:
    fault = DamagedError("wrong digest")
    with pytest.raises(DamagedError) as raised:
        search(9, named=9).skip(9, fault)
    assert raised.value is fault


@pytest.mark.parametrize("end", ["another failure", "no other step", "the step was named"])
def test_tensors_that_were_written_make_a_failure_a_torn_state(end: str) -> None:
    found = search(9, named=9 if end == "the step was named" else None)
    torn = DamagedError("wrong digest", step=found.next())
    assert found.is_doubtful(torn, WRITING)
    with pytest.raises(TornStateError, match="wrong digest") as raised:
        found.skip(9, torn)
        if end == "another failure":
            found.fail(CheckpointError("a rank is missing"))
        found.next()
    assert raised.value.step == 9 and raised.value.__cause__ is torn


def test_a_torn_state_stays_the_error_that_it_is() -> None:
    found = search(9)
    assert found.is_doubtful(DamagedError("wrong digest"), WRITING)
    fault = TornStateError("the disk failed")
    with pytest.raises(TornStateError) as raised:
        found.fail(fault)
    assert raised.value is fault


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ([StepLook(b"a", b"a"), StepLook(b"a", b"a")], (Look.SAME, 0)),
        ([StepLook(b"", b""), StepLook(b"", b"")], (Look.SAME, 0)),  # damaged, then and now
        ([StepLook(b"a", b"b"), StepLook(b"a", b"b")], (Look.REPLACED, 0)),
        ([StepLook(b"a", b"a"), StepLook(b"b", b"a")], (Look.REPLACED, 0)),
        ([StepLook(b"a", None), StepLook(b"a", None)], (Look.REPLACED, 0)),
        ([StepLook(b"a", None), StepLook(b"a", b"a")], (Look.REPLACED, 0)),
        ([StepLook(b"a", b"a"), StepLook(b"a", b"a"), StepLook(b"", None)], (Look.UNSEEN, 2)),
    ],
)
def test_the_looks_of_all_ranks_are_compared(
    looks: list[StepLook], found: tuple[Look, int]
) -> None:
    assert compare(looks) == found


# Marked steps


def test_a_marked_step_is_tried_when_no_other_is_left() -> None:
    found = search(9, 7, 5, 3)
    fault = ReplicaError("replicas differ")
    for step in (9, 7):
        assert found.next() == step and found.is_marked(fault, OPENING)
        found.pass_over(step, fault)
    assert found.next() == 5 and not found.takes_marked
    found.skip(5, DamagedError("wrong digest"))
    found.listed([9, 7, 5, 3])  # another look does not bring them back
    assert found.next() == 3
    found.skip(3, DamagedError("wrong digest"))
    assert found.next() == 9 and found.takes_marked
    assert not found.is_marked(fault, OPENING)  # it is not passed over again
    found.skip(9, DamagedError("wrong digest"))
    assert found.next() == 7
    found.skip(7, DamagedError("wrong digest"))
    with pytest.raises(StepNotFoundError, match="step 3"):
        found.next()


def test_a_step_that_the_caller_names_may_be_marked() -> None:
    found = search(9, named=9)
    assert found.next() == 9 and found.takes_marked
    assert not found.is_marked(ReplicaError("replicas differ"), OPENING)


def test_only_a_step_that_was_not_planned_is_passed_over() -> None:
    found = search(9, 7)
    assert not found.is_marked(ReplicaError("x"), PLANNED)
    assert not found.is_marked(DamagedError("x"), OPENING)
