"""Steps that a publisher keeps in memory of its GPU, and who reads them there. No torch, no CUDA.

The server knows the handles and passes them on. It decides which slot is written next: one that no
process reads. So whatever a lease is of stays as it is until the lease ends.
"""

from __future__ import annotations

from collections import Counter

from torchrelay.endpoint.server.messages import FinishPublish, Show
from torchrelay.sources.lent_memory import DeviceLease

MOST_SLOTS = 3  # the newest step, the next one, and one that a process does not give back


def lease_of(shown: Show) -> DeviceLease:
    """The answer to a process that asks for a step in memory of a GPU."""
    volumes = {one.name: (one.start, one.nbytes) for one in shown.volumes}
    lease = DeviceLease(shown.step, shown.snapshot, volumes=volumes, export=shown.export)
    if (whole := shown.whole) is not None:
        lease.record, lease.ranks, lease.places = whole.record, whole.ranks, whole.places
        lease.state, lease.layout = whole.state, whole.layout
    return lease


class DeviceSteps:
    """Which slot has which step. To be used with the service's lock held."""

    def __init__(self) -> None:
        self._shown: dict[int, Show] = {}  # by slot
        self.leases = Counter[int]()  # processes that read each slot
        self._newest: Show | None = None
        self.pending = False  # whether a step is being published: readers of the newest wait

    @property
    def newest(self) -> Show | None:
        """The newest step, where it is the newest of all and has its record here."""
        return self._newest if self._newest is not None and self._newest.whole else None

    def find(self, snapshot: str, step: int | None) -> Show | None:
        """A step by its id, or else by its number."""
        for one in reversed(self._shown.values()):
            if one.snapshot == snapshot or (not snapshot and one.step == step and one.whole):
                return one
        return None

    def take(self) -> int:
        """A slot to be written to, which is not lent any more; -1 where there is none. The
        newest step stays."""
        newest = -1 if self._newest is None else self._newest.slot
        for slot in range(MOST_SLOTS):
            if slot != newest and not self.leases[slot]:
                self._shown.pop(slot, None)
                return slot
        return -1

    def show(self, shown: Show) -> None:
        self._shown.pop(shown.slot, None)  # the last one that is found is the newest
        self._newest = self._shown[shown.slot] = shown
        self.pending = False

    def finish(self, ended: FinishPublish) -> None:
        """A publish is over. After one that went to host memory alone, no step here is the newest;
        one that failed takes back what it has shown."""
        self.pending = False
        if ended.skipped is not None:
            return
        if ended.failed:
            if self._newest is not None and self._newest.step == ended.step and not ended.unused:
                self._shown.pop(self._newest.slot, None)
                self._newest = None
        elif not ended.on_device:
            self._newest = None
