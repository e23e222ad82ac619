"""The device path of a publish: by way of other memory of the GPU that a state is on.

choose        memory of the GPU, or host memory after all
copy          one copy on the GPU; the caller may change its state after it
digests       made there, and the step is shown: processes of this host read it on the GPU
copy_to_host  in the background, for readers elsewhere, with the bits of what changed
published     the next step is compared with this one
"""

from __future__ import annotations

from torchrelay.endpoint.publish.device_slots import UNABLE, DeviceSlot, DeviceSlots
from torchrelay.endpoint.publish.host_slots import HostSlots
from torchrelay.endpoint.publish.known_plan import KnownPlan
from torchrelay.endpoint.server.messages import FoundChanges, Volume, laid_out
from torchrelay.errors import UsageError
from torchrelay.shares.share import Share


class DevicePath:
    """`changes`: whether elements that changed from the step before are found."""

    def __init__(self, host: HostSlots, known: KnownPlan, *, changes: bool) -> None:
        self._host, self._known, self._changes = host, known, changes
        self._slots = DeviceSlots()

    def unfit(self, share: Share, stage_on: str) -> str:
        """Why a share goes to host memory directly; empty where it can be copied on its GPU."""
        return self._slots.unfit(share, laid_out(share.files)[1], stage_on)

    def choose(self, share: Share, stage_on: str, number: int, unfit: str) -> DeviceSlot | None:
        """The slot of the GPU with this number (-1: the server has none), or None for host memory.
        `UsageError` with the reason where the caller wants no other memory than the GPU's."""
        if stage_on == "host":
            self._slots.close()
            return None
        why = unfit or ("processes read every copy that is there" if number < 0 else "")
        if not why:
            try:
                return self._slots.slot(number, share, laid_out(share.files)[1])
            except UNABLE as fault:
                why = str(fault)
        if stage_on == "device":
            raise UsageError(f'stage_on="device", but {why}: give stage_on="host"')
        return None

    def copy(self, share: Share, slot: DeviceSlot) -> list[Volume]:
        """Copy a share into a slot; returns its volumes. The caller has waited for work that was
        begun on the share's memory."""
        volumes, _ = laid_out(share.files)
        slot.fill(share.streams, volumes)
        share.check_unchanged()
        return volumes

    def copy_to_host(
        self, share: Share, volumes: list[Volume], slot: DeviceSlot, host_slot: int
    ) -> FoundChanges | None:
        """Copy a step to host memory: its bytes and, behind them, the bits of its changed elements,
        which are returned by their places. None where changes are not known."""
        end = nbytes = laid_out(share.files)[1]
        fields = self._known.fields(share.layout) if self._changes else []
        made = self._slots.changes(slot, share, volumes, fields) if fields else None
        if made is not None:
            end += len(made[1].bits)
        arena = self._host.reserve(host_slot, end, pinned=True)
        slot.copy_to(arena.tensor, nbytes)
        if made is None:
            return None
        base, changes = made
        arena.tensor[nbytes:end].copy_(changes.bits)
        places = iter(changes.places)
        starts = [[nbytes + next(places) for _ in each] for each in fields]
        return FoundChanges(base, starts, changes.total())

    def published(self, slot: DeviceSlot, share: Share, snapshot: str) -> None:
        """The step in a slot is in host memory, too."""
        self._slots.published(slot, share, snapshot)

    def free(self) -> None:
        self._slots.close()

    def detach_after_fork(self) -> None:
        self._slots.forget()
