"""The sender's loop handles each event once, in order, whenever it comes."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.transports.meeting.inbox import Inbox
from torchrelay.transports.protocol.sender import SendLoop


def loop(monkeypatch: pytest.MonkeyPatch, during: dict[str, list[str]]) -> tuple[Any, list[str]]:
    """A loop without receivers, and what it has handled; `during` an event, others come."""
    sending, handled = SendLoop.__new__(SendLoop), []
    sending._inbox = Inbox()

    def handle(self: SendLoop, event: Any) -> None:
        handled.append(event)
        for more in during.get(event, []):
            self._inbox.put(more)

    monkeypatch.setattr(SendLoop, "_handle", handle)
    return sending, handled


@pytest.mark.parametrize("first", [["a"], ["a", "b"], ["b", "a", "c"]])
def test_what_comes_while_another_event_is_handled_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, first: list[str]
) -> None:
    late = {"a": ["d", "e"], "e": ["f"], "f": ["g"]}
    sending, handled = loop(monkeypatch, late)
    for event in first:
        sending._inbox.put(event)
    for _ in range(8):
        sending.take(0.0)
    assert handled == [*first, "d", "e", "f", "g"]


def test_a_peer_that_goes_on_and_on_does_not_keep_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are looked at between two calls."""
    sending, handled = loop(monkeypatch, {"again": ["again"]})
    sending._inbox.put("again")
    sending.take(0.0)
    assert 1 <= len(handled) <= 2
