"""Which of an endpoint's two slots has the newest step, and whose the other one is. Pure.

    phase      event      next       the driver has to
    ---------  ---------  ---------  -----------------------------------------------------------
    any        RESERVE    RESERVED   HIDE the step in the spare slot: the publisher may write there
    RESERVED   WRITE      WRITTEN    FORGET the hidden step: its memory has other bytes
    WRITTEN    WRITE      WRITTEN    FORGET (nothing: there is none any more)
    WRITTEN    SHOW_SAME  SAME       nothing: the newest step has the same content, and stays
    WRITTEN    SHOWN      IDLE       TURN: the spare slot is the newest, and the other one spare
    SAME       SHOWN      IDLE       FORGET
    RESERVED   UNUSED     IDLE       RESTORE the hidden step: nothing was written over it
    any other  UNUSED     IDLE       FORGET
    any        FAILED     IDLE       FORGET

A publish that ended without a message is over with the next RESERVE. Any other event is an error.
"""

from __future__ import annotations

from enum import Enum, auto

from torchrelay.errors import EndpointError


class Phase(Enum):
    """Where a publish is."""

    IDLE = auto()
    RESERVED = auto()  # the publisher may write to the spare slot
    WRITTEN = auto()  # and has
    SAME = auto()  # what it has written is the newest step once more


class SlotEvent(Enum):
    RESERVE = auto()
    WRITE = auto()
    SHOW_SAME = auto()
    SHOWN = auto()  # the publish is over, and its step is shown
    UNUSED = auto()  # it is over, and the slot was not written to
    FAILED = auto()  # it is over, and the slot may have been written to


class HiddenStep(Enum):
    """What becomes of the step that was in the spare slot."""

    HIDE = auto()
    RESTORE = auto()
    FORGET = auto()
    TURN = auto()  # forget it, and take the spare slot for the newest
    NOTHING = auto()


_TABLE: dict[tuple[Phase, SlotEvent], tuple[Phase, HiddenStep]] = {
    **{(phase, SlotEvent.RESERVE): (Phase.RESERVED, HiddenStep.HIDE) for phase in Phase},
    (Phase.RESERVED, SlotEvent.WRITE): (Phase.WRITTEN, HiddenStep.FORGET),
    (Phase.WRITTEN, SlotEvent.WRITE): (Phase.WRITTEN, HiddenStep.FORGET),
    (Phase.WRITTEN, SlotEvent.SHOW_SAME): (Phase.SAME, HiddenStep.NOTHING),
    (Phase.WRITTEN, SlotEvent.SHOWN): (Phase.IDLE, HiddenStep.TURN),
    (Phase.SAME, SlotEvent.SHOWN): (Phase.IDLE, HiddenStep.FORGET),
    **{(phase, SlotEvent.UNUSED): (Phase.IDLE, HiddenStep.FORGET) for phase in Phase},
    (Phase.RESERVED, SlotEvent.UNUSED): (Phase.IDLE, HiddenStep.RESTORE),
    **{(phase, SlotEvent.FAILED): (Phase.IDLE, HiddenStep.FORGET) for phase in Phase},
}


class SlotMachine:
    """Two slots, 0 and 1. The newest step is never in the spare one."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.newest = 1

    @property
    def spare(self) -> int:
        return 1 - self.newest

    def on(self, event: SlotEvent) -> HiddenStep:
        """Enter the next phase, and return what the driver does. An event out of order is an
        `EndpointError` and changes nothing."""
        if (self.phase, event) not in _TABLE:
            raise EndpointError(f"{event.name} came while a publish was {self.phase.name}")
        self.phase, action = _TABLE[self.phase, event]
        if action is HiddenStep.TURN:
            self.newest = self.spare
        return action
