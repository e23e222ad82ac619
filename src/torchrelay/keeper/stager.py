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


class Stager(Publisher):
    """Publishes to a keeper."""

    def __init__(
        self,
        assembly: Assembly,
        keeper: KeeperProcess,
        url: Callable[[], str],
        tell: Callable[[list[str]], None],
    ) -> None:
        super().__init__(assembly, keeper, url)
        self._tell = tell  # this host's keeper who the others are

    def _begin_anew(self) -> None:
        """Another keeper, or the same after the connection was lost: neither knows these slots."""
        self.close()
        self.urls = []

    def _busy(self, deadline: Deadline) -> str:
        return ""

    def _meet(self, urls: list[str], deadline: Deadline) -> None:
        if urls != self.urls:
            self._tell(urls)
            self.urls = urls

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
