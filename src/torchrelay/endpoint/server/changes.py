"""Which elements of a server's volumes changed from one published step to the next.

When a step is staged, a thread compares it with the newest one, while digests are made and after,
if somebody has read parts of steps lately. It runs at a low priority, and readers do not wait for
it to see the step. Memory that is compared is not written to: the next step waits a while until the
changes are found, and then the comparison is given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from torchrelay.endpoint.server.messages import FoundChanges, StageSlot, Volume
from torchrelay.errors import ResourceError
from torchrelay.memory import threads
from torchrelay.memory.pages import return_freed_memory
from torchrelay.parts.bitmaps import Bits, VolumeBitmap, bits_bytes, changed, union
from torchrelay.parts.fields import Field

READY_SECONDS = 10.0  # that a reader waits for a comparison, and
SETTLE_SECONDS = 2.0  # a publisher: far less than it waits for the server to answer
REQUESTED_SECONDS = 3600.0  # for which somebody is taken to ask again
NICENESS = 5  # of the thread that compares
REUSED_BYTES = 4 << 20  # blocks of memory that are kept for the next chunk that is encoded
PIECE_BYTES = 16 << 20  # compared at once; a multiple of what eight elements have

logger = logging.getLogger("torchrelay")


class StagedVolumes(NamedTuple):
    """Volumes in the memory of a slot, and the fields that tile each."""

    memory: memoryview
    volumes: Sequence[Volume]
    fields: Sequence[Sequence[Field]]

    def alike(self, other: StagedVolumes) -> list[tuple[Volume, Volume, Sequence[Field]]]:
        """The volumes that another step has, too, with the same fields, and where those lie."""
        known = {
            volume.name: (volume, fields)
            for volume, fields in zip(other.volumes, other.fields, strict=True)
        }
        found = []
        for volume, fields in zip(self.volumes, self.fields, strict=True):
            before = known.get(volume.name)
            if before is not None and list(before[1]) == list(fields):
                found.append((volume, before[0], fields))
        return found

    def bytes_of(self, volume: Volume) -> Bits:
        return self.bytes_at(volume.start, volume.nbytes)

    def bytes_at(self, start: int, nbytes: int) -> Bits:
        return np.frombuffer(self.memory[start : start + nbytes], np.uint8)


class StepComparison:
    """A step that is compared with another on a thread. `base`: the snapshot of the other;
    `changed`: how many of its `elements` differ, when it is over; `step` and `snapshot`: its own,
    once it is shown. With `from_gpu`, the bits lie in the memory of the new step."""

    def __init__(
        self,
        base: str,
        old: StagedVolumes,
        new: StagedVolumes,
        from_gpu: FoundChanges | None = None,
    ) -> None:
        self.step, self.snapshot, self.base = -1, "", base
        self.found: dict[str, VolumeBitmap] = {}  # by volume; empty where nothing is known
        self._stopped = False
        self.seconds = 0.0
        self.changed = self.elements = 0
        self.wait: Callable[..., bool] = lambda seconds=None: True
        try:
            running = threads.run(lambda: self._compare(old, new, from_gpu), "compare", NICENESS)
        except ResourceError:  # subscribers get whole chunks
            logger.warning("no thread compares a step with the one before", exc_info=True)
        else:
            self.wait = running.wait  # whether it is over, after that many seconds at most

    def _compare(
        self, old: StagedVolumes, new: StagedVolumes, from_gpu: FoundChanges | None
    ) -> None:
        begun = time.monotonic()
        found: dict[str, VolumeBitmap] = {}
        try:
            if from_gpu is None:
                for volume, before, fields in new.alike(old):
                    pair = old.bytes_of(before), new.bytes_of(volume)
                    bits = [self._bits(*pair, field) for field in fields]
                    found[volume.name] = VolumeBitmap(fields, bits)
                self.changed = sum(bitmap.count for bitmap in found.values())
            else:
                for volume, fields, starts in zip(
                    new.volumes, new.fields, from_gpu.places, strict=True
                ):
                    bits = [
                        np.array(new.bytes_at(start, bits_bytes(field)))
                        for field, start in zip(fields, starts, strict=True)
                    ]
                    found[volume.name] = VolumeBitmap(fields, bits)
                self.changed = from_gpu.changed
            self.elements = sum(bitmap.elements for bitmap in found.values())
            self.found = found
        except InterruptedError:
            logger.debug("the comparison with snapshot %s was given up", self.base)
        except Exception:  # subscribers get whole chunks then
            logger.warning("a step could not be compared with the one before", exc_info=True)
        self.seconds = time.monotonic() - begun

    def _bits(self, old: Bits, new: Bits, field: Field) -> Bits:
        found = []
        for low in range(field.start, field.stop, PIECE_BYTES):
            if self._stopped:
                raise InterruptedError
            piece = slice(low, min(low + PIECE_BYTES, field.stop))
            found.append(changed(old[piece], new[piece], field.itemsize))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def stop(self) -> None:
        """Give it up, unless it is over: nothing is known then. The memory is no longer used when
        this returns."""
        self._stopped = True
        self.wait()

    @property
    def nbytes(self) -> int:
        return sum(bitmap.nbytes for bitmap in self.found.values())

    def facts(self) -> dict[str, object]:
        return {
            "step": self.step,
            "snapshot": self.snapshot,
            "base": self.base,
            "changed": self.changed,
            "elements": self.elements,
            "bytes": self.nbytes,
            "ready": self.wait(0.0),
            "seconds": self.seconds,
        }


class ChangeHistory:
    """The changes of the last steps that were shown, `limit` of them at most. Any thread may ask;
    one stages."""

    def __init__(self, limit: int = 0) -> None:
        self.limit = limit
        self._known: deque[StepComparison] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self._staged: dict[int, StagedVolumes] = {}  # by slot
        self._requested: float | None = None  # when somebody last asked, by the monotonic clock
        self._under_way: tuple[int, StepComparison] | None = None  # the slot that was staged last

    # Called by the thread that carries out what the publisher asks for.

    def stage(self, request: StageSlot, memory: memoryview, base: tuple[int, str] | None) -> None:
        """A slot has its bytes: begin to compare them with the newest step, whose slot and snapshot
        are `base`."""
        self.settle()
        self._staged.pop(request.slot, None)
        if not self.limit or len(request.fields) != len(request.volumes):
            return
        new = StagedVolumes(memory, request.volumes, request.fields)
        self._staged[request.slot] = new
        old = None if base is None else self._staged.get(base[0])
        found = request.found
        if base is not None and found is not None and found.base == base[1]:
            self._under_way = request.slot, StepComparison(base[1], new, new, found)
        elif base is not None and old is not None and self._is_requested:
            self._under_way = request.slot, StepComparison(base[1], old, new)

    def show(self, slot: int, step: int, snapshot: str) -> None:
        """The step in a slot is shown: its changes can be asked for."""
        if self._under_way is None or self._under_way[0] != slot:
            return
        made = self._under_way[1]
        # The same content as before makes no link: it would hide the one that led to it.
        if made.base != snapshot:
            made.step, made.snapshot = step, snapshot
            with self._lock:
                self._known.append(made)

    def settle(self, seconds: float = SETTLE_SECONDS) -> None:
        """Have nothing compared, so that memory may be written to. A comparison that somebody may
        ask for has that long to end; any other is given up."""
        if self._under_way is not None:
            one = self._under_way[1]
            if not one.wait(seconds if self._is_requested else 0.0):
                one.stop()
            self._under_way = None

    @property
    def _is_requested(self) -> bool:
        requested = self._requested
        return requested is not None and time.monotonic() - requested < REQUESTED_SECONDS

    # Called by threads that answer requests.

    def ask(self) -> None:
        """Somebody reads parts of a step, and may ask for the changes of the next ones."""
        if self._requested is None:
            # Chunks are encoded in blocks of some 100 KB to 2 MB. Fresh memory for each of them
            # takes as long as all of the rest.
            return_freed_memory(REUSED_BYTES)
        self._requested = time.monotonic()

    def between(self, base: str, snapshot: str, volume: str) -> VolumeBitmap | None:
        """The elements of a volume that changed from one snapshot to a later one; None where that
        is not known: the base is too old or unknown, or the layout of the volume has changed. Waits
        for a comparison that is under way."""
        self.ask()
        with self._lock:
            # The same content may have been published twice: the later one counts.
            made = {one.snapshot: one for one in self._known}
        links: list[StepComparison] = []
        while snapshot != base:
            if snapshot not in made:
                return None
            links.append(made.pop(snapshot))  # each once: steps may lead in a circle
            snapshot = links[-1].base
        found = [link.found.get(volume) for link in links if link.wait(READY_SECONDS)]
        known = [bitmap for bitmap in found if bitmap is not None]
        return union(known) if len(known) == len(links) else None

    def facts(self) -> dict[str, object]:
        with self._lock:
            steps = [one.facts() for one in self._known]
            total = sum(one.nbytes for one in self._known)
        return {"history": self.limit, "bytes": total, "steps": steps}
