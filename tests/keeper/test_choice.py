"""What the keepers of a job do next, from what each of them has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchrelay as tr
from torchrelay.keeper.choice import TRIES, check_budget, choose
from torchrelay.keeper.server.messages import KeeperDecision, KeeperReport, RetainedStep

STEPS = {"s": 1, "t": 2, "u": 3}


def report(copying: str = "", failed: int = 0, copied: str = "", **here: int) -> KeeperReport:
    """A keeper's report of steps with three volumes: bits of those that it has, oldest first, and
    the steps that it has copied."""
    steps = [
        RetainedStep(STEPS[name], name, 3, bytes([bits]), name in copied)
        for name, bits in here.items()
    ]
    return KeeperReport(steps, copying, failed, "full" if copying else "")


def decided(*reports: KeeperReport, step: int = 4, copies: bool = True) -> KeeperDecision:
    return choose(reports, step, copies=copies)[0]


def test_the_newest_complete_step_is_kept() -> None:
    both = report(s=0b011, t=0b011, u=0b001), report(s=0b100, t=0b100, u=0b010)
    found = decided(*both, copies=False)
    assert found.keep == ["t"] and found.known == ["s", "t", "u"] and not found.copy


def test_the_last_step_that_all_have_copied_is_kept_until_the_next_one_is() -> None:
    first = report(s=0b111, t=0b011, copied="s")
    second = report(s=0b111, t=0b111, copied="st")
    found = decided(first, second)
    assert found.keep == ["s", "t"] and found.copy
    found = decided(report(s=0b111, t=0b111, copied="st"), second)
    assert found.keep == ["t"] and found.copy


def test_nothing_begins_and_full_keepers_skip_while_one_copies() -> None:
    idle, busy = report(s=0b111, t=0b111, copied="s"), report(copying="t", s=0b111, t=0b001)
    found, why = choose([idle, busy], 4, copies=True)
    assert (found.keep, found.copy, why) == (["t"], False, "full")


def test_a_step_with_a_part_that_is_gone_is_given_up() -> None:
    assert decided(report(s=0b111, t=0b011), report(t=0b010)).keep == ["s"]


def test_a_step_without_a_record_is_not_complete() -> None:
    unknown = KeeperReport([RetainedStep(1, "s", 0, b"", False)], "", 0, "")
    found = decided(unknown, copies=False)
    assert found.keep == [] and found.known == ["s"]


def test_a_step_that_goes_back_keeps_the_one_that_it_goes_back_to() -> None:
    assert decided(report(s=0b111, t=0b111, u=0b111), step=2, copies=False).keep == ["s"]
    assert decided(report(s=0b111, t=0b111, u=0b111), step=1, copies=False).keep == ["u"]


def test_copies_that_go_wrong_again_and_again_are_not_waited_for() -> None:
    for failed, kept in ((TRIES - 1, ["s", "t"]), (TRIES, ["t"])):
        one = report(s=0b111, t=0b111, copied="s")
        other = report(failed=failed, s=0b111, t=0b111, copied="s")
        assert decided(one, other).keep == kept


def test_the_least_budget() -> None:
    urls = ["a", "a", "b", "c"]
    parts = [10, 10, 5, 1]  # c copies b, b copies a, a copies c
    least = {"a": 2 * (20 + 1), "b": 2 * (5 + 20), "c": 2 * (1 + 5)}
    check_budget(parts, urls, [least[url] for url in urls], copies=1)
    check_budget(parts, urls, [0] * 4, copies=1)
    check_budget(parts, urls, [40, 40, 10, 2], copies=0)
    for url in least:
        budgets = [least[one] - (one == url) for one in urls]
        with pytest.raises(tr.errors.UsageError, match=f"the keeper at {url}"):
            check_budget(parts, urls, budgets, copies=1)


bits = st.integers(0, 7)
held = st.builds(
    lambda name, here, volumes, copied: RetainedStep(
        STEPS[name], name, volumes, bytes([here]), copied
    ),
    st.sampled_from(list(STEPS)),
    bits,
    st.sampled_from([0, 3, 3, 3]),
    st.booleans(),
)
reports = st.lists(
    st.builds(
        KeeperReport,
        st.lists(held, max_size=3, unique_by=lambda one: one.snapshot),
        st.sampled_from(["", "", "s", "t"]),
        st.integers(0, TRIES),
        st.sampled_from(["", "full"]),
    ),
    min_size=1,
    max_size=3,
)


@given(reports, st.integers(0, 5), st.booleans())
def test_each_rule_holds_for_every_decision(
    some: list[KeeperReport], step: int, copies: bool
) -> None:
    found, why = choose(some, step, copies=copies)
    parts: dict[str, list[RetainedStep]] = {}
    for one in (one for report in some for one in report.steps):
        parts.setdefault(one.snapshot, []).append(one)
    whole = {
        name
        for name, each in parts.items()
        if any(one.volumes for one in each) and {7} == {each_bits(each)}
    }
    busy = {report.copying for report in some} - {""}
    kept = whole & set(found.keep)
    assert len(kept) >= bool(whole), "a step that is there as a whole is lost"
    if any(STEPS[name] < step for name in whole):
        assert any(STEPS[name] < step for name in kept), "the job cannot go back to it"
    assert busy <= set(found.keep) <= busy | set(parts) and set(found.known) == set(parts)
    assert len(set(found.keep) - busy) <= 1 + copies, "more than the rules need"
    assert not (busy and found.copy) and not (why and not busy)


def each_bits(parts: list[RetainedStep]) -> int:
    found = 0
    for one in parts:
        found |= one.here[0]
    return found
