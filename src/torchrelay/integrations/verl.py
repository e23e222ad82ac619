"""verl moves weights from its actors to its rollout workers through an endpoint of torchrelay.

actor_rollout_ref.rollout.checkpoint_engine:
  backend: torchrelay
  custom_backend_module: torchrelay.integrations.verl
  engine_kwargs: {torchrelay: {timeout: 600}}
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any

import torch

from torchrelay.deadlines import Timeout, seconds_of
from torchrelay.endpoint.front import Endpoint, serve
from torchrelay.errors import EndpointError, MismatchError, StepMismatchError, UsageError
from torchrelay.integrations.weights import WeightReader
from torchrelay.sources.access import Access

try:
    from ray.util import get_node_ip_address
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.device import get_device_name
    from verl.workers.rollout.utils import ensure_async_iterator
except ImportError as fault:
    raise ImportError(
        f"{fault.name} is not installed: pip install 'torchrelay[verl]'", name=fault.name
    ) from fault

BACKEND = "torchrelay"
Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]]


@CheckpointEngineRegistry.register(BACKEND)  # type: ignore[untyped-decorator, unused-ignore]
class RelayCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """The first actor publishes each version once; every rollout worker reads it whole, compares its
    digests, and only then yields its first tensor. Rollout workers of one process group all have
    the same version, or all raise.

    verl makes it with `bucket_size`, which is not used, and `is_master`. `host` is the address that
    the first actor listens at, by default that of its Ray node; `device` is where tensors are
    yielded, by default verl's device. `timeout` bounds each send and each receive.
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
        self._endpoint: Endpoint | None = None
        self._token = ""
        self._version = 0  # the endpoint's number of the version that is moved now
        self._offer: dict[str, Any] | None = None

    def prepare(self) -> dict[str, Any]:
        """Return where the next version will be; of the first actor only. The token goes to the
        rollout workers by Ray, as addresses of other engines do."""
        if not self._is_master:
            return {}
        if self._endpoint is None:
            host = self._host or get_node_ip_address().strip("[]")
            place = f"[{host}]:0" if ":" in host else f"{host}:0"
            self._token = secrets.token_urlsafe()
            access = Access(token=self._token)
            # Nothing is in version 0: the URL has to be known before there are weights.
            self._endpoint = serve(
                {}, step=0, address=place, access=access, group=False, timeout=self._timeout
            )
        self._version += 1
        return {"url": self._endpoint.url, "token": self._token, "version": self._version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The offer of the first actor, for each rollout worker."""
        offers = [one for one in metadata if one]
        if len(offers) != 1:
            raise UsageError(f"one actor offers weights, not {len(offers)}: see is_master")
        return (
            {"offer": [None] * actor_wg_world_size},
            {"offer": offers * rollout_world_size},
        )

    def init_process_group(self, offer: dict[str, Any] | None) -> None:
        self._offer = offer

    def finalize(self) -> None:
        """Forget the offer. The endpoint stays for the next version."""
        self._offer = None

    @torch.no_grad()
    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Publish the weights; all actors call it, because gathering them takes all of them.

        Returns when rollout workers can read the version.
        """
        found: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if not self._is_master:
                continue
            if name in found:
                raise MismatchError("the actor yields this weight twice", path=name)
            # A copy: the actor may use the memory for its next weight.
            found[name] = tensor.detach().to("cpu", copy=True)
        if self._is_master:
            await asyncio.to_thread(self._publish, found, global_steps)

    def _publish(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        if self._endpoint is None:
            raise UsageError("there is no endpoint: call prepare first")
        pending = self._endpoint.publish(weights, step=self._version)
        if pending.skipped:
            raise EndpointError(
                f"the weights were not published: {pending.skipped}", step=global_steps
            )
        pending.result(self._timeout)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Wait for the version, read all of it, then yield its tensors one by one."""
        if self._offer is None:
            raise UsageError("no weights are offered: call prepare and init_process_group first")
        offer = self._offer
        reader = WeightReader(
            [offer["url"]],
            key=None,
            access=Access(token=offer["token"]),
            timeout=self._timeout,
        )
        version = await asyncio.to_thread(reader.read, newer_than=offer["version"] - 1)
        if version.step != offer["version"]:
            raise StepMismatchError(
                f"the actor has published version {version.step} where {offer['version']} was "
                "offered: is another update running?",
                step=global_steps,
            )
        for name, tensor in version.take():
            yield name, tensor.to(self._device)
