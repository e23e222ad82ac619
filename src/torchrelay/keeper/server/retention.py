"""Which staged steps a keeper has, which of them it must not lose, and how much memory they take.

A worker stages into slots of its own. When it is gone, its steps stay as long as they are needed.
The rules, with the method that keeps each:

1. A step is needed if the ranks decided to keep it (`KeeperDecision`), if they did not know of it
   when they decided, or while a copy is made of it or from it (`_is_needed`).
2. A slot is idle if nothing in it is needed, and no one reads it, writes it to disk or fills it
   with a copy (`_is_idle`). Only an idle slot is given away or freed (`reserve`, `_clear`), and one
   of a worker that is gone if its step was never shown (`leave`).
3. Slots together take at most the budget; workers leave what copies need of it (`_fits`).
4. A worker has memory for no more steps while as many as `steps` are needed (`full`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import ServedSnapshot
from torchrelay.keeper.server.messages import JoinKeeper, KeeperDecision

OWN = 0  # in place of a worker's number: the keeper itself


@dataclass
class WorkerSlot:
    """A slot of a worker, or of the keeper itself. `held`: its worker writes it to disk."""

    worker: int
    nbytes: int = 0
    retained: bool = False


class Retention:
    """Slots by worker, and the steps in them. To be used with the keeper's lock and the service's
    lock held."""

    def __init__(self, service: Service, settings: JoinKeeper) -> None:
        self._service, self.settings = service, settings
        self._snapshots = service.snapshots
        self.reserved = 0  # bytes that copies take, or will
        self.most = 0  # bytes that there ever were
        self.copying: set[str] = set()  # steps that a copy is made of, or from
        self.copied_slot: int | None = None  # the slot that a copy is being written to
        self.decided = KeeperDecision([], False, [])
        self._slots: dict[int, WorkerSlot] = {}  # by number
        self._holders: set[int] = set()  # workers that ever held one
        self.workers: set[int] = set()  # that are connected
        self._numbers = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, also of those that are not filled yet."""
        return sum(slot.nbytes for slot in self._slots.values())

    # Workers.

    def leave(self, worker: int) -> None:
        """A worker is gone, and what it has not shown goes with it."""
        self.workers.discard(worker)
        self._holders.discard(worker)
        for slot in self._of(worker):
            self._slots[slot].retained = False
            if self._snapshots.in_slot(slot) is None:
                self._free(slot)
        self.tidy()

    def _of(self, worker: int) -> set[int]:
        return {number for number, slot in self._slots.items() if slot.worker == worker}

    def has(self, worker: int, slot: int) -> bool:
        return slot in self._slots and self._slots[slot].worker == worker

    def hold(self, worker: int, slot: int, retained: bool) -> None:
        """A worker reads from a slot of its own, or does so no longer."""
        if self.has(worker, slot):
            self._slots[slot].retained = retained
            if retained:
                self._holders.add(worker)

    # Memory for steps.

    def reserve(self, worker: int, nbytes: int) -> m.Reserved:
        """A slot of a worker that it may write a step to; the step in it is shown no more."""
        self.tidy()
        if worker != OWN and (why := self.full()):
            return m.Reserved(-1, why)
        idle = sorted(
            (slot for slot in self._of(worker) if self._is_idle(slot)),
            key=lambda slot: (
                self._snapshots.in_slot(slot) is not None,
                self._slots[slot].nbytes < nbytes,
            ),
        )
        chosen = idle[0] if idle else None
        most = self.settings.steps + (worker in self._holders)  # one that is held does not count
        spare = len(self._of(worker)) > most or not self._fits(worker, chosen, nbytes)
        others = [slot for slot in idle if slot != chosen] if spare else []
        dropped = [slot for slot in others if self._clear(slot)]
        if not self._fits(worker, chosen, nbytes):  # copies of steps that are not needed
            for slot in self._of(OWN) - {chosen}:
                self._clear(slot)
        if not self._fits(worker, chosen, nbytes):
            used = self.nbytes - (0 if chosen is None else self._slots[chosen].nbytes)
            budget = f"the budget of {self.settings.memory}"
            why = f"{nbytes} bytes more than {used} would be over {budget}"
            why += "; copies take a part of it" if self.reserved else ""
            return m.Reserved(-1, why, dropped)
        if chosen is None:
            self._numbers += 1
            chosen = self._numbers
            self._slots[chosen] = WorkerSlot(worker)
        elif (before := self._snapshots.in_slot(chosen)) is not None:
            self._service.hide(before, chosen)
        if self._slots[chosen].nbytes < nbytes:
            self._snapshots.detach(chosen)  # the worker takes other memory for it
            self.attached(chosen, nbytes)
        assert self.has(worker, chosen) and self._snapshots.in_slot(chosen) is None, "in use"
        return m.Reserved(chosen, dropped=dropped)

    def full(self) -> str:
        """Why workers get no memory for another step, whatever its size."""
        copies = self._of(OWN)
        needed = [one for one in self._snapshots.shown if self._is_needed(one)]
        needed = [one for one in needed if not copies >= one.parts.keys()]
        if len(needed) < self.settings.steps:
            return ""
        steps = ", ".join(str(one.step) for one in needed)
        return (
            f"the keeper has steps {steps} until the last of them is copied, and room for no more"
        )

    def attached(self, slot: int, nbytes: int) -> None:
        self._slots[slot].nbytes = nbytes
        self.most = max(self.most, self.nbytes)

    def _fits(self, worker: int, slot: int | None, nbytes: int) -> bool:
        """Whether a slot may take that many bytes. Workers leave as many as copies need."""
        had = 0 if slot is None else self._slots[slot].nbytes
        copies = sum(self._slots[one].nbytes for one in self._of(OWN))
        left = 0 if worker == OWN else max(0, self.reserved - copies)
        return (
            not self.settings.memory
            or self.nbytes + max(0, nbytes - had) + left <= self.settings.memory
        )

    def _is_idle(self, slot: int) -> bool:
        """Whether nothing in a slot is needed, and no one reads it."""
        mapped = slot in self._snapshots.slots and self._snapshots.slots[slot].mapped
        if mapped or slot == self.copied_slot or self._slots[slot].retained:
            return False
        step = self._snapshots.in_slot(slot)
        if step is None:
            return True
        # A step that was staged twice may be in a later slot with all that this one has.
        here = step.parts[slot].volumes.keys()
        elsewhere = any(
            number > slot and part.volumes.keys() >= here for number, part in step.parts.items()
        )
        needed = self._is_needed(step) and not elsewhere
        return not (needed or self._service.readers(step))

    def _is_needed(self, step: ServedSnapshot) -> bool:
        decided = self.decided
        return step.id in decided.keep or step.id not in decided.known or step.id in self.copying

    def tidy(self) -> None:
        """Free what is not needed of workers that are gone."""
        live = {OWN, *self.workers}
        for slot in [one for one, slot in self._slots.items() if slot.worker not in live]:
            self._clear(slot)

    def _clear(self, slot: int) -> bool:
        """Free a slot with the step in it; False where it is not idle. To clear another slot may
        have waited for readers, and more may have come meanwhile."""
        if not self._is_idle(slot):
            return False
        if (step := self._snapshots.in_slot(slot)) is not None:
            self._service.hide(step, slot)
        self._free(slot)
        return True

    def _free(self, slot: int) -> None:
        del self._slots[slot]
        self._snapshots.detach(slot)
