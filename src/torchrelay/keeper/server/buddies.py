"""Which step a keeper has copies of, for the hosts before it in the ring. No torch.

What has to outlive a host is a step of which every host's part is on another host too. So all
keepers copy the same step: the ranks tell them when to begin (`CopyNext`), when no keeper is at a
copy any more. Until it is done everywhere, the one before is kept, whatever is staged meanwhile.
"""

from __future__ import annotations

import os
import ssl

from torchrelay.endpoint.server import messages as m
from torchrelay.endpoint.server.serving import Serving
from torchrelay.endpoint.server.snapshots import ServedStep
from torchrelay.keeper.server.copying import Copying, KeeperRing, WantedCopies
from torchrelay.keeper.server.kept import OWN, KeptSteps
from torchrelay.keeper.server.messages import CopiesTold, CopyNext
from torchrelay.memory.pages import reserve, sealed_memory


class Buddies:
    """The copies of one keeper. All of it belongs to one event loop."""

    def __init__(self, serving: Serving, kept: KeptSteps) -> None:
        self._serving, self._kept = serving, kept
        self._ring = KeeperRing([], "")
        self._token = ""
        self.rate, self.copies = 1.0, 0
        self.trusted: ssl.SSLContext | None = None  # who other keepers have to be, where by TLS
        self._safe = ""  # the step of which every keeper had its copies when it was last asked
        self._copied = ""  # the step of which this one has its copies
        self._next = False  # whether the next step that is told to be whole is to be copied
        self._failed = 0  # copies in a row that went wrong
        self._copying: Copying | None = None
        self._why = ""
        self.fetched = 0  # bytes, of all copies

    def meet(self, ring: KeeperRing, token: str) -> None:
        """The keepers of the job from here on: with others, other copies are to be made."""
        if ring != self._ring:
            self._copied = self._safe = ""
            self._failed = self._kept.reserved = 0
            self._kept.doubt()
            if self._copying is not None:  # from one that may be gone
                self._copying.stop()
            self._pin()
        self._ring, self._token = ring, token

    def told(self) -> CopiesTold:
        idle, full = self._copying is None, self._kept.full()
        return CopiesTold(self._copied, idle, self._failed, full, self._kept.told())

    def take(self, word: CopyNext) -> None:
        self._kept.settle(word.whole, word.void)
        if word.alone:
            self._copied = self._safe = ""
            self._failed = 0
        self._safe = word.safe or self._safe
        self._next = word.begin
        self._pin()

    def _pin(self) -> None:
        pinned = {self._safe, self._copied}
        if (copy := self._copying) is not None:
            pinned |= {one.id for one in (copy.wanted.step, copy.older) if one is not None}
        self._kept.pinned = pinned - {""}
        self._kept.filled = None if copy is None else copy.number

    async def copy(self, step: ServedStep | None) -> None:
        """All ranks have shown a step, or it is the newest and another was skipped: copy it, if
        that was chosen."""
        if step is None:
            return
        wanted = WantedCopies.of(step, self._ring.sources(self.copies))
        self._kept.reserved = max(self._kept.reserved, 2 * wanted.nbytes) if wanted.volumes else 0
        if not self._next or self._copying is not None:
            return
        self._next = False
        if step.id == self._copied:
            return
        if not wanted.volumes:
            self._copied = step.id
            self._pin()
            return
        older = self._before(step)
        self._kept.pinned |= {one.id for one in (step, older) if one is not None}
        room = await self._kept.room(OWN, wanted.nbytes)
        self._why = room.why
        if room.why:
            self._failed += 1
            self._pin()
            return
        slots = self._serving.service.snapshots.slots
        try:
            if room.slot not in slots:
                fd = sealed_memory(wanted.nbytes)
                try:
                    reserve(fd, wanted.nbytes)
                except MemoryError:
                    os.close(fd)
                    raise
                self._serving.service.snapshots.attach(room.slot, fd, wanted.nbytes)
        except (OSError, MemoryError) as fault:
            self._why = f"nothing is copied: {fault}"
            self._failed += 1
            self._pin()
            return
        self._copying = Copying(
            wanted,
            room.slot,
            slots[room.slot],
            older,
            ring=self._ring,
            token=self._token,
            trusted=self.trusted,
            rate=self.rate,
            done=lambda copy: self._serving.call_soon(lambda: self._finished(copy)),
        )
        self._pin()

    def _before(self, step: ServedStep) -> ServedStep | None:
        """The newest other step that this keeper has copies of."""
        for one in reversed(self._serving.service.snapshots.shown):
            if one is not step and any(self._kept.has(OWN, slot) for slot in one.parts):
                return one
        return None

    def _finished(self, copy: Copying) -> None:
        self._copying, self._why = None, copy.why
        self.fetched += copy.fetched
        self._failed = self._failed + 1 if copy.why and copy.ring == self._ring else 0
        step = copy.wanted.step
        if not copy.why and step in self._serving.service.snapshots.shown:
            self._serving.service.snapshots.show(
                m.Show(copy.number, step.step, step.id, b"", copy.wanted.volumes)
            )
            self._copied = step.id if copy.ring == self._ring else ""
        self._pin()

    def facts(self) -> dict[str, object]:
        """For those who watch."""
        copied = self._serving.service.snapshots.by_id(self._copied)
        return {
            "from": self._ring.sources(self.copies),
            "step": None if copied is None else copied.step,
            "copying": None if self._copying is None else self._copying.wanted.step.step,
            "fetched_bytes": self.fetched,
            "why": self._why or None,
        }
