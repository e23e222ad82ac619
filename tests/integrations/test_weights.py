"""One whole verified version of weights, or an error and nothing. No framework is needed."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.endpoint.liars import Between
from tests.support.fsdp_job import fsdp_job, train, whole
from torchrelay.endpoint.front import Endpoint
from torchrelay.errors import (
    EndpointError,
    MismatchError,
    PeerLostError,
    RelayError,
    StepMismatchError,
    StepNotFoundError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.integrations import weights as weights_module
from torchrelay.integrations.weights import WeightOffers, WeightReader, named_tensors, read_offer

SECONDS = 60


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.full((64, 32), value) for n in range(6)}


def value_of(tensors: dict[str, torch.Tensor]) -> float:
    """The one number that all tensors of a version have."""
    found = {float(x) for tensor in tensors.values() for x in tensor.unique()}
    assert len(tensors) == 6 and len(found) == 1, "a mixture"
    return found.pop()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    state = {"model": weights(1), "optimizer": {"lr": 0.1}}
    with tr.serve(state, step=1, no_dist=True, timeout=SECONDS) as made:
        yield made


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as from another host: memory of this one would be mapped."""

    def over_tcp(*args: Any, options: Any, **more: Any) -> tr.Loaded:
        return tr.pull(*args, options=replace(options, same_host=False), **more)

    monkeypatch.setattr(weights_module, "pull", over_tcp)


def test_a_version_is_whole_and_is_of_the_step_that_was_asked_for(endpoint: Endpoint) -> None:
    reader = WeightReader(endpoint.url, no_dist=True, timeout=SECONDS)
    first = reader.read(step=1)
    assert first.step == 1 and value_of(first.tensors) == 1
    endpoint.publish({"model": weights(2)}, step=2).result(SECONDS)
    assert value_of(reader.read(step=2).tensors) == value_of(reader.read().tensors) == 2
    with pytest.raises(StepNotFoundError):
        reader.read(step=7)
    assert value_of(first.tensors) == 1


def test_a_version_lets_go_of_what_was_taken(endpoint: Endpoint) -> None:
    version = WeightReader(endpoint.url, no_dist=True, timeout=SECONDS).read()
    names = []
    for name, _ in version.take():
        names.append(name)
        assert name not in version.tensors
    assert names == list(weights(0)) and not version.tensors


def test_a_checkpoint_is_a_source_too(tmp_path: Path) -> None:
    with tr.Checkpointer(tmp_path, no_dist=True, timeout=SECONDS) as steps:
        steps.save(3, {"model": weights(3)})
        steps.save(4, {"model": weights(4)})
        assert value_of(WeightReader(steps, no_dist=True).read(step=3).tensors) == 3
    assert value_of(WeightReader(tmp_path, no_dist=True).read().tensors) == 4


def test_readers_never_see_two_versions_at_once(endpoint: Endpoint, over_tcp: None) -> None:
    """Versions follow each other while two threads read them over TCP."""
    stop, found, faults = threading.Event(), [], []

    def read() -> None:
        reader = WeightReader([endpoint.url], no_dist=True, timeout=SECONDS)
        while not stop.is_set():
            try:
                version = reader.read()
                assert value_of(version.tensors) == version.step
                found.append(version.step)
            except RelayError as fault:  # a step that was replaced before it was opened
                faults.append(fault)

    endpoint.publish({"model": weights(10)}, step=10).result(SECONDS)
    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(11, 31):
        endpoint.publish({"model": weights(step)}, step=step).result(SECONDS)
        time.sleep(0.02)
    stop.set()
    for reader in readers:
        reader.join(SECONDS)
        assert not reader.is_alive()
    assert len(set(found)) > 1, faults


def test_damaged_bytes_give_no_version(over_tcp: None) -> None:
    def alter(line: str, body: bytes) -> bytes:
        return bytes([body[0] ^ 1]) + body[1:] if "/volumes/" in line and body else body

    with tr.serve({"model": weights(5)}, step=5, no_dist=True, timeout=SECONDS) as honest:
        with Between(honest.url, alter) as liar:
            with pytest.raises(PeerLostError, match="wrong digest"):
                WeightReader(liar.url, no_dist=True, timeout=20).read(step=5)
            assert any("/volumes/" in line for line in liar.requests)


@pytest.mark.parametrize(
    ("state", "key", "path"),
    [
        ({"model": {"a": torch.ones(1), "b": 3}}, "model", "b"),
        ({"model": {"a": {"b": torch.ones(1)}}}, "model", "a"),
        ({"model": {}}, "model", None),
        ({"model": torch.ones(1)}, "model", None),
        ({"model": {"a": torch.ones(1)}}, None, "model"),
    ],
)
def test_a_state_that_is_no_flat_dict_of_tensors_is_refused(
    state: dict[str, Any], key: str | None, path: str | None
) -> None:
    found = state if key is None else state[key]
    with pytest.raises(MismatchError) as caught:
        named_tensors(found, key)
    assert caught.value.path == path


# Ranks


_kept: dict[str, Any] = {}


def serve_part(rank: int, group: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """Ranks of FSDP2 serve their shards."""
    job = fsdp_job(1)
    train(job, 1)
    _kept["endpoint"] = tr.serve(job, step=1, timeout=SECONDS)
    return _kept["endpoint"].url, whole(job)


def close_part(rank: int, group: Any) -> None:
    _kept.pop("endpoint").close()


def read_together(rank: int, group: Any, url: str) -> dict[str, torch.Tensor]:
    return WeightReader(url, group=group, timeout=SECONDS).read(step=1).tensors


def read_apart(rank: int, group: Any, good: str, bad: str) -> str:
    """One rank's source is gone."""
    try:
        WeightReader(good if rank == 0 else bad, group=group, timeout=10).read()
    except RelayError as fault:
        return type(fault).__name__
    return "read"


def test_ranks_of_a_sharded_trainer_give_whole_tensors_to_each_rank(pool2: Any) -> None:
    url, wanted = pool2.run(serve_part, timeout=100)[0]
    for found in pool2.run(read_together, url, timeout=100):
        for name, tensor in found.items():
            assert type(tensor) is torch.Tensor
            assert torch.equal(tensor, wanted[f"model.{name}"])
        assert len(found) == sum(name.startswith("model.") for name in wanted)
    pool2.run(close_part)


def test_all_ranks_have_a_version_or_none_has(pool2: Any, endpoint: Endpoint) -> None:
    found = pool2.run(read_apart, endpoint.url, "http://127.0.0.1:9", timeout=100)
    assert "read" not in found


# Offers


def test_readers_wait_for_the_version_that_was_announced() -> None:
    offers = WeightOffers("127.0.0.1", timeout=SECONDS)
    try:
        for number in (1, 2, 3):
            offer = offers.announce()
            assert offer.version == number
            found: list[Any] = []
            reading = threading.Thread(
                target=lambda offer=offer, found=found: found.append(
                    read_offer(offer, no_dist=True, timeout=SECONDS)
                )
            )
            reading.start()
            time.sleep(0.2)
            assert not found
            offers.publish(weights(number))
            reading.join(SECONDS)
            assert found[0].step == number and value_of(found[0].tensors) == number
    finally:
        offers.close()


def test_an_offer_that_is_not_kept_ends_at_the_deadline() -> None:
    offers = WeightOffers("127.0.0.1", timeout=SECONDS)
    try:
        with pytest.raises(UsageError, match="announce"):
            offers.publish(weights(1))
        first = offers.announce()
        with pytest.raises(TransferTimeoutError):
            read_offer(first, no_dist=True, timeout=1)
        offers.announce()
        offers.publish(weights(2))
        with pytest.raises(StepMismatchError, match="version 2"):
            read_offer(first, no_dist=True, timeout=SECONDS)
        with pytest.raises(EndpointError):
            read_offer(first._replace(token="another"), no_dist=True, timeout=SECONDS)
        assert first.token not in first.url
    finally:
        offers.close()


# Frameworks that are missing


@pytest.mark.parametrize("name", ["vllm", "verl"])
def test_without_the_framework_the_error_names_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = f"torchrelay.integrations.{name}"
    for module in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, ours, raising=False)
    with pytest.raises(ImportError, match=rf"torchrelay\[{name}\]"):
        importlib.import_module(ours)
    importlib.import_module("torchrelay.integrations.sglang")
