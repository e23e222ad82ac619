"""On one host, for one user, memory is shared; the report says so, or says why not."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.endpoint.conftest import Stage
from torchrelay.sources import lent_memory
from torchrelay.sources.connection import Host
from torchrelay.sources.endpoint import EndpointSource
from torchrelay.sources.lent_memory import LentMemory, LocalFacts


def _state(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300_000, generator=draw), "n": seed, "half": torch.ones(3).half()}


def _is(found: dict[str, Any], seed: int) -> bool:
    wanted = _state(seed)
    return found["n"] == seed and all(torch.equal(found[k], wanted[k]) for k in ("w", "half"))


@pytest.mark.parametrize("verify", [True, "all", False])
@pytest.mark.parametrize("in_place", [False, True])
def test_memory_is_shared_and_no_byte_sent(stage: Stage, in_place: bool, verify: Any) -> None:
    stage.show(_state(1))
    before = stage.endpoint.status()["sent_bytes"]
    into = _state(2) if in_place else None
    got = tr.pull(stage.url, into=into, timeout=60, options=tr.options.PullOptions(verify=verify))
    assert got.report.route == "mapped" and not got.report.instead
    assert got.report.verified is (verify == "all")
    assert _is(got.state, 1)
    assert stage.endpoint.status()["sent_bytes"] == before


def test_why_it_is_not(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.show(_state(3))
    got = tr.pull(stage.url, timeout=60, options=tr.options.PullOptions(same_host=False))
    assert got.report.route == "http" and got.report.instead == {"mapped": "same_host=False"}
    monkeypatch.setattr(lent_memory, "machine", lambda: "elsewhere")
    got = tr.pull(stage.url, timeout=60)
    assert got.report.route == "http"
    assert got.report.instead == {"mapped": "the server is on another machine"}
    assert _is(got.state, 3)


def test_memory_that_is_lent_is_never_written_to(stage: Stage) -> None:
    """Its step stays readable whatever is published, and the trainer waits for nobody."""
    from torchrelay.deadlines import Deadline

    first = stage.show(_state(4))
    source = EndpointSource(stage.url)
    opened = source.open(first, Deadline(60))
    for seed in (5, 6, 7):
        stage.show(_state(seed))
        assert _is(tr.pull(stage.url, timeout=60).state, seed)
    file = opened.record.volumes[0]
    whole = bytearray(file.nbytes)
    opened.files.reader(file.name).read_into(0, memoryview(whole))
    assert _state(4)["w"].numpy().tobytes() in bytes(whole)
    opened.close()
    source.end()


def test_another_user_gets_nothing(stage: Stage) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can ask as another user")
    step = stage.show(_state(8))
    status = stage.endpoint.status()
    snapshot = next(one["snapshot"] for one in status["steps"] if one["step"] == step)
    host = Host(stage.url)
    facts = msgspec.json.decode(host.get("/local.json", seconds=30).body, type=LocalFacts)
    host.close()
    found: list[BaseException] = []

    def ask() -> None:
        ctypes.CDLL(None).syscall(117 if os.uname().machine == "x86_64" else 147, 65534, 65534, 0)
        try:
            LentMemory(facts, snapshot, "r" * 16)
        except OSError as fault:
            found.append(fault)

    asking = threading.Thread(target=ask)  # the user is that of a thread, for the kernel
    asking.start()
    asking.join(30)
    assert found and "another user" in str(found[0])
