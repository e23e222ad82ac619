"""A live rank as a source: the group's store has the URL at which it serves its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from torchrelay.coordination.group_store import GroupStore, StoreLost
from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError
from torchrelay.sources.access import Access
from torchrelay.sources.endpoint import EndpointSource


class SharedAt(msgspec.Struct, array_like=True):
    """Where a rank serves its state, and the token of it. Only the group's store has it."""

    url: str
    token: str


_shared_at = msgspec.msgpack.Decoder(SharedAt)


class PeerNotes:
    """Where the ranks of a group serve their states, in the store of the group."""

    def __init__(self, store: Any) -> None:
        self._store = GroupStore(store, "torchrelay/peers/")

    def put(self, rank: int, place: SharedAt) -> None:
        self._store.put(str(rank), msgspec.msgpack.encode(place))

    def remove(self, rank: int) -> None:
        self._store.drop(str(rank))

    def find(self, rank: int) -> SharedAt | None:
        """`PeerLostError` where the store cannot tell."""
        try:
            data = self._store.read(str(rank))
            return None if data is None else _shared_at.decode(data)
        except (StoreLost, msgspec.MsgspecError) as fault:
            raise PeerLostError(
                f"the group's store does not tell where rank {rank} serves its state: {fault}",
                rank=rank,
            ) from fault


class PeerSource(EndpointSource):
    """The state that a rank of a group shares, made by `Relay.peer`. A rank that shares nothing is
    an empty source. The rank is looked up by each call that lists steps."""

    lends_gpus = False

    def __init__(self, notes: PeerNotes, rank: int, *, same_host: bool = True) -> None:
        super().__init__((), same_host=same_host)
        self._peers = [(notes, rank)]

    @classmethod
    def of(cls, peers: Sequence[PeerSource], *, same_host: bool = True) -> PeerSource:
        """Ranks that share the same state, as one source."""
        found = cls(*peers[0]._peers[0], same_host=same_host)
        found._peers = [one for peer in peers for one in peer._peers]
        return found

    @property
    def name(self) -> str:
        ranks = ", ".join(str(rank) for _, rank in self._peers)
        return f"rank {ranks}" if len(self._peers) == 1 else f"ranks {ranks}"

    def _list(self, deadline: Deadline, query: str, wait: float) -> list[int]:
        found = [place for notes, rank in self._peers if (place := notes.find(rank)) is not None]
        tokens = {place.url: place.token for place in found}
        if tokens != self._tokens:
            for host in self.hosts:
                host.close()
            self._tokens, self._token = tokens, found[0].token if found else None
            self.access = Access(token=self._token)
            self.hosts = [self.host(url) for url in tokens]
        self.failed.clear()
        self._listed = {}
        return super()._list(deadline, query, wait) if self.hosts else []

    def end(self, reason: str = "", nbytes: int = 0, *, keep: bool = False) -> None:
        super().end(reason, nbytes, keep=keep)
        self._begin_again()
