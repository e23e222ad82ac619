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


class RelayTransport(CheckpointTransport[T], Generic[T]):
    """Recovers a torchft replica from a live one, over torchft's own process group.

    `state_dict`, if given, is called to get the state that is received into, in place. `device` is
    where tensors without an in-place destination are placed.
    """

    # The manager's own clock starts with ours; this leaves it time to hear what went wrong.
    _SHARE_OF_TIMEOUT = 0.9

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device | str = "cpu",
        state_dict: Callable[[], T] | None = None,
    ) -> None:
        self._relay = Relay(pg, timeout=timeout.total_seconds())
        self._device = torch.device(device)
        self._state_dict = state_dict

    def metadata(self) -> str:
        """Nothing is needed to find a peer: the process group has the connections."""
        return "torchrelay"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Send to all ranks that are behind; returns when they have it, so nothing is pending."""
        seconds = timeout.total_seconds() * self._SHARE_OF_TIMEOUT
        report = self._relay.send(state_dict, dst_ranks, step=step, timeout=seconds)
        if report.failed:
            raise PeerLostError(
                f"not every rank got the checkpoint: {report.failed}",
                rank=next(iter(report.failed)),
                step=step,
            )

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        into = self._state_dict() if self._state_dict is not None else None
        got = self._relay.recv(
            src_rank,
            into=into,
            step=step,
            device=self._device,
            timeout=timeout.total_seconds() * self._SHARE_OF_TIMEOUT,
        )
        state: T = got.state
        return state

    def shutdown(self, wait: bool = True) -> None:
        self._relay.close()
