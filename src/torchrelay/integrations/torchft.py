"""torchft's `CheckpointTransport` on top of `Relay`.

from torchrelay.integrations.torchft import RelayTransport
manager = Manager(pg=pg, checkpoint_transport=RelayTransport(pg, timeout), ...)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torchft.checkpointing.transport import CheckpointTransport

from torchrelay.coordination.groups import current_group
from torchrelay.errors import PeerLostError
from torchrelay.options import Verify
from torchrelay.relay import Relay
from torchrelay.transports.meeting.directory import Directory, identity_from_text
from torchrelay.transports.meeting.node import Meeting, Node

T = TypeVar("T")


class _Quorum:
    """The members of torchft's current quorum, as a group: they find each other by metadata."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg
        self.known = Directory()
        self.relay_meeting = Meeting(Node(), self.known)

    def rank(self) -> int:
        rank: int = current_group(self._pg).rank()
        return rank

    def size(self) -> int:
        size: int = current_group(self._pg).size()
        return size


class RelayTransport(CheckpointTransport[T], Generic[T]):  # type: ignore[misc, unused-ignore]
    """Recovers a torchft replica from a live one. torchft's metadata says where that one is.

    `state_dict`, if given, is called to get the state that is received into, in place. `device` is
    where tensors without an in-place destination are placed. `verify` is as for `Relay`, and the
    sender's counts: True compares digests of bytes that cross a wire, "all" also of bytes that are
    read from the memory of a process of the same machine, False of none.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device | str = "cpu",
        state_dict: Callable[[], T] | None = None,
        *,
        verify: Verify = True,
    ) -> None:
        self._device = torch.device(device)
        self._state_dict = state_dict
        self._quorum = _Quorum(pg)
        self._relay = Relay(self._quorum, timeout=timeout.total_seconds(), verify=verify)

    def metadata(self) -> str:
        """Where this process listens, and what admits the other members of a quorum."""
        return self._quorum.relay_meeting.node.identity.as_text()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Send to all ranks that are behind; returns when they have it, so nothing is pending."""
        seconds = timeout.total_seconds()
        report = self._relay.send(
            state_dict,
            dst_ranks,
            step=step,
            timeout=seconds,
            # A quorum calls both sides at the same time: a rank that is late will not come.
            join_timeout=seconds / 2,
        )
        lost = {**report.failed, **report.unknown}
        if lost:
            raise PeerLostError(
                f"not every rank is known to have the checkpoint: {lost}",
                rank=int(next(iter(lost))),
                step=step,
            )

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        into = self._state_dict() if self._state_dict is not None else None
        self._quorum.known.give(src_rank, identity_from_text(metadata, src_rank))
        got = self._relay.recv(
            src_rank,
            into=into,
            step=step,
            device=self._device,
            shards="replica",
            timeout=timeout.total_seconds(),
        )
        state: T = got.state
        return state

    def shutdown(self, wait: bool = True) -> None:
        self._relay.close()
