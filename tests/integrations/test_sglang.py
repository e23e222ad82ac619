"""SGLang's HTTP API, against a small server that answers as SGLang does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.integrations.fake_sglang import FakeSGLang
from torchrelay.errors import (
    EndpointError,
    PeerRefusedError,
    StepNotFoundError,
    TransferTimeoutError,
    UsageError,
)
from torchrelay.integrations.sglang import SGLangServer
from torchrelay.integrations.weights import WeightReader

PAUSE, LOAD, CONTINUE = "/pause_generation", "/update_weights_from_disk", "/continue_generation"


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"embed": torch.full((8, 4), value), "norm": torch.full((4,), value)}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightReader]:
    folder = tmp_path_factory.mktemp("steps")
    with tr.Checkpointer(folder, no_dist=True, timeout=60) as steps:
        for step in (1, 2, 3):
            steps.save(step, {"model": weights(step)})
    yield WeightReader(folder, no_dist=True, timeout=60)


@pytest.fixture
def sglang() -> Iterator[FakeSGLang]:
    server = FakeSGLang()
    yield server
    server.close()


def folders(root: Path) -> list[str]:
    return sorted(one.name.rpartition("-")[0] for one in root.iterdir()) if root.exists() else []


def same(found: dict[str, torch.Tensor], value: float) -> bool:
    wanted = weights(value)
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_a_version_is_loaded_while_generation_is_paused(
    reader: WeightReader, sglang: FakeSGLang, tmp_path: Path
) -> None:
    server = SGLangServer(sglang.url, tmp_path / "hf", timeout=30)
    assert server.update(reader, step=1) == 1
    assert sglang.asked == [PAUSE, LOAD, CONTINUE]
    assert sglang.bodies[PAUSE] == {"mode": "retract"}
    assert sglang.bodies[LOAD]["flush_cache"] is True
    assert same(sglang.loaded, 1) and sglang.version == "1"
    assert sglang.loaded_while_paused and not sglang.paused
    assert server.update(reader) == 3
    assert same(sglang.loaded, 3) and not sglang.paused
    assert folders(tmp_path / "hf") == ["step-3"], "the version before is removed"
    server.close()


def test_a_published_version_is_exported(sglang: FakeSGLang, tmp_path: Path) -> None:
    with tr.serve({"model": weights(7)}, step=7, no_dist=True, timeout=60) as endpoint:
        server = SGLangServer(sglang.url, tmp_path, pause="abort", timeout=30)
        assert server.update(WeightReader(endpoint.url, no_dist=True, timeout=60), step=7) == 7
        server.close()
    assert sglang.bodies[PAUSE] == {"mode": "abort"} and same(sglang.loaded, 7)


def test_a_version_that_cannot_be_read_does_not_pause_the_server(
    reader: WeightReader, sglang: FakeSGLang, tmp_path: Path
) -> None:
    with pytest.raises(StepNotFoundError):
        SGLangServer(sglang.url, tmp_path, timeout=30).update(reader, step=9)
    assert sglang.asked == [] and folders(tmp_path) == []


def test_a_server_that_refuses_gets_the_version_before_again(
    reader: WeightReader, sglang: FakeSGLang, tmp_path: Path
) -> None:
    server = SGLangServer(sglang.url, tmp_path, timeout=30)
    server.update(reader, step=1)
    sglang.fails[LOAD] = lambda body: 400 if body["weight_version"] == "2" else None
    sglang.asked.clear()
    with pytest.raises(PeerRefusedError, match=r"out of memory.*step 1 again") as caught:
        server.update(reader, step=2)
    assert caught.value.step == 2 and caught.value.phase == "load"
    assert sglang.asked == [PAUSE, LOAD, LOAD, CONTINUE] and not sglang.paused
    assert same(sglang.loaded, 1) and folders(tmp_path) == ["step-1"]
    sglang.fails.clear()
    assert server.update(reader, step=2) == 2 and same(sglang.loaded, 2)
    server.close()


@pytest.mark.parametrize("loaded_before", [False, True])
def test_a_server_whose_weights_are_not_known_is_named(
    reader: WeightReader, sglang: FakeSGLang, tmp_path: Path, loaded_before: bool
) -> None:
    server = SGLangServer(sglang.url, tmp_path, timeout=30)
    if loaded_before:
        server.update(reader, step=1)
    sglang.fails[LOAD] = 400
    with pytest.raises(PeerRefusedError, match="weights of two versions: update it again"):
        server.update(reader, step=2)
    assert sglang.asked[-1] == CONTINUE and not sglang.paused
    server.close()


@pytest.mark.parametrize(
    ("route", "fault", "error"),
    [
        (PAUSE, "hang", TransferTimeoutError),
        (PAUSE, "close", EndpointError),
        (PAUSE, 404, EndpointError),
        (LOAD, "hang", TransferTimeoutError),
        (LOAD, "close", EndpointError),
        (LOAD, 500, EndpointError),
        (LOAD, "text", PeerRefusedError),
    ],
)
def test_generation_continues_after_any_failure(
    reader: WeightReader,
    sglang: FakeSGLang,
    tmp_path: Path,
    route: str,
    fault: Any,
    error: type[Exception],
) -> None:
    sglang.fails[route] = fault
    server = SGLangServer(sglang.url, tmp_path, timeout=1 if fault == "hang" else 2)
    begun = time.monotonic()
    with pytest.raises(error):
        server.update(reader, step=2)
    assert time.monotonic() - begun < 15
    assert sglang.asked[-1] == CONTINUE and not sglang.paused
    # A server that knows the files, and did not answer, may still read them.
    kept = route == LOAD and fault != "text"
    assert folders(tmp_path) == (["step-2"] if kept else [])
    server.close()


def test_a_server_that_stays_paused_is_named(
    reader: WeightReader, sglang: FakeSGLang, tmp_path: Path
) -> None:
    sglang.fails[CONTINUE] = 500
    server = SGLangServer(sglang.url, tmp_path, timeout=10)
    with pytest.raises(EndpointError, match="may still be paused"):
        server.update(reader, step=2)
    sglang.fails[LOAD] = 400
    with pytest.raises(EndpointError, match=r"out of memory(.|\n)*may still be paused") as caught:
        server.update(reader, step=3)
    assert isinstance(caught.value.__cause__, PeerRefusedError)
    server.close()


def test_the_key_of_the_server_is_sent_and_not_that_of_the_endpoint(
    reader: WeightReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sglang = FakeSGLang(api_key="key-of-sglang")
    monkeypatch.setenv("TORCHRELAY_TOKEN", "token-of-the-endpoint")
    server = SGLangServer(sglang.url, tmp_path, timeout=10)
    with pytest.raises(EndpointError, match="401"):
        server.update(reader, step=1)
    server = SGLangServer(sglang.url, tmp_path, api_key="key-of-sglang", timeout=10)
    assert server.update(reader, step=1) == 1
    sglang.close()
    with pytest.raises(EndpointError, match="cannot reach"):
        SGLangServer(sglang.url, tmp_path, timeout=10).update(reader, step=1)


def test_a_pause_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in_place"):
        SGLangServer("http://127.0.0.1:9", tmp_path, pause="in_place")  # type: ignore[arg-type]
