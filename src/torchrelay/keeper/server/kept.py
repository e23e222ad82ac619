"""Which staged steps a keeper has, which of them it must not lose, and how much memory that takes.

A worker stages into slots of its own. When it is gone, what it has shown stays: the newest step
that is known to be whole, and whatever was shown after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.serving import Serving
from torchrelay.endpoint.server.snapshots import ServedStep, ServedSteps
from torchrelay.keeper.server.messages import RoomGiven

UNSURE = 2  # steps that were shown here, and of which nobody said that all ranks have shown them
OWN = 0  # in place of a worker's number: the keeper itself


class KeptSteps:
    """Slots by worker, and the steps in them. All of it belongs to one event loop."""

    def __init__(self, serving: Serving, memory: int) -> None:
        self._serving = serving
        self.memory = memory  # bytes at most, 0 for any number
        self._owners: dict[int, int] = {}  # by slot, the number of its worker
        self._sizes: dict[int, int] = {}  # by slot, bytes
        self._live: set[int] = {OWN}
        self._whole: set[str] = set()  # steps that every rank has shown
        self._numbers = 0
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
        for slot in self._of(worker):
            if self._steps.in_slot(slot) is None:
                self._free(slot)
        await self.tidy()

    def _of(self, worker: int) -> list[int]:
        return [slot for slot, owner in self._owners.items() if owner == worker]

    # Steps.

    async def room(self, worker: int, nbytes: int) -> RoomGiven:
        """A slot of a worker that it may write to; its step, if it has one, is shown no more."""
        await self.tidy()
        async with self._lock:
            return await self._room(worker, nbytes)

    async def _room(self, worker: int, nbytes: int) -> RoomGiven:
        idle = sorted(
            (slot for slot in self._of(worker) if self._is_idle(slot)),
            key=lambda slot: (self._steps.in_slot(slot) is not None, self._sizes[slot] < nbytes),
        )
        chosen = idle[0] if idle else None
        gone = [] if self._fits(chosen, nbytes) else [slot for slot in idle if slot != chosen]
        for slot in gone:
            await self._clear(slot)
        if not self._fits(chosen, nbytes):  # copies of what nobody needs any more
            for slot in self._of(OWN):
                if slot != chosen and self._is_idle(slot):
                    await self._clear(slot)
        if not self._fits(chosen, nbytes):
            why = (
                f"{nbytes} bytes more than {self.nbytes - self._sizes.get(chosen or 0, 0)} would "
                f"be over the keeper's budget of {self.memory}"
                + (", which also has what is kept for copies" if self.pinned else "")
            )
            return RoomGiven(-1, why, gone)
        if chosen is None:
            self._numbers += 1
            chosen = self._numbers
            self._owners[chosen] = worker
        elif (step := self._steps.in_slot(chosen)) is not None:
            await self._serving.hide(step, chosen)
        if self._sizes.get(chosen, 0) < nbytes:
            self._steps.detach(chosen)  # the worker takes other memory for it
            self._sizes[chosen] = nbytes
        return RoomGiven(chosen, gone=gone)

    def _fits(self, slot: int | None, nbytes: int) -> bool:
        had = 0 if slot is None else self._sizes[slot]
        return not self.memory or self.nbytes + max(0, nbytes - had) <= self.memory

    def _is_idle(self, slot: int) -> bool:
        """Whether nothing in a slot is needed, and nobody reads it."""
        mapped = slot in self._steps.slots and self._steps.slots[slot].mapped
        if mapped or slot == self.filled:
            return False
        step = self._steps.in_slot(slot)
        return step is None or (
            step.id not in {one.id for one in self._needed()} and not self._serving.readers(step)
        )

    def _needed(self) -> Iterator[ServedStep]:
        """The newest step that is whole, the last ones that were shown after it, which may be whole
        as others know, and what is pinned."""
        shown = self._steps.shown
        last = max((at for at, step in enumerate(shown) if step.id in self._whole), default=-1)
        yield from shown[max(last, 0) : last + 1]
        yield from shown[last + 1 :][-UNSURE:]
        yield from (step for step in shown if step.id in self.pinned)

    def attached(self, slot: int, nbytes: int) -> None:
        self._sizes[slot] = nbytes

    def has(self, worker: int, slot: int) -> bool:
        return self._owners.get(slot) == worker

    async def note(self, worker: int, note: m.Note) -> ServedStep | None:
        """A worker heard that all ranks have shown a step; which it is."""
        found = None
        if note.skipped is None:
            for step in self._steps.shown:
                if step.step == note.step and any(self.has(worker, slot) for slot in step.parts):
                    self._whole.add(step.id)
                    found = step
        await self.tidy()
        return found

    async def tidy(self) -> None:
        """Free what nobody needs of workers that are gone."""
        async with self._lock:
            for slot in [slot for slot, owner in self._owners.items() if owner not in self._live]:
                if self._is_idle(slot):
                    await self._clear(slot)
            self._whole &= {step.id for step in self._steps.shown}

    async def _clear(self, slot: int) -> None:
        if (step := self._steps.in_slot(slot)) is not None:
            await self._serving.hide(step, slot)
        self._free(slot)

    def _free(self, slot: int) -> None:
        self._owners.pop(slot)
        self._sizes.pop(slot)
        self._steps.detach(slot)
