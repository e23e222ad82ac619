"""Host memory of published steps: one arena for each slot of the server, which maps it."""

from __future__ import annotations

from torchrelay.endpoint.server.messages import Volume, laid_out
from torchrelay.errors import EndpointError
from torchrelay.memory.arena import Arena
from torchrelay.memory.staging import Copy, stage
from torchrelay.shares.share import Share
from torchrelay.stores.writer.file_writer import WORKERS


class HostSlots:
    """The arenas of one publisher, by the numbers that its server gives to slots."""

    def __init__(self) -> None:
        self._arenas: dict[int, Arena] = {}

    def __getitem__(self, slot: int) -> Arena:
        return self._arenas[slot]

    def reserve(self, slot: int, nbytes: int, *, pinned: bool) -> Arena:
        """An arena of at least `nbytes`: that of the slot, or another in its place.
        `EndpointError` if this process lacks the memory."""
        arena = self._arenas.get(slot)
        if arena is None or arena.nbytes < nbytes or pinned > arena.pinned:
            self.drop(slot)
            try:
                arena = self._arenas[slot] = Arena(nbytes, pinned=pinned)
            except MemoryError as fault:
                raise EndpointError(
                    f"no memory for the copy of this rank's part: {fault}. Free memory, or publish "
                    "from more ranks",
                    phase="stage",
                ) from fault
        return arena

    def copy(self, share: Share, slot: int) -> list[Volume]:
        """Copy a share into a slot; returns its volumes, with the digests that GPUs have made.
        The caller has waited for work that was begun on the share's memory."""
        share.hash_on_devices()
        volumes, nbytes = laid_out(share.files)
        arena = self.reserve(slot, nbytes, pinned=any(one.devices for one in share.streams))
        copies = [
            Copy(stream, 0, volume.nbytes, volume.start)
            for stream, volume in zip(share.streams, volumes, strict=True)
        ]
        stage(copies, arena.tensor, threads=WORKERS)
        share.check_unchanged()
        return volumes

    def drop(self, slot: int) -> None:
        if arena := self._arenas.pop(slot, None):
            arena.close()

    def free(self) -> None:
        for slot in list(self._arenas):
            self.drop(slot)

    def detach_after_fork(self) -> None:
        for arena in self._arenas.values():
            arena.detach_after_fork()
