"""The memory of an endpoint: two slots, one with the newest step. No torch."""

from __future__ import annotations

import time

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.slot_machine import HiddenStep, SlotEvent, SlotMachine
from torchrelay.endpoint.server.snapshots import ServedSnapshot


class TwoSlots:
    """The newest step is in one slot, the step before in the other, for those who still read it. A
    step that readers make progress with is not given up for `hold` seconds.

    `SlotMachine` decides; this class hides, restores and forgets steps. To be used with the
    service's lock held.
    """

    def __init__(self, service: Service, hold: float) -> None:
        self._service, self._hold = service, hold
        self._machine = SlotMachine()
        self._since = 0.0  # when the newest step was published
        self._hidden: ServedSnapshot | None = None  # the step in the spare slot, while it is hidden

    def reserve(self, on_device: bool) -> m.Reserved:
        """The spare slot, unless readers have a claim to the step in it."""
        service, slot = self._service, self._machine.spare
        older = service.snapshots.in_slot(slot)
        if older is not None:
            readers = service.readers(older)
            if readers and time.monotonic() - self._since < self._hold:
                who = ", ".join(sorted({one.address for one in readers})[:4])
                return m.Reserved(-1, f"step {older.step} is read by {who}")
        self._carry_out(SlotEvent.RESERVE)
        service.pending = service.devices.pending = True
        if older is not None:
            service.cut_readers(older)
        # A process that has the memory mapped keeps it, and the trainer takes other memory.
        memory = service.snapshots.slots.get(slot)
        dropped = [slot] if memory is not None and memory.mapped else []
        device = service.devices.take() if on_device else -1
        return m.Reserved(slot, dropped=dropped, device=device)

    def take(self) -> tuple[int, str] | None:
        """The trainer has written to the spare slot. Returns the slot of the newest step, and its
        snapshot."""
        self._carry_out(SlotEvent.WRITE)
        newest = self._service.snapshots.in_slot(self._machine.newest)
        return None if newest is None else (self._machine.newest, newest.id)

    def show(self, shown: m.Show) -> None:
        if shown.export is None and self._service.snapshots.by_id(shown.snapshot) is not None:
            # The same content once more: it stays where its readers have it.
            self._carry_out(SlotEvent.SHOW_SAME)
            shown.slot = self._machine.newest
        self._service.show(shown)

    def finish(self, ended: m.FinishPublish) -> None:
        if ended.unused:
            self._carry_out(SlotEvent.UNUSED)
        elif ended.failed or ended.skipped is not None:
            self._carry_out(SlotEvent.FAILED)
        else:
            self._carry_out(SlotEvent.SHOWN)
            self._since = time.monotonic()
        self._service.finish(ended)

    def _carry_out(self, event: SlotEvent) -> None:
        action, shown = self._machine.on(event), self._service.snapshots.shown
        if action is HiddenStep.HIDE:
            older = self._service.snapshots.in_slot(self._machine.spare)
            if older is not None:
                shown.remove(older)
                self._hidden = older
        elif action is HiddenStep.RESTORE and self._hidden is not None:
            shown.insert(0, self._hidden)
            self._hidden = None
        elif action in (HiddenStep.FORGET, HiddenStep.TURN) and self._hidden is not None:
            self._hidden.parts.clear()  # requests that were cut off find nothing more
            self._hidden = None
