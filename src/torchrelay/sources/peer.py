"""A live rank as a source: the group's store says where it serves its state."""

from __future__ import annotations

from typing import Any

import msgspec
import torch.distributed as dist

from torchrelay.deadlines import Deadline
from torchrelay.errors import PeerLostError
from torchrelay.sources.endpoint import EndpointSource, OpenedEndpoint


class SharedAt(msgspec.Struct, array_like=True):
    """Where a rank serves its state, and what lets readers in. Only the group's store has it."""

    url: str
    token: str


_shared_at = msgspec.msgpack.Decoder(SharedAt)


class PeerNotes:
    """What the ranks of a group say of where they serve their states."""

    def __init__(self, group: Any) -> None:
        store = group.get_group_store()
        self._store: Any = dist.PrefixStore("torchrelay/peers", store)  # type: ignore[attr-defined]

    def put(self, rank: int, place: SharedAt) -> None:
        self._store.set(str(rank), msgspec.msgpack.encode(place))

    def remove(self, rank: int) -> None:
        self._store.delete_key(str(rank))

    def find(self, rank: int) -> SharedAt | None:
        if not self._store.check([str(rank)]):
            return None
        return _shared_at.decode(self._store.get(str(rank)))


class PeerSource:
    """A rank of a group, as far as it shares a state: see `Relay.share`. It is looked up anew by
    each call, and asked whether it is there."""

    def __init__(self, notes: PeerNotes, rank: int) -> None:
        self._notes, self._rank = notes, rank
        self._found: EndpointSource | None = None
        self._place: SharedAt | None = None

    @property
    def name(self) -> str:
        return f"rank {self._rank}"

    @property
    def cost(self) -> int:
        return 1 if self._found is None else self._found.cost

    def endpoint(self) -> EndpointSource:
        """Where the rank serves its state; `PeerLostError` where it does not."""
        try:
            place = self._notes.find(self._rank)
        except (dist.DistError, msgspec.MsgspecError) as fault:
            raise PeerLostError(
                f"the group's store does not say where rank {self._rank} is: {fault}",
                rank=self._rank,
            ) from fault
        if place is None:
            raise PeerLostError(f"rank {self._rank} shares no state", rank=self._rank)
        if self._found is None or place != self._place:
            self._place, self._found = place, EndpointSource(place.url, token=place.token)
        return self._found

    def steps(self, deadline: Deadline) -> list[int]:
        return list(self.endpoint().steps(deadline))

    def open(self, step: int, deadline: Deadline) -> OpenedEndpoint:
        return self.endpoint().open(step, deadline)

    def end(self, reason: str = "") -> None:
        """Tell the peer how it went; never raises."""
        if self._found is not None:
            self._found.end(reason)
            self._found = None
