"""vLLM takes new weights from a trainer's endpoint, one whole version at a time.

vllm serve MODEL --weight-transfer-config '{"backend": "torchrelay"}'

The trainer publishes a step and tells vLLM to take it:

    client.init_weight_transfer_engine({"urls": [endpoint.url]})
    endpoint.publish(state, step=101).result(60)
    client.start_weight_update()
    client.update_weights({"step": 101})
    client.finish_weight_update()
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.errors import TornStateError, UsageError
from torchrelay.integrations.extras import extra
from torchrelay.integrations.weights import Version, WeightReader
from torchrelay.sources.access import Access

with extra("vllm"):
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "torchrelay"


def register() -> None:
    """Name the engine to vLLM, which calls this in each of its processes, possibly several times:
    it is an entry point of the group `vllm.general_plugins`."""
    with suppress(ValueError):  # of vLLM, for a name that is registered
        WeightTransferEngineFactory.register_engine(BACKEND, RelayWeightTransferEngine)


@dataclass
class RelayInitInfo(WeightTransferInitInfo):  # type: ignore[misc, unused-ignore]
    """Where the weights are: URLs that have the same steps, and the key below which the state has
    them. Workers find the token in `token_file` or in TORCHRELAY_TOKEN, never in this message."""

    urls: list[str]
    key: str | None = "model"
    token_file: str | None = None
    cafile: str | None = None
    timeout: float = 300.0


@dataclass
class RelayUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc, unused-ignore]
    """The step to load, the same on all workers and replicas."""

    step: int


class RelayWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc, unused-ignore]
    """`update_weights` reads a whole version into host memory and compares its digests: all ranks
    of torch.distributed's world have it then, or all raise. `finish_weight_update` loads it.

    The model is untouched until then: an update that fails, or is never finished, leaves all
    workers with the version before. Each worker needs host memory for all of the weights.
    """

    init_info_cls = RelayInitInfo
    update_info_cls = RelayUpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    _reader: WeightReader | None = None
    _received: Version | None = None

    def init_transfer_engine(self, init_info: RelayInitInfo) -> None:
        access = Access(token_file=init_info.token_file, cafile=init_info.cafile)
        self._reader = WeightReader(
            init_info.urls, key=init_info.key, access=access, timeout=init_info.timeout
        )

    def start_weight_update(self) -> None:
        """Forget a version that was received and never loaded."""
        self._received = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class waits for the device afterwards. Nothing was given to it yet.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: RelayUpdateInfo) -> None:
        if self._reader is None:
            raise UsageError("no endpoint is known: call init_weight_transfer_engine first")
        self._received = None
        self._received = self._reader.read(step=update_info.step)

    def drain_pending(self) -> None:
        """Load the version that was received, if there is one. A caller that uses this in place of
        `finish_weight_update` finalizes the layers itself."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        version, self._received = self._received, None
        if version is None:
            return
        # As vLLM names them when it reloads: LoRA puts a layer between.
        names = (name for name, _ in self.model.named_parameters())
        wanted = {name.replace(".base_layer.", ".") for name in names}
        try:
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(version.take())
            # As vLLM checks when it loads a model first. Quantized layers have parameters of their
            # own, and some models do not say what they loaded.
            known = loaded is not None and self.model_config.quantization is None
            if missing := sorted(wanted - set(loaded)) if known else []:
                raise ValueError(f"the version has no weights for {', '.join(missing[:3])}")
        except BaseException as fault:
            # Layers would count what they got towards the next version.
            finalize_layerwise_reload(self.model, self.model_config)
            if not isinstance(fault, Exception):
                raise
            raise TornStateError(
                f"the model did not take all of the version ({fault}): it is part old, part new. "
                "Call update_weights and finish_weight_update again",
                step=version.step,
                phase="load",
            ) from fault

    def finish_weight_update(self) -> None:
        """Load the version. Without one, the model stays as it is."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._received is None:
            return
        self.drain_pending()
        finalize_layerwise_reload(self.model, self.model_config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        self._reader = self._received = None
