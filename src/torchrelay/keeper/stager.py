"""Stages the states of one rank in the memory of its host's keeper.

It is a publish to another process: the keeper chooses the slots, bounds their memory, and gets the
record of the whole step, whichever ranks are on its host.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from torchrelay.deadlines import Deadline
from torchrelay.endpoint.publishing import Publisher, RoomOffer
from torchrelay.endpoint.server import messages as m
from torchrelay.keeper.process import KeeperProcess
from torchrelay.keeper.server import messages as k
from torchrelay.stores.shares import plan_limits
from torchrelay.transports.group.assembly import COORDINATOR, Assembly, Call

_room = msgspec.msgpack.Decoder(RoomOffer)
_told = msgspec.msgpack.Decoder(k.CopiesTold)


class Stager(Publisher):
    """Publishes to a keeper."""

    def __init__(
        self,
        assembly: Assembly,
        keeper: KeeperProcess,
        url: Callable[[], str],
        tell: Callable[[list[str]], None],
        copies: int,
    ) -> None:
        super().__init__(assembly, keeper, url)
        self._copies = copies
        self._tell = tell  # this host's keeper who the others are

    def _begin_anew(self) -> None:
        """Another keeper, or the same after the connection was lost: neither knows these slots."""
        self.close()
        self.urls = []

    def _busy(self, deadline: Deadline) -> str:
        return ""

    def _note_for_all(self, deadline: Deadline) -> bytes:
        if not self._copies:
            return b""
        told = self._server.ask(k.TellCopies(), k.CopiesTold, deadline.left())
        return msgspec.msgpack.encode(told)

    def _confer(self, notes: list[bytes], urls: list[str]) -> bytes:
        """One step at a time is copied by all keepers; the last one that all have is safe."""
        if not all(notes):
            return b""
        told = [plan_limits.read(_told, data, rank) for rank, data in enumerate(notes)]
        safe = told[0].copied if len({one.copied for one in told}) == 1 else ""
        begin = len(set(urls)) > 1 and all(one.idle for one in told)
        return msgspec.msgpack.encode(k.CopyNext(safe, begin))

    def _meet(self, urls: list[str], note: bytes, deadline: Deadline) -> None:
        if urls != self.urls:
            self._tell(urls)
            self.urls = urls
        if note:
            self._server.forward(note, m.Obeyed, deadline.left())

    def meet(self, urls: list[str], deadline: Deadline) -> None:
        """The keepers of all ranks, before the first step."""
        self._meet(urls, b"", deadline)

    def _room(self, call: Call, nbytes: int, deadline: Deadline) -> RoomOffer:
        given: list[k.RoomGiven] = []

        def mine() -> bytes:
            given.append(self._server.ask(k.RoomWanted(nbytes), k.RoomGiven, deadline.left()))
            return msgspec.msgpack.encode(RoomOffer(given[0].slot, given[0].why))

        def decide(said: list[bytes]) -> list[bytes]:
            offers = [plan_limits.read(_room, data, rank) for rank, data in enumerate(said)]
            why = next((offer.why for offer in offers if offer.why), "")
            return [msgspec.msgpack.encode(RoomOffer(offer.slot, why)) for offer in offers]

        found = plan_limits.read(_room, call.round("room", mine, decide, deadline), COORDINATOR)
        for slot in given[0].gone:
            self._drop_arena(slot)
        return found

    def _listing(self, urls: list[str]) -> set[int]:
        return {urls.index(url) for url in urls}

    def status(self, timeout: float) -> bytes:
        return self._server.ask(m.Tell(), m.StatusText, timeout).text
