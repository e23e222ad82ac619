"""vLLM's own base class, factory and layerwise reloading, with a small model on a CPU.

Its configuration is replaced by the few attributes that are read, and no vLLM server runs: both
need more than a CPU. `pip install --no-deps vllm` and what it imports are enough to run this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay as tr
from torchrelay.endpoint.front import Endpoint
from torchrelay.errors import EndpointError, StepNotFoundError, TornStateError, UsageError

why = "vllm is not installed"
base = pytest.importorskip(
    "vllm.distributed.weight_transfer.base", reason=why, exc_type=ImportError
)
factory = pytest.importorskip("vllm.distributed.weight_transfer.factory", exc_type=ImportError)
reload = pytest.importorskip("vllm.model_executor.model_loader.reload", exc_type=ImportError)

from vllm.config.weight_transfer import WeightTransferConfig  # noqa: E402
from vllm.model_executor.model_loader.weight_utils import default_weight_loader  # noqa: E402

from torchrelay.integrations import vllm as ours  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("first.weight", "second.gate", "second.up", "third.weight")


class Pair(nn.Module):
    """A layer of two parameters: one can be loaded without the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))


class Model(nn.Module):
    """Loads weights as vLLM's models do: each parameter by the loader that it has now."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.third = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second = Pair()
        self.fails_at = ""
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            if name == self.fails_at:
                raise RuntimeError("no kernel for this")
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor)
            loaded.add(name)
        return loaded

    def values(self) -> list[float]:
        return [float(parameter.detach().mean()) for parameter in self.parameters()]


def weights(value: float, names: Iterable[str] = NAMES) -> dict[str, Any]:
    return {"model": {name: torch.full((4, 4), value) for name in names}}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with tr.serve(weights(1), step=1, no_dist=True, timeout=60) as made:
        yield made


def engine_for(model: Model, url: str | None, seconds: float = 60) -> Any:
    """As a worker makes it, after the model was loaded once."""
    ours.register()
    reload.record_metadata_for_reloading(model)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(), model_config=SimpleNamespace(quantization=None)
    )
    transfer = WeightTransferConfig(backend="torchrelay")
    engine = factory.WeightTransferEngineFactory.create_engine(
        transfer, config, torch.device("cpu"), model
    )
    if url is not None:
        info = {"urls": [url], "timeout": seconds}
        engine.init_transfer_engine(engine.parse_init_info(info))
    return engine


def test_vllm_finds_the_engine_by_its_name() -> None:
    ours.register()
    ours.register()  # vLLM may load a plugin several times
    engine = engine_for(Model(0), None)
    assert type(engine) is ours.RelayWeightTransferEngine
    assert isinstance(engine, base.WeightTransferEngine)
    declared = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in declared
    assert f'torchrelay = "{ours.__name__}:{ours.register.__name__}"' in declared


def test_a_version_is_loaded_when_the_update_is_finished(endpoint: Endpoint) -> None:
    model = Model(0)
    engine = engine_for(model, endpoint.url)
    where = [parameter.data_ptr() for parameter in model.parameters()]
    for step in (2, 3):
        endpoint.publish(weights(step), step=step).result(60)
        engine.start_weight_update()
        before = model.values()
        engine.update_weights({"step": step})
        assert model.values() == before, "received, not loaded"
        engine.finish_weight_update()
        assert model.values() == [step] * 4
    # Graphs that were captured read the same memory.
    assert [parameter.data_ptr() for parameter in model.parameters()] == where
    engine.shutdown()


def test_a_caller_may_finish_the_layers_itself(endpoint: Endpoint) -> None:
    model = Model(0)
    engine = engine_for(model, endpoint.url)
    endpoint.publish(weights(4), step=4).result(60)
    engine.start_weight_update()
    engine.update_weights({"step": 4})
    assert engine.defers_processing
    engine.drain_pending()
    engine.drain_pending()
    reload.finalize_layerwise_reload(model, engine.model_config)
    assert model.values() == [4] * 4


def test_a_version_that_is_not_there_leaves_the_model_as_it_was(endpoint: Endpoint) -> None:
    model = Model(0)
    engine = engine_for(model, endpoint.url)
    endpoint.publish(weights(5), step=5).result(60)
    engine.start_weight_update()
    engine.update_weights({"step": 5})  # received, and given up
    engine.start_weight_update()
    with pytest.raises(StepNotFoundError):
        engine.update_weights({"step": 99})
    engine.finish_weight_update()
    assert model.values() == [0] * 4
    engine.start_weight_update()
    engine.update_weights({"step": 5})
    engine.finish_weight_update()
    assert model.values() == [5] * 4


def test_an_endpoint_that_is_gone_leaves_the_model_as_it_was() -> None:
    model = Model(0)
    engine = engine_for(model, "http://127.0.0.1:9", seconds=5)
    engine.start_weight_update()
    with pytest.raises((EndpointError, tr.errors.PeerLostError, tr.errors.CheckpointError)):
        engine.update_weights({"step": 1})
    assert model.values() == [0] * 4


@pytest.mark.parametrize("kind", ["incomplete", "refused"])
def test_a_model_that_took_part_of_a_version_is_named_and_can_be_mended(
    endpoint: Endpoint, kind: str
) -> None:
    model = Model(0)
    engine = engine_for(model, endpoint.url)
    names = NAMES[:3] if kind == "incomplete" else NAMES
    model.fails_at = "" if kind == "incomplete" else NAMES[2]
    step = 6 if kind == "incomplete" else 8
    endpoint.publish(weights(step, names), step=step).result(60)
    engine.start_weight_update()
    engine.update_weights({"step": step})
    with pytest.raises(TornStateError, match="part old, part new") as caught:
        engine.finish_weight_update()
    assert caught.value.step == step
    assert (NAMES[3] if kind == "incomplete" else "no kernel") in str(caught.value)
    model.fails_at = ""
    endpoint.publish(weights(step + 1), step=step + 1).result(60)
    engine.update_weights({"step": step + 1})
    engine.finish_weight_update()
    assert model.values() == [step + 1] * 4


def update_on_ranks(rank: int, group: Any, good: str, bad: str) -> list[Any]:
    """One rank cannot read at first; then both can."""
    model = Model(0)
    engine = engine_for(model, good if rank == 0 else bad, seconds=10)
    engine.start_weight_update()
    try:
        engine.update_weights({"step": 11})
        failed = "no"
    except tr.errors.RelayError as fault:
        failed = type(fault).__name__
    engine.finish_weight_update()
    before = model.values()
    engine.init_transfer_engine(engine.parse_init_info({"urls": [good]}))
    engine.start_weight_update()
    engine.update_weights({"step": 11})
    engine.finish_weight_update()
    return [failed, before, model.values()]


@pytest.mark.timeout(300)
def test_all_ranks_have_the_version_or_none_has(pool2: Any, endpoint: Endpoint) -> None:
    endpoint.publish(weights(11), step=11).result(60)
    found = pool2.run(update_on_ranks, endpoint.url, "http://127.0.0.1:9", timeout=240)
    for failed, before, after in found:
        assert failed != "no"
        assert before == [0] * 4 and after == [11] * 4


def test_messages_that_make_no_sense_are_refused(endpoint: Endpoint) -> None:
    engine = engine_for(Model(0), None)
    with pytest.raises(UsageError, match="init_weight_transfer_engine"):
        engine.update_weights({"step": 1})
    with pytest.raises(ValueError, match="step"):
        engine.update_weights({})
    with pytest.raises(ValueError, match="urls"):
        engine.parse_init_info({})
    with pytest.raises(ValueError, match="token"):
        engine.parse_init_info({"urls": [endpoint.url], "token": "a secret in a message"})
    assert not engine.supports_draft_weight_update
