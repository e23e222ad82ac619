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

from torchrelay.errors import PeerLostError
from torchrelay.relay import Relay

T = TypeVar("T")


class RelayTransport(CheckpointTransport[T], Generic[T]):  # type: ignore[misc, unused-ignore]
    """Recovers a torchft replica from a live one, over torchft's own process group.

    `state_dict`, if given, is called to get the state that is received into, in place. `device` is
    where tensors without an in-place destination are placed.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device | str = "cpu",
        state_dict: Callable[[], T] | None = None,
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = torch.device(device)
        self._state_dict = state_dict
        self._current: tuple[Any, Relay] | None = None

    def _relay(self) -> Relay:
        """A relay on the group behind torchft's, which is another one after each quorum.

        torchft's wrapper does not know its rank, and connections of an earlier quorum are gone.
        """
        group = getattr(self._pg, "parent", self._pg)
        if self._current is None or self._current[0] is not group:
            self.shutdown()
            self._current = group, Relay(group, timeout=self._timeout.total_seconds())
        return self._current[1]

    def metadata(self) -> str:
        """Nothing is needed to find a peer: the process group has the connections."""
        return "torchrelay"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Send to all ranks that are behind; returns when they have it, so nothing is pending."""
        seconds = timeout.total_seconds()
        report = self._relay().send(
            state_dict,
            dst_ranks,
            step=step,
            timeout=seconds,
            # A quorum calls both sides at the same time: who is not there by then will not come.
            join_timeout=seconds / 2,
        )
        lost = {**report.failed, **report.unknown}
        if lost:
            raise PeerLostError(
                f"not every rank is known to have the checkpoint: {lost}",
                rank=next(iter(lost)),
                step=step,
            )

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        into = self._state_dict() if self._state_dict is not None else None
        got = self._relay().recv(
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
        if self._current is not None:
            self._current[1].close()
            self._current = None
