"""Which staged steps a keeper has, which of them it must not lose, and how much memory that takes.

A worker stages into slots of its own. When it is gone, what it has shown stays as long as it is
needed: the newest step that all ranks have staged, steps of which that is not known, and those that
are kept for copies. Of its workers a keeper has `steps` steps at most: the needed ones, and the one
that is being staged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.serving import Serving
from torchrelay.endpoint.server.snapshots import ServedStep, ServedSteps
from torchrelay.keeper.server.messages import HeldStep, RoomGiven

OWN = 0  # in place of a worker's number: the keeper itself


class KeptSteps:
    """Slots by worker, and the steps in them. All of it belongs to one event loop."""

    def __init__(self, serving: Serving, memory: int) -> None:
        self._serving = serving
        self.memory = memory  # bytes at most, 0 for any number
        self.steps = 2  # of workers, at most
        self.reserved = 0  # bytes that copies take, or will
        self._owners: dict[int, int] = {}  # by slot, the number of its worker
        self._sizes: dict[int, int] = {}  # by slot, bytes
        self._held: set[int] = set()  # slots that their workers have written to disk
        self._holders: set[int] = set()  # workers that ever did
        self._live: set[int] = {OWN}
        self._whole: set[str] = set()  # steps that every rank has shown
        self._void: set[str] = set()  # steps that have parts which no keeper has
        self._numbers = 0
        self.most = 0  # bytes that there ever were
        self._lock = asyncio.Lock()
        self.pinned: set[str] = set()  # steps that are kept for copies
        self.filled: int | None = None  # the slot that a copy is being written to

    @property
    def _steps(self) -> ServedSteps:
        return self._serving.service.snapshots

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, those included that were given and not yet filled."""
        return sum(self._sizes.values())

    # Workers.

    def enter(self, worker: int) -> None:
        self._live.add(worker)

    async def leave(self, worker: int) -> None:
        """A worker is gone: what it has not shown goes with it."""
        self._live.discard(worker)
        self._holders.discard(worker)
        self._held -= self._of(worker)
        for slot in self._of(worker):
            if self._steps.in_slot(slot) is None:
                self._free(slot)
        await self.tidy()

    def _of(self, worker: int) -> set[int]:
        return {slot for slot, owner in self._owners.items() if owner == worker}

    # Steps.

    async def room(self, worker: int, nbytes: int, step: int | None = None) -> RoomGiven:
        """A slot of a worker that it may write a step to; what is in it is shown no more."""
        await self.tidy()
        async with self._lock:
            full = "" if worker == OWN else self.full(step)
            return RoomGiven(-1, full) if full else await self._room(worker, nbytes, step)

    def full(self, step: int | None = None) -> str:
        """Why workers have no room for another step, whatever it takes."""
        needed = [one for one in self._needed(step) if not self._of(OWN) >= one.parts.keys()]
        if len(needed) < self.steps:
            return ""
        kept = ", ".join(str(one.step) for one in needed)
        return f"the keeper has steps {kept} until the last of them is copied, and room for no more"

    async def _room(self, worker: int, nbytes: int, step: int | None) -> RoomGiven:
        idle = sorted(
            (slot for slot in self._of(worker) if self._is_idle(slot, step)),
            key=lambda slot: (self._steps.in_slot(slot) is not None, self._sizes[slot] < nbytes),
        )
        chosen = idle[0] if idle else None
        most = self.steps + (worker in self._holders)  # one that is held does not count
        spare = len(self._of(worker)) > most or not self._fits(worker, chosen, nbytes)
        gone = [slot for slot in idle if slot != chosen] if spare else []
        for slot in gone:
            await self._clear(slot)
        if not self._fits(worker, chosen, nbytes):  # copies of what nobody needs any more
            for slot in self._of(OWN):
                if slot != chosen and self._is_idle(slot):
                    await self._clear(slot)
        if not self._fits(worker, chosen, nbytes):
            why = (
                f"{nbytes} bytes more than {self.nbytes - self._sizes.get(chosen or 0, 0)} would "
                f"be over the keeper's budget of {self.memory}"
                + (", of which copies take a part" if self.reserved else "")
            )
            return RoomGiven(-1, why, gone)
        if chosen is None:
            self._numbers += 1
            chosen = self._numbers
            self._owners[chosen] = worker
        elif (before := self._steps.in_slot(chosen)) is not None:
            await self._serving.hide(before, chosen)
        if self._sizes.get(chosen, 0) < nbytes:
            self._steps.detach(chosen)  # the worker takes other memory for it
            self.attached(chosen, nbytes)
        return RoomGiven(chosen, gone=gone)

    def _fits(self, worker: int, slot: int | None, nbytes: int) -> bool:
        """Whether a slot may take so many bytes. Workers leave as many as copies need."""
        had = 0 if slot is None else self._sizes[slot]
        copies = sum(self._sizes[one] for one in self._of(OWN))
        left = 0 if worker == OWN else max(0, self.reserved - copies)
        return not self.memory or self.nbytes + max(0, nbytes - had) + left <= self.memory

    def _is_idle(self, slot: int, before: int | None = None) -> bool:
        """Whether nothing in a slot is needed, and nobody reads it."""
        mapped = slot in self._steps.slots and self._steps.slots[slot].mapped
        if mapped or slot == self.filled or slot in self._held:
            return False
        step = self._steps.in_slot(slot)
        if step is None:
            return True
        needed = step in self._needed(before) and not _is_elsewhere(step, slot)
        return not (needed or self._serving.readers(step))

    def _needed(self, before: int | None = None) -> list[ServedStep]:
        """Steps that must not be lost; `before`: while such a step is staged, which ends what is
        newer than it."""
        whole = [one for one in self._steps.shown if one.id in self._whole]
        older = [one for one in whole if before is None or one.step < before]
        newest = (older or whole)[-1:]
        return [
            one
            for one in self._steps.shown
            if one in newest or one.id in self.pinned or one.id not in self._whole | self._void
        ]

    @property
    def newest(self) -> ServedStep | None:
        """The newest step that all ranks have staged."""
        return next((one for one in reversed(self._steps.shown) if one.id in self._whole), None)

    # What all keepers have together.

    def told(self) -> list[HeldStep]:
        return [_held(one, one.id in self._whole) for one in self._steps.shown]

    def settle(self, whole: Iterable[str], void: Iterable[str]) -> None:
        """Of which steps the keepers have all parts, and of which they do not."""
        self._whole = (self._whole | set(whole)) - set(void)
        self._void = (self._void | set(void)) - set(whole)

    def doubt(self) -> None:
        """There are other keepers: which steps are whole is not known."""
        self._whole.clear()
        self._void.clear()

    def attached(self, slot: int, nbytes: int) -> None:
        self._sizes[slot] = nbytes
        self.most = max(self.most, self.nbytes)

    def hold(self, worker: int, slot: int, held: bool) -> None:
        """A worker reads from a slot of its own; or does so no more."""
        if held and self.has(worker, slot):
            self._held.add(slot)
            self._holders.add(worker)
        elif self.has(worker, slot):
            self._held.discard(slot)

    def has(self, worker: int, slot: int) -> bool:
        return self._owners.get(slot) == worker

    async def note(self, worker: int, note: m.Note) -> ServedStep | None:
        """A worker heard that all ranks have shown a step; which it is."""
        found = None
        if note.skipped is None:
            for step in self._steps.shown:
                if step.step == note.step and any(self.has(worker, slot) for slot in step.parts):
                    self.settle([step.id], [])
                    found = step
        await self.tidy()
        return found

    async def tidy(self) -> None:
        """Free what nobody needs of workers that are gone."""
        async with self._lock:
            for slot in [slot for slot, owner in self._owners.items() if owner not in self._live]:
                if self._is_idle(slot):
                    await self._clear(slot)
            shown = {step.id for step in self._steps.shown}
            self._whole &= shown
            self._void &= shown

    async def _clear(self, slot: int) -> None:
        if (step := self._steps.in_slot(slot)) is not None:
            await self._serving.hide(step, slot)
        self._free(slot)

    def _free(self, slot: int) -> None:
        self._owners.pop(slot)
        self._sizes.pop(slot)
        self._held.discard(slot)
        self._steps.detach(slot)


def _held(step: ServedStep, whole: bool) -> HeldStep:
    there = set(step.here)
    order = step.order if step.record else []
    bits = sum(1 << at for at, volume in enumerate(order) if volume.name in there)
    return HeldStep(step.id, whole, len(order), bits.to_bytes(-(-len(order) // 8), "little"))


def _is_elsewhere(step: ServedStep, slot: int) -> bool:
    """Whether a slot that is to stay has all that this one has: the step was staged twice."""
    here = step.parts[slot].volumes.keys()
    return any(number > slot and part.volumes.keys() >= here for number, part in step.parts.items())
