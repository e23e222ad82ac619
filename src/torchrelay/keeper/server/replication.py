"""Copies of other hosts' parts of a step, fetched from their keepers in the background. No torch.

Keepers form a ring, and each copies from the ones before it. All copy the same step, which the
ranks choose when no keeper is copying (`KeeperDecision`). Chunks that are the same in the copy
before are taken from there. A copy counts when all of its digests match.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.server.messages import Show, Volume, laid_out
from torchrelay.endpoint.server.service import Service
from torchrelay.endpoint.server.snapshots import ServedSnapshot, Slot
from torchrelay.endpoint.server.step_reader import RankReader
from torchrelay.errors import RelayError, ResourceError
from torchrelay.keeper.choice import KeeperRing
from torchrelay.keeper.server.messages import KeeperReport, RetainedStep
from torchrelay.keeper.server.retention import OWN, Retention
from torchrelay.memory import threads
from torchrelay.memory.digest import digest
from torchrelay.memory.pages import reserve
from torchrelay.memory.sealed import sealed_memory
from torchrelay.sources.access import Access
from torchrelay.sources.remote_step import digest_of

LEAST_SECONDS = 60.0  # that a copy may take, and
SLACK = 8  # times as long as it would take at its rate


class WantedCopy(NamedTuple):
    """The volumes of a step to be copied, each with the keeper that has it."""

    step: ServedSnapshot
    volumes: list[Volume]
    urls: list[str]
    nbytes: int

    @classmethod
    def of(cls, step: ServedSnapshot, sources: list[str]) -> WantedCopy:
        whole = step.whole
        servers = [whole.ranks[place] for place in whole.places] if whole.ranks else []
        chosen = [one for one in zip(whole.volumes, servers, strict=False) if one[1] in sources]
        volumes, nbytes = laid_out(volume for volume, _ in chosen)
        return cls(step, volumes, [url for _, url in chosen], nbytes)


class Replication:
    """The copies of one keeper; each has a thread. To be used with the keeper's lock and the
    service's lock held."""

    def __init__(self, service: Service, retention: Retention, lock: threading.RLock) -> None:
        self._service, self._retention, self._lock = service, retention, lock
        self._ring = KeeperRing([], "")
        self.due = False  # whether to copy the next step that is complete
        self._copying: CopyThread | None = None
        self._failed = 0  # copies in a row
        self._why = ""
        self._fetched = 0  # bytes, of all copies

    def meet(self, ring: KeeperRing) -> None:
        """The keepers of the job from here on: with others, other copies are made."""
        if ring != self._ring:
            self._failed = self._retention.reserved = 0
            if self._copying is not None:  # from a keeper that may be gone
                self._copying.stop()
        self._ring = ring

    def _sources(self) -> list[str]:
        return self._ring.sources(self._retention.settings.copies)

    def report(self) -> KeeperReport:
        busy = self._copying is not None and self._copying.ring == self._ring
        copying = self._copying.wanted.step.id if self._copying is not None and busy else ""
        retained = [self._retained(one) for one in self._service.snapshots.shown]
        return KeeperReport(retained, copying, self._failed, self._retention.full())

    def _retained(self, step: ServedSnapshot) -> RetainedStep:
        there = set(step.here)
        order = step.whole.volumes if step.record else []
        bits = sum(1 << at for at, volume in enumerate(order) if volume.name in there)
        wanted = WantedCopy.of(step, self._sources()) if step.record else None
        copied = wanted is not None and all(one.name in there for one in wanted.volumes)
        here = bits.to_bytes(-(-len(order) // 8), "little")
        return RetainedStep(step.step, step.id, len(order), here, copied)

    def copy(self, step: ServedSnapshot | None) -> None:
        """All ranks have staged a step, or another was skipped and it is the newest: copy it, if
        that was decided."""
        if step is None:
            return
        wanted = WantedCopy.of(step, self._sources())
        keeper = self._retention
        keeper.reserved = max(keeper.reserved, 2 * wanted.nbytes) if wanted.volumes else 0
        missing = any(step.place(volume.name) is None for volume in wanted.volumes)
        if not self.due or self._copying is not None or not missing:
            return
        self.due = False
        older = self._before(step)
        keeper.copying = {one.id for one in (step, older) if one is not None}
        room = keeper.reserve(OWN, wanted.nbytes)
        try:
            if room.why:
                raise MemoryError(room.why)
            snapshots = self._service.snapshots
            if room.slot not in snapshots.slots:
                fd = sealed_memory(wanted.nbytes)
                try:
                    reserve(fd, wanted.nbytes)
                except MemoryError:
                    os.close(fd)
                    raise
                snapshots.attach(room.slot, fd, wanted.nbytes)
        except (OSError, MemoryError) as fault:
            self._why = f"nothing is copied: {fault}"
            self._failed += 1
            keeper.copying = set()
            return
        keeper.copied_slot = room.slot
        slot, access, rate = snapshots.slots[room.slot], self._service.access, keeper.settings.rate
        copying = CopyThread(
            wanted, room.slot, slot, older, self._ring, access, rate, done=self._finished
        )
        self._copying = copying
        copying.start()

    def _before(self, step: ServedSnapshot) -> ServedSnapshot | None:
        """The newest other step that this keeper has copies of."""
        for one in reversed(self._service.snapshots.shown):
            if one is not step and any(self._retention.has(OWN, slot) for slot in one.parts):
                return one
        return None

    def _finished(self, copy: CopyThread) -> None:
        with self._lock, self._service.lock:
            self._copying, self._why = None, copy.why
            self._fetched += copy.fetched
            self._failed = self._failed + 1 if copy.why and copy.ring == self._ring else 0
            step, snapshots = copy.wanted.step, self._service.snapshots
            if not copy.why and step in snapshots.shown:
                snapshots.show(Show(copy.number, step.step, step.id, copy.wanted.volumes))
            self._retention.copying, self._retention.copied_slot = set(), None

    def facts(self) -> dict[str, object]:
        """For those who watch."""
        copied = [one for one in self._service.snapshots.shown if self._retained(one).copied]
        return {
            "from": self._sources(),
            "step": copied[-1].step if copied else None,
            "copying": None if self._copying is None else self._copying.wanted.step.step,
            "fetched_bytes": self._fetched,
            "why": self._why or None,
        }


class CopyThread:
    """One copy on its way, on a thread of its own. `why` says what went wrong."""

    def __init__(
        self,
        wanted: WantedCopy,
        number: int,
        slot: Slot,
        older: ServedSnapshot | None,
        ring: KeeperRing,
        access: Access,
        rate: float,
        *,
        done: Callable[[CopyThread], object],
    ) -> None:
        self.wanted, self.number, self.ring, self.why = wanted, number, ring, ""
        self.fetched = 0  # bytes that came from others
        # Looked up here, with the lock held: steps come and go while the thread copies.
        self._older = {} if older is None else {v.name: older.place(v.name) for v in wanted.volumes}
        self._ranks = RankReader(wanted.step, access, reader=os.urandom(16).hex())
        self._rate, self._done = rate, done
        self._map = mmap.mmap(slot.file.fileno(), slot.nbytes)
        self._view = memoryview(self._map)

    def start(self) -> None:
        """Begin to copy. `done` is called in any case, also where no thread can be started."""
        try:
            threads.start(self._run, "copy")
        except ResourceError as fault:
            self._end(str(fault))

    def stop(self) -> None:
        """Give it up; `done` is called all the same."""
        self._ranks.stopped.set()

    def _run(self) -> None:
        deadline = Deadline(max(LEAST_SECONDS, SLACK * self.wanted.nbytes / self._rate))
        begun = time.monotonic()
        try:
            for volume, url in zip(self.wanted.volumes, self.wanted.urls, strict=True):
                self._copy(volume, url, deadline, begun)
        except (RelayError, OSError, ValueError) as fault:
            self.why = getattr(fault, "message", "") or str(fault) or type(fault).__name__
        except BaseException as fault:  # whatever it is, the keeper must know that this is over
            self.why = f"{type(fault).__name__}: {fault}"
            raise
        finally:
            self._end(self.why)

    def _end(self, why: str) -> None:
        self.why = why
        self._ranks.close(why)
        # A failure may have left views of the memory behind: it is unmapped with the last.
        del self._view, self._map
        self._done(self)

    def _copy(self, volume: Volume, url: str, deadline: Deadline, begun: float) -> None:
        for start in range(0, volume.nbytes, volume.chunk_bytes):
            stop = min(start + volume.chunk_bytes, volume.nbytes)
            view = self._view[volume.start + start : volume.start + stop]
            if self._unchanged(volume, start, view):
                continue
            early = begun + self.fetched / self._rate - time.monotonic()
            if self._ranks.stopped.wait(max(0.0, early)):
                raise ValueError("it was given up")
            self._ranks.read_into(volume, url, start, view, deadline)
            self.fetched += len(view)

    def _unchanged(self, volume: Volume, start: int, view: memoryview) -> bool:
        """Whether a chunk is as it was in the copy before; then it is in its place."""
        if (place := self._older.get(volume.name)) is None:
            return False
        slot, before = place
        sizes = volume.nbytes, volume.chunk_bytes
        wanted = digest_of(volume, start)
        if (before.nbytes, before.chunk_bytes) != sizes or digest_of(before, start) != wanted:
            return False
        at = before.start + start
        view[:] = slot.view[at : at + len(view)]
        return digest(view) == wanted
