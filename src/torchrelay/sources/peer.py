"""A live rank as a source: the group's store has the URL at which it serves its state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch.distributed as dist

from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError, StepNotFoundError
from torchrelay.sources.access import Access
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.remote_step import RemoteStep


class SharedAt(msgspec.Struct, array_like=True):
    """Where a rank serves its state, and the token of it. Only the group's store has it."""

    url: str
    token: str


_shared_at = msgspec.msgpack.Decoder(SharedAt)


class PeerNotes:
    """Where the ranks of a group serve their states."""

    def __init__(self, group: Any) -> None:
        store = group.get_group_store()
        self._store: Any = dist.PrefixStore("torchrelay/peers", store)  # type: ignore[attr-defined]

    def put(self, rank: int, place: SharedAt) -> None:
        self._store.set(str(rank), msgspec.msgpack.encode(place))

    def remove(self, rank: int) -> None:
        self._store.delete_key(str(rank))

    def find(self, rank: int) -> SharedAt | None:
        """`PeerLostError` where the store cannot tell."""
        try:
            if not self._store.check([str(rank)]):
                return None
            return _shared_at.decode(self._store.get(str(rank)))
        except (dist.DistError, msgspec.MsgspecError) as fault:
            raise PeerLostError(
                f"the group's store does not tell where rank {rank} serves its state: {fault}",
                rank=rank,
            ) from fault


class PeerSource:
    """The state that a rank of a group shares, made by `Relay.peer`. A rank that shares nothing is
    an empty source. The rank is looked up by each call that lists steps. `same_host` is that of
    `EndpointSource`."""

    def __init__(self, notes: PeerNotes, rank: int, *, same_host: bool = True) -> None:
        self._peers, self._same_host = [(notes, rank)], same_host
        self._places: list[SharedAt] = []
        self.endpoint: EndpointSource | None = None  # as found by the last look

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

    @property
    def cost(self) -> int:
        return 1 if self.endpoint is None else self.endpoint.cost

    def steps(self, deadline: Deadline) -> list[int]:
        places = [place for notes, rank in self._peers if (place := notes.find(rank)) is not None]
        if not places:
            self.endpoint = None
            return []
        if self.endpoint is None or places != self._places:
            self._places, tokens = places, {place.url: place.token for place in places}
            access = Access(token=places[0].token)
            self.endpoint = EndpointSource(
                tokens, access=access, same_host=self._same_host, tokens=tokens
            )
        self.endpoint.failed.clear()
        return self.endpoint.steps(deadline)

    def open(self, step: int, deadline: Deadline) -> RemoteStep:
        if self.endpoint is None:
            self.steps(deadline)
        if self.endpoint is None:
            raise StepNotFoundError(f"{self.name} shares no state: share it there", step=step)
        return self.endpoint.open(step, deadline)

    def end(self, reason: str = "", nbytes: int = 0) -> None:
        """Tell the rank how the read ended; never raises."""
        if self.endpoint is not None:
            self.endpoint.end(reason, nbytes)
            self.endpoint = None
