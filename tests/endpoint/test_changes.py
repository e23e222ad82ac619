"""The server remembers which elements changed from step to step, for as many steps as it should."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import torchrelay as tr
from torchrelay.deadlines import Deadline
from torchrelay.endpoint.front import Endpoint
from torchrelay.endpoint.server import changes as c
from torchrelay.endpoint.server.messages import StageSlot, Volume
from torchrelay.errors import UsageError
from torchrelay.parts.fields import Field
from torchrelay.weights import Encoding

HEAD, NBYTES = 24, 24 + 2 * 5000
FIELDS = [Field(0, HEAD, 1), Field(HEAD, NBYTES, 2)]
START = 4096  # of the volume, in its slot


class Published:
    """Steps that are staged in two slots in turn, as an endpoint does."""

    def __init__(self, limit: int) -> None:
        self.history = c.ChangeHistory(limit)
        self.history.ask()
        self.slots = [np.zeros(START + NBYTES, np.uint8) for _ in range(2)]
        self.newest: tuple[int, str] | None = None
        self.contents: dict[str, NDArray[np.uint8]] = {}

    def add(
        self, name: str, data: NDArray[np.uint8], *, volume: str = "model", fields: Any = FIELDS
    ) -> None:
        if self.history._under_way is not None:  # as where steps are seconds apart
            self.history._under_way[1].wait(30)
        self.history.settle()
        slot = 0 if self.newest is None else 1 - self.newest[0]
        self.slots[slot][START:] = data
        self.contents[name] = data.copy()
        request = StageSlot(
            slot, START + NBYTES, [Volume(volume, START, NBYTES, 4096)], False, [fields]
        )
        self.history.stage(request, memoryview(self.slots[slot]), self.newest)
        self.history.show(slot, len(self.contents), name)
        self.newest = slot, name

    def differing(self, base: str, name: str) -> NDArray[np.bool_]:
        old, new = (self.contents[one][HEAD:].view(np.uint16) for one in (base, name))
        found: NDArray[np.bool_] = old != new
        return found


def drifting(seed: int) -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, NBYTES, np.uint8)
    while True:
        yield data
        data = data.copy()
        data[HEAD:].view(np.uint16)[rng.random(5000) < 0.02] ^= 1


def test_changes_of_several_steps_are_united() -> None:
    published, drift = Published(3), drifting(0)
    for name in "abcde":
        published.add(name, next(drift))
    for base in "bcd":
        bitmap = published.history.between(base, "e", "model")
        assert bitmap is not None
        mask = bitmap.gather(HEAD, NBYTES - HEAD, 2)
        assert mask is not None
        wanted = published.differing(base, "e")
        assert wanted.any()
        assert (mask.mask | ~wanted).all()  # an element that changed and changed back is in it, too
        assert np.count_nonzero(mask) <= np.count_nonzero(wanted) + 10
    earlier = published.history.between("c", "d", "model")
    assert earlier is not None
    assert earlier.count == np.count_nonzero(published.differing("c", "d"))


def test_what_is_not_known_is_not_guessed() -> None:
    published, drift = Published(2), drifting(1)
    for name in "abcd":
        published.add(name, next(drift))
    between = published.history.between
    assert between("c", "d", "model") is not None
    assert between("a", "d", "model") is None  # older than the history
    assert between("never", "d", "model") is None
    assert between("d", "c", "model") is None  # backwards
    assert between("c", "never", "model") is None
    assert between("c", "d", "other") is None
    facts = published.history.facts()
    assert facts["bytes"] == 2 * (3 + 625)


def test_a_volume_that_is_laid_out_differently_has_no_changes() -> None:
    published, drift = Published(4), drifting(2)
    published.add("a", next(drift))
    published.add("b", next(drift), fields=[Field(0, NBYTES, 4)])
    published.add("c", next(drift), fields=[Field(0, NBYTES, 4)])
    published.add("d", next(drift), volume="other", fields=[Field(0, NBYTES, 4)])
    between = published.history.between
    assert between("a", "b", "model") is None
    assert between("a", "c", "model") is None
    assert between("b", "c", "model") is not None
    assert between("c", "d", "model") is None
    assert between("c", "d", "other") is None


def test_the_same_content_again_keeps_the_history() -> None:
    published, drift = Published(4), drifting(3)
    first, second, third = next(drift), next(drift), next(drift)
    for name, data in (("a", first), ("b", second), ("b", second), ("a", first), ("c", third)):
        published.add(name, data)
    for base, name in (("a", "b"), ("b", "a"), ("a", "c"), ("b", "c")):
        bitmap = published.history.between(base, name, "model")
        assert bitmap is not None, (base, name)
        mask = bitmap.gather(HEAD, NBYTES - HEAD, 2)
        assert mask is not None
        assert (mask.mask | ~published.differing(base, name)).all()


def test_without_a_history_nothing_is_compared() -> None:
    published, drift = Published(0), drifting(4)
    published.add("a", next(drift))
    published.add("b", next(drift))
    assert published.history.between("a", "b", "model") is None
    assert published.history.facts() == {"history": 0, "bytes": 0, "steps": []}


def test_memory_is_not_given_away_while_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = c.changed
    reached, may_go = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        reached.set()
        assert may_go.wait(30)
        return compare(*args)

    monkeypatch.setattr(c, "changed", slow)
    published, drift = Published(4), drifting(5)
    published.history.between("nothing", "a", "model")  # somebody asks for changes
    published.add("a", next(drift))
    published.add("b", next(drift))
    assert reached.wait(30)
    asked: list[Any] = []
    reader = threading.Thread(
        target=lambda: asked.append(published.history.between("a", "b", "model"))
    )
    reader.start()  # waits for the comparison
    settled = threading.Thread(target=lambda: published.history.settle(30))
    settled.start()
    settled.join(0.05)
    assert settled.is_alive()
    may_go.set()
    settled.join(30)
    reader.join(30)
    assert asked[0] is not None
    assert asked[0].count == np.count_nonzero(published.differing("a", "b"))


def test_a_comparison_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = c.changed
    reached, may_go = threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        reached.set()
        assert may_go.wait(30)
        return compare(*args)

    published, drift = Published(4), drifting(6)
    published.add("a", next(drift))
    monkeypatch.setattr(c, "changed", slow)
    published.add("b", next(drift))
    assert reached.wait(30)
    settled = threading.Thread(target=lambda: published.history.settle(0.01))
    settled.start()
    settled.join(0.1)  # it has given up, and waits for the piece that is compared
    assert settled.is_alive()
    may_go.set()
    settled.join(30)
    assert not settled.is_alive()
    assert published.history.between("a", "b", "model") is None
    published.add("c", next(drift))
    assert published.history.between("b", "c", "model") is not None


def test_nothing_is_compared_until_somebody_reads_parts() -> None:
    published, drift = Published(4), drifting(8)
    published.history._requested = None
    published.add("a", next(drift))
    published.add("b", next(drift))
    assert published.history.facts()["steps"] == []
    published.history.ask()
    published.add("c", next(drift))
    assert published.history.between("b", "c", "model") is not None
    assert published.history.between("a", "c", "model") is None


def show(endpoint: Endpoint, state: object, step: int) -> list[dict[str, Any]]:
    """Publish a step; what is known of changes when those of the step have been found."""
    endpoint.publish(state, step=step).result(60)
    deadline = Deadline(30)
    while not deadline.passed:
        found: list[dict[str, Any]] = endpoint.status()["changes"]["steps"]
        if all(one["ready"] for one in found):
            return found
        time.sleep(0.01)
    raise AssertionError("the changes were not found in time")


def counts(found: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["step"], one["changed"]) for one in found]


def test_an_endpoint_counts_changed_elements() -> None:
    state: dict[str, Any] = {
        "w": torch.zeros(64, 64, dtype=torch.bfloat16),
        "n": torch.arange(10),
        "at": 1,
    }
    into = {"w": torch.zeros_like(state["w"]), "n": torch.zeros(10, dtype=torch.int64), "at": 0}
    with tr.serve(state, step=1, encoding=Encoding(history=3), timeout=60) as endpoint:
        with tr.subscribe(endpoint.url, into=into, same_host=False, timeout=60) as subscription:
            subscription.update()
        for step, count in ((2, 5), (3, 7), (4, 0), (5, 11)):
            state["w"].view(-1)[:count] += 1
            found = show(endpoint, state, step)
        assert counts(found) == [(3, 7), (4, 0), (5, 11)]
        for one in found:
            assert 64 * 64 + 10 <= one["elements"] <= 64 * 64 + 10 + 400  # and those of a header
            # A bit for each element, and not one for each byte.
            assert one["elements"] / 8 <= one["bytes"] <= one["elements"] / 8 + 4
        assert endpoint.status()["changes"]["history"] == 3
        more = {**state, "more": torch.ones(3)}
        found = show(endpoint, more, 6)  # the layout of its only volume is another one
        assert counts(found)[-1] == (6, 0)
        assert found[-1]["bytes"] == 0
        more["w"] += 1
        assert counts(show(endpoint, more, 7))[-1] == (7, 64 * 64)


def test_history_can_be_turned_off() -> None:
    state = {"w": torch.zeros(8)}
    with tr.serve(state, step=1, encoding=Encoding(history=0), timeout=60) as endpoint:
        state["w"] += 1
        show(endpoint, state, 2)
        assert endpoint.status()["changes"] == {"history": 0, "bytes": 0, "steps": []}


@pytest.mark.parametrize("history", [-1, 1.5, True, "4", 10**9])
def test_a_history_is_a_number_of_steps(history: Any) -> None:
    with pytest.raises(UsageError, match="history"):
        Encoding(history=history)


def test_an_encoding_is_one() -> None:
    with pytest.raises(UsageError, match="encoding is an Encoding, not dict"):
        tr.serve({"w": torch.zeros(1)}, step=1, encoding={"history": 1})  # type: ignore[arg-type]
