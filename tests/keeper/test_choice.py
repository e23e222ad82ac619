"""What the keepers of a job do next, from what each of them has."""

from __future__ import annotations

import pytest

import torchrelay as tr
from torchrelay.keeper.choice import TRIES, check_budget, choose
from torchrelay.keeper.server.messages import CopiesTold, HeldStep


def told(copied: str = "", idle: bool = True, failed: int = 0, **here: int | None) -> CopiesTold:
    """What a keeper says of steps with three volumes: bits of those that it has, or None where it
    heard that all ranks have staged the step."""
    steps = [
        HeldStep(name, bits is None, 3, bytes([1 if bits is None else bits]))
        for name, bits in here.items()
    ]
    return CopiesTold(copied, idle, failed, "full" if not idle else "", steps)


def test_a_step_is_safe_when_all_have_copied_it() -> None:
    word, why = choose([told("a"), told("a")], several=True, others=False)
    assert (word.safe, word.begin, word.alone, why) == ("a", True, False, "")
    word, _ = choose([told("a"), told("b")], several=True, others=False)
    assert (word.safe, word.begin) == ("", True)


def test_nothing_begins_and_full_keepers_skip_while_one_copies() -> None:
    word, why = choose([told("a"), told("a", idle=False)], several=True, others=False)
    assert (word.safe, word.begin, why) == ("a", False, "full")


def test_what_was_heard_counts_among_the_same_keepers_alone() -> None:
    both = [told(s=0b011, t=None), told(s=0b100, t=0b010, u=0b010)]
    word, _ = choose(both, several=True, others=False)
    assert (word.whole, word.void) == (["s", "t"], ["u"])
    word, _ = choose(both, several=True, others=True)  # of t a part was with one that is gone
    assert (word.whole, word.void, word.safe) == (["s"], ["t", "u"], "")


def test_a_step_without_a_record_is_not_whole() -> None:
    nobody = [CopiesTold("", True, 0, "", [HeldStep("s", False, 0, b"")])]
    assert choose(nobody, several=False, others=False)[0].void == ["s"]


def test_copies_that_go_wrong_again_and_again_are_not_waited_for() -> None:
    for failed, alone in ((TRIES - 1, False), (TRIES, True)):
        word, _ = choose([told("a"), told("b", failed=failed)], several=True, others=False)
        assert word.alone == alone


def test_the_least_budget() -> None:
    urls = ["a", "a", "b", "c"]
    parts = [10, 10, 5, 1]  # c copies b, b copies a, a copies c
    least = {"a": 2 * (20 + 1), "b": 2 * (5 + 20), "c": 2 * (1 + 5)}
    check_budget(parts, urls, [least[url] for url in urls], copies=1)
    check_budget(parts, urls, [0] * 4, copies=1)
    check_budget(parts, urls, [40, 40, 10, 2], copies=0)
    for url in least:
        budgets = [least[one] - (one == url) for one in urls]
        with pytest.raises(tr.UsageError, match=f"the keeper at {url}"):
            check_budget(parts, urls, budgets, copies=1)
