"""verl moves weights from its actors to its rollout workers through an endpoint of torchrelay.

actor_rollout_ref.rollout.checkpoint_engine:
  backend: torchrelay
  custom_backend_module: torchrelay.integrations.verl
  engine_kwargs: {torchrelay: {timeout: 600}}
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import torch

from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.errors import MismatchError, UsageError
from torchrelay.integrations.extras import extra
from torchrelay.integrations.weights import WeightOffer, WeightOffers, read_offer

with extra("verl"):
    from ray.util import get_node_ip_address
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.device import get_device_name
    from verl.workers.rollout.utils import ensure_async_iterator

BACKEND = "torchrelay"
Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


@CheckpointEngineRegistry.register(BACKEND)  # type: ignore[untyped-decorator, unused-ignore]
class RelayCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """The first actor publishes each version once. Every rollout worker reads all of it, compares
    its digests, and only then yields its first tensor. Rollout workers of one process group all
    have the same version, or all raise.

    verl passes `bucket_size`, which is not used, and `is_master`. `host` is the address that the
    first actor listens at, by default that of its Ray node. Tensors are yielded on `device`, by
    default verl's. `timeout` bounds each send and each receive.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        host: str | None = None,
        device: str | None = None,
        timeout: Timeout = 600.0,
    ) -> None:
        self._is_master, self._host = is_master, host
        self._device = torch.device(device or get_device_name())
        self._timeout = seconds_of(timeout)
        self._offers: WeightOffers | None = None  # of the first actor
        self._offer: WeightOffer | None = None  # of a rollout worker

    def prepare(self) -> dict[str, Any]:
        """Return the first actor's offer of the next version, and nothing elsewhere. Ray carries
        its token to the rollout workers."""
        if not self._is_master:
            return {}
        if self._offers is None:
            host = self._host or get_node_ip_address().strip("[]")
            self._offers = WeightOffers(host, timeout=self._timeout)
        return self._offers.announce()._asdict()

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The first actor's offer, for each rollout worker."""
        offers = [one for one in metadata if one]
        if len(offers) != 1:
            raise UsageError(f"one actor offers weights, not {len(offers)}: see is_master")
        return ({"offer": [None] * actor_wg_world_size}, {"offer": offers * rollout_world_size})

    def init_process_group(self, offer: dict[str, Any] | None) -> None:
        self._offer = None if offer is None else WeightOffer(**offer)

    def finalize(self) -> None:
        """Forget the offer. The endpoint stays for the next version."""
        self._offer = None

    @torch.no_grad()
    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Publish the weights; returns when rollout workers can read them. All actors call it,
        because it takes all of them to gather whole tensors."""
        found: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if not self._is_master:
                continue
            if name in found:
                raise MismatchError("the actor yields this weight twice", path=name)
            # A copy: the actor may use the memory for its next weight.
            found[name] = tensor.detach().to("cpu", copy=True)
        if not self._is_master:
            return
        if self._offers is None:
            raise UsageError("no version was announced: call prepare first")
        await asyncio.to_thread(self._offers.publish, found)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait for the version, read all of it, then yield its tensors one by one."""
        if self._offer is None:
            raise UsageError("no weights are offered: call prepare and init_process_group first")
        version = await asyncio.to_thread(read_offer, self._offer, timeout=self._timeout)
        for name, tensor in version.take():
            yield name, tensor.to(self._device)
