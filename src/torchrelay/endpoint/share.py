"""A state that a rank shares with the ranks of its group: an endpoint that they alone know of."""

from __future__ import annotations

import secrets
from contextlib import suppress

from torchrelay.coordination.group_store import StoreLost
from torchrelay.deadlines import Timeout
from torchrelay.endpoint.front import Endpoint, serve
from torchrelay.pending import Pending
from torchrelay.sources.access import Access
from torchrelay.sources.peer import PeerNotes, SharedAt
from torchrelay.transports.meeting.addresses import listen_here


class SharedState:
    """A state that other ranks recover from, until it is closed. Made by `Relay.share`."""

    def __init__(
        self, notes: PeerNotes, rank: int, state: object, step: int, timeout: Timeout
    ) -> None:
        self._notes, self._rank = notes, rank
        with listen_here() as probe:  # where other ranks reach this one
            host = probe.getsockname()[0]
        token = secrets.token_urlsafe(32)
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        access = Access(token=token)
        self._endpoint: Endpoint = serve(
            state, step=step, address=address, access=access, no_dist=True, timeout=timeout
        )
        try:
            self._notes.put(self._rank, SharedAt(self._endpoint.url, token))
        except BaseException:
            self._endpoint.close()
            raise

    def publish(self, state: object, *, step: int) -> Pending:
        """Share a later step; the state may change as soon as this returns."""
        return self._endpoint.publish(state, step=step)

    def close(self) -> None:
        """Stop sharing, and free the memory."""
        with suppress(StoreLost):  # the store may be gone with its process
            self._notes.remove(self._rank)
        self._endpoint.close()

    def __enter__(self) -> SharedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
