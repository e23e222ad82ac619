"""The two slots of an endpoint, as a pure machine: every event in every phase, and their laws."""

from __future__ import annotations

from itertools import product

import pytest

from torchrelay.endpoint.server.slot_machine import HiddenStep, Phase, SlotEvent, SlotMachine
from torchrelay.errors import EndpointError

IN_ORDER = {
    Phase.IDLE: {SlotEvent.RESERVE, SlotEvent.UNUSED, SlotEvent.FAILED},
    Phase.RESERVED: {SlotEvent.RESERVE, SlotEvent.WRITE, SlotEvent.UNUSED, SlotEvent.FAILED},
    Phase.WRITTEN: set(SlotEvent),
    Phase.SAME: {SlotEvent.RESERVE, SlotEvent.SHOWN, SlotEvent.UNUSED, SlotEvent.FAILED},
}


def at(phase: Phase) -> SlotMachine:
    machine = SlotMachine()
    machine.phase = phase
    return machine


@pytest.mark.parametrize(("phase", "event"), [*product(Phase, SlotEvent)])
def test_an_event_out_of_order_is_refused_and_changes_nothing(
    phase: Phase, event: SlotEvent
) -> None:
    machine = at(phase)
    if event in IN_ORDER[phase]:
        machine.on(event)
        return
    with pytest.raises(EndpointError, match=f"{event.name} came while a publish was {phase.name}"):
        machine.on(event)
    assert (machine.phase, machine.newest) == (phase, 1)


def test_a_publish_turns_the_slots() -> None:
    machine = SlotMachine()
    for newest in (0, 1, 0):
        done = [machine.on(e) for e in (SlotEvent.RESERVE, SlotEvent.WRITE, SlotEvent.SHOWN)]
        assert done == [HiddenStep.HIDE, HiddenStep.FORGET, HiddenStep.TURN]
        assert (machine.phase, machine.newest, machine.spare) == (Phase.IDLE, newest, 1 - newest)


def test_the_same_content_once_more_stays_where_it_is() -> None:
    machine = SlotMachine()
    events = (SlotEvent.RESERVE, SlotEvent.WRITE, SlotEvent.SHOW_SAME, SlotEvent.SHOWN)
    assert [machine.on(e) for e in events][2:] == [HiddenStep.NOTHING, HiddenStep.FORGET]
    assert (machine.phase, machine.newest) == (Phase.IDLE, 1)


def test_in_every_order_of_events_the_newest_is_never_written_and_only_unwritten_steps_return() -> (
    None
):
    """All sequences of six events that are in order."""
    seen = 0
    for events in product(SlotEvent, repeat=6):
        machine, hidden, written = SlotMachine(), False, False
        for event in events:
            if event not in IN_ORDER[machine.phase]:
                break
            spare = machine.spare
            action = machine.on(event)
            written = event is not SlotEvent.RESERVE and (written or event is SlotEvent.WRITE)
            hidden = hidden or action is HiddenStep.HIDE
            if action is HiddenStep.RESTORE:
                assert hidden and not written and event is SlotEvent.UNUSED
            if action in (HiddenStep.RESTORE, HiddenStep.FORGET, HiddenStep.TURN):
                hidden = False
            if machine.newest == spare:  # turned
                assert event is SlotEvent.SHOWN and written
            if machine.phase is Phase.IDLE:
                assert not hidden
        else:
            seen += 1
    assert seen > 1000
