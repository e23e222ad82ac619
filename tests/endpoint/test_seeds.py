"""Pullers that serve what they have while the rest arrives: the trainer sends about one copy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.endpoint.liars import Between
from torchrelay.endpoint.front import Endpoint
from torchrelay.endpoint.reshare.seed import Seed
from torchrelay.record.encoding import decode_at_rest
from torchrelay.sources.connection import Answered, Host

NBYTES = 24 << 20


def _state() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    return {"w": torch.randint(0, 255, (NBYTES,), generator=draw, dtype=torch.uint8), "n": 3}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    with tr.serve(_state(), step=5, timeout=60) as made:
        tr.pull(made.url, timeout=60)  # the step is shown once it is hashed
        yield made


def _is(state: dict[str, Any]) -> bool:
    return state["n"] == 3 and torch.equal(state["w"], _state()["w"])


def _together(count: int, url: str) -> list[tr.Loaded]:
    found: list[tr.Loaded] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            found.append(tr.pull(url, timeout=90, options=tr.options.PullOptions(reshare=True)))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not faults, faults
    return found


def test_pullers_take_from_each_other(endpoint: Endpoint) -> None:
    before = endpoint.status()["sent_bytes"]
    found = _together(3, endpoint.url)
    try:
        assert len(found) == 3 and all(_is(one.state) for one in found)
        assert endpoint.status()["sent_bytes"] - before < 2.5 * NBYTES  # three copies without
        assert len(endpoint.status()["seeds"]) == 3
        # A seed serves on: what comes later need not ask the endpoint.
        before = endpoint.status()["sent_bytes"]
        seed = found[0].seed
        assert seed is not None
        late = tr.pull(seed.url, timeout=60, options=tr.options.PullOptions(same_host=False))
        assert _is(late.state) and endpoint.status()["sent_bytes"] == before
        joined = tr.pull(endpoint.url, timeout=60, options=tr.options.PullOptions(reshare=True))
        assert _is(joined.state)
        assert joined.seed is not None and len(joined.report.sources) > 1
        joined.seed.close()
    finally:
        for one in found:
            assert one.seed is not None
            one.seed.close()


def test_a_seed_that_lies_or_dies_is_dropped_and_named(endpoint: Endpoint) -> None:
    first = tr.pull(endpoint.url, timeout=60, options=tr.options.PullOptions(reshare=True))
    assert first.seed is not None
    true_url = first.seed.url

    def flip(line: str, body: bytes) -> bytes:
        return body if "/volumes/" not in line else body[:9] + bytes([body[9] ^ 1]) + body[10:]

    def named(line: str, body: bytes) -> bytes:
        return body if "/seeds" not in line else body.replace(true_url.encode(), liar.url.encode())

    with Between(true_url, flip) as liar, Between(endpoint.url, named) as between:
        got = tr.pull(between.url, timeout=60, options=tr.options.PullOptions(reshare=True))
    assert _is(got.state)
    assert "wrong digest" in got.report.failed[liar.url]
    first.seed.close()
    assert got.seed is not None
    got.seed.close()
    again = tr.pull(
        endpoint.url, timeout=60, options=tr.options.PullOptions(reshare=True)
    )  # both are gone, and still listed
    assert _is(again.state)
    assert again.seed is not None
    again.seed.close()


def _record_of(endpoint: Endpoint) -> tuple[str, bytes]:
    """The snapshot of the step, and its record."""
    host = Host(endpoint.url)
    shown = msgspec.json.decode(host.get("/steps.json", seconds=30).body)["steps"][-1]
    data = host.get("/record?step=5", seconds=30, limit=1 << 24).body
    host.close()
    return shown["snapshot"], data


def test_one_that_never_has_its_share_holds_up_nobody_for_long(endpoint: Endpoint) -> None:
    """It says of every chunk that it is on its way."""
    snapshot, data = _record_of(endpoint)
    volumes = decode_at_rest(data).volumes
    with Seed("127.0.0.1", tr.Access(), volumes, expects=lambda chunk: True) as idle:
        idle.show(5, snapshot, data)
        word = msgspec.json.encode({"url": idle.url, "snapshot": snapshot})
        host = Host(endpoint.url)
        assert host.post("/seeds", word, seconds=30).status == 200
        host.close()
        found = _together(2, endpoint.url)
        assert all(_is(one.state) and one.seed is not None for one in found)
        for one in found:
            assert one.seed is not None and idle.url not in one.report.sources
            one.seed.close()


def test_what_is_not_here_yet_is_not_sent(endpoint: Endpoint) -> None:
    _, data = _record_of(endpoint)
    record = decode_at_rest(data)
    file = record.volumes[0]
    with Seed("127.0.0.1", tr.Access(), record.volumes) as seed:
        seed.show(5, "a" * 32, data)
        asking = Host(seed.url)
        view = [memoryview(bytearray(file.chunk_bytes))]
        path = f"/volumes/{'a' * 32}/{file.name}"
        with pytest.raises(Answered, match="not arrived"):
            list(asking.read(path, 0, view, seconds=30))
        seed.space(file.name, 0, file.chunk_bytes)
        seed.add(0, 1)
        assert sum(map(len, asking.read(path, 0, view, seconds=30))) == file.chunk_bytes
        with pytest.raises(Answered, match="not arrived"):
            list(asking.read(path, file.chunk_bytes, view, seconds=30))
        asking.close()
