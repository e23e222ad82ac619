"""Turns of the interpreter are short while a state is described, and as they were afterwards."""

from __future__ import annotations

import sys
import threading

from torchrelay.transports.meeting.turns import TURN_SECONDS, short_turns


def test_turns_are_short_until_the_last_user_has_left() -> None:
    usual = sys.getswitchinterval()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with short_turns():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with short_turns():
        thread.start()
        assert inside.wait(10)
    assert sys.getswitchinterval() <= TURN_SECONDS * 1.01
    leave.set()
    thread.join(10)
    assert sys.getswitchinterval() == usual
