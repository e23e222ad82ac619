"""Stages the states of one rank in the memory of its host's keeper.

It is a publish to another process: the keeper chooses the slots, bounds their memory, and gets the
record of the whole step, whichever ranks are on its host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.process import StepProcess
from torchrelay.endpoint.publishing import PlannedShare, Publisher, RoomOffer, StagedStep
from torchrelay.endpoint.server import messages as m
from torchrelay.errors import EndpointError
from torchrelay.keeper.choice import check_budget, choose
from torchrelay.keeper.process import KeeperProcess
from torchrelay.keeper.server import messages as k
from torchrelay.memory.arena import Arena
from torchrelay.stores.shares import plan_limits, plans
from torchrelay.stores.shares.drafting import Share
from torchrelay.transports.group.assembly import COORDINATOR, Assembly, Call

_RELEASE_SECONDS = 5.0


class _RoomFound(msgspec.Struct, array_like=True):
    """The slot that a rank's keeper has for so many bytes, or why it has none; its budget."""

    slot: int
    why: str
    nbytes: int
    memory: int


_found = msgspec.msgpack.Decoder(_RoomFound)
_room = msgspec.msgpack.Decoder(RoomOffer)
_told = msgspec.msgpack.Decoder(k.CopiesTold)


class LentSlot:
    """The memory of a staged step, for whoever writes it to disk: files as in an `Arena`, and where
    each volume starts. It stays as it is until `release`, whatever becomes of the keeper."""

    def __init__(self, server: StepProcess, arena: Arena, staged: StagedStep) -> None:
        self._server, self._generation = server, server.generation
        self._slot = staged.slot
        self.fds = [os.dup(fd) for fd in arena.fds]
        self.each, self.nbytes = arena.each, arena.nbytes
        self.starts = [volume.start for volume in staged.volumes]

    def release(self) -> None:
        """Another step may be staged there. Never raises."""
        fds, self.fds = self.fds, []
        for fd in fds:
            os.close(fd)
        if fds and self._server.generation == self._generation:
            with suppress(EndpointError):  # it is lost, and its slots with it
                self._server.ask(k.HoldSlot(self._slot, False), m.Obeyed, _RELEASE_SECONDS)


class Stager(Publisher):
    """Publishes to a keeper."""

    def __init__(
        self,
        assembly: Assembly,
        keeper: KeeperProcess,
        url: Callable[[], str],
        tell: Callable[[list[str]], None],
        join: k.JoinKeeper,
    ) -> None:
        super().__init__(assembly, keeper, url)
        self._memory, self._copies = join.memory, join.copies
        self._tell = tell  # this host's keeper who the others are
        self._places: list[str] = []  # the coordinator's: each rank's keeper

    def _begin_anew(self) -> None:
        """Another keeper, or the same after the connection was lost: neither knows these slots."""
        self.close()
        self.urls = []

    def _busy(self, deadline: Deadline) -> str:
        return ""

    def _note_for_all(self, deadline: Deadline) -> bytes:
        told = self._server.ask(k.TellCopies(), k.CopiesTold, deadline.left())
        return msgspec.msgpack.encode(told)

    def _confer(self, notes: list[bytes], urls: list[str]) -> tuple[bytes, str]:
        self._places = urls
        told = [plan_limits.read(_told, data, rank) for rank, data in enumerate(notes)]
        word, why = choose(
            told,
            several=len(set(urls)) > 1 and self._copies > 0,
            others=list(dict.fromkeys(urls)) != self.urls,
        )
        return msgspec.msgpack.encode(word), why

    def _meet(self, urls: list[str], note: bytes, deadline: Deadline) -> None:
        if urls != self.urls:
            self._tell(urls)
            self.urls = urls
        if note:
            self._server.forward(note, m.Obeyed, deadline.left())

    def meet(self, urls: list[str], deadline: Deadline) -> None:
        """The keepers of all ranks, before the first step."""
        self._meet(urls, b"", deadline)

    def _room(self, call: Call, nbytes: int, step: int, deadline: Deadline) -> RoomOffer:
        given: list[k.RoomGiven] = []

        def mine() -> bytes:
            wanted = k.RoomWanted(nbytes, step)
            given.append(self._server.ask(wanted, k.RoomGiven, deadline.left()))
            found = _RoomFound(given[0].slot, given[0].why, nbytes, self._memory)
            return msgspec.msgpack.encode(found)

        def decide(said: list[bytes]) -> list[bytes]:
            rooms = [plan_limits.read(_found, data, rank) for rank, data in enumerate(said)]
            parts, budgets = [one.nbytes for one in rooms], [one.memory for one in rooms]
            check_budget(parts, self._places, budgets, self._copies)
            why = next((room.why for room in rooms if room.why), "")
            return [msgspec.msgpack.encode(RoomOffer(room.slot, why)) for room in rooms]

        try:
            heard = call.round("room", mine, decide, deadline)
        finally:
            for slot in given[0].gone if given else ():
                self._drop_arena(slot)
        return plan_limits.read(_room, heard, COORDINATOR)

    def lend(
        self, share: Share, outlines: plans.Outlines | None, step: int, deadline: Deadline
    ) -> LentSlot | None:
        """Stage a share, and have its memory to be read from; None where it has to be skipped."""
        _, staged = self._publish(lambda _: PlannedShare(share, outlines), step, deadline)
        if staged is None:
            return None
        hold = k.HoldSlot(staged.slot, True)
        self._server.ask(hold, m.Obeyed, deadline.left())
        return LentSlot(self._server, self._arenas[staged.slot], staged)

    def _listing(self, urls: list[str]) -> set[int]:
        return {urls.index(url) for url in urls}
