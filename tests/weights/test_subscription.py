"""One process that follows a trainer: what it gets, what it waits for, what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.weights.conftest import Wire

TIMEOUT = 30


def weights(version: int) -> dict[str, Any]:
    """A state of several dtypes, with a tied tensor, an empty one and leaves of other kinds."""
    draw = torch.Generator().manual_seed(version)
    embedding = torch.randn(50, 24, generator=draw)
    return {
        "model": {
            "embedding": embedding,
            "head": embedding,
            "half": torch.randn(33, 17, generator=draw).bfloat16(),
            "codes": torch.randint(0, 255, (41,), generator=draw, dtype=torch.uint8),
            "phase": torch.randn(5, 3, generator=draw, dtype=torch.complex128),
            "scalar": torch.tensor(float(version)),
            "none": torch.zeros(0, 4),
        },
        "version": version,
        "note": f"version {version}",
    }


def blank() -> dict[str, Any]:
    state = weights(-1)
    for tensor in state["model"].values():
        tensor.zero_()
    return state


def has(state: dict[str, Any], version: int) -> bool:
    wanted = weights(version)
    same = all(torch.equal(state["model"][k], x) for k, x in wanted["model"].items())
    return same and (state["version"], state["note"]) == (version, f"version {version}")


def publish(endpoint: Any, version: int) -> None:
    endpoint.publish(weights(version), step=version).result(TIMEOUT)


@pytest.mark.parametrize("same_host", [False, True])
def test_a_worker_follows_the_newest_step(same_host: bool) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        into = blank()
        tensors = dict(into["model"])
        with tr.subscribe(
            endpoint.url, into=into, same_host=same_host, timeout=TIMEOUT
        ) as subscription:
            assert subscription.step is None and not into["model"]["embedding"].any()
            for version in (1, 2, 5):
                publish(endpoint, version)
                got = subscription.update()
                assert got.step == subscription.step == version
                assert got.state is into and has(into, version)
                assert got.report.route == ("mapped" if same_host else "parts")
        assert all(into["model"][name] is tensor for name, tensor in tensors.items())


@pytest.mark.parametrize("same_host", [False, True])
def test_a_step_that_is_held_is_not_read(same_host: bool, wires: Callable[[str], Wire]) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        into = blank()
        subscription = tr.subscribe(wire.url, into=into, same_host=same_host, timeout=TIMEOUT)
        subscription.update()
        before = wire.received
        again = subscription.update(at_least=1)
        assert (again.step, again.report.bytes) == (1, 0) and has(again.state, 1)
        assert wire.received - before < 1500  # a list of steps


@pytest.mark.parametrize("same_host", [False, True])
def test_a_step_with_the_same_state_is_not_read(
    same_host: bool, wires: Callable[[str], Wire]
) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        into = blank()
        subscription = tr.subscribe(wire.url, into=into, same_host=same_host, timeout=TIMEOUT)
        subscription.update()
        before, asked = wire.received, len(wire.asked)
        for step in range(2, 8):  # more than the server remembers changes of
            endpoint.publish(weights(1), step=step).result(TIMEOUT)
            same = subscription.update(at_least=step)
            assert same.step == subscription.step == step
            assert same.report.bytes == 0 and same.state is into and has(into, 1)
        paths = {line.split()[1] for line in wire.asked[asked:]}
        assert not [one for one in paths if not one.startswith(b"/steps.json")]
        assert wire.received - before < 6 * 1500
        few = weights(1)
        few["model"]["half"][3, 5] += 1
        endpoint.publish(few, step=8).result(TIMEOUT)
        got = subscription.update(at_least=8)
        assert got.step == 8 and torch.equal(into["model"]["half"], few["model"]["half"])
        if not same_host:  # the element that changed, and not the state
            assert sum(got.report.sources.values()) < 1000


def test_an_update_waits_for_a_step_and_says_so_in_vain() -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        into = blank()
        subscription = tr.subscribe(endpoint.url, into=into, same_host=False, timeout=TIMEOUT)
        subscription.update()
        with pytest.raises(tr.errors.TransferTimeoutError, match=r"from 2 on .* newest is 1"):
            subscription.update(at_least=2, timeout=0.6)
        assert subscription.step == 1 and has(into, 1)
        late = threading.Timer(0.3, publish, (endpoint, 4))
        late.start()
        assert subscription.update(at_least=2).step == 4
        assert has(into, 4)
        late.join()


def test_a_subscription_waits_for_a_publisher() -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        address = endpoint.url.removeprefix("http://")
    begun: list[Any] = []

    def serve() -> None:
        begun.append(tr.serve(weights(3), step=3, address=address, timeout=TIMEOUT))

    late = threading.Timer(0.5, serve)
    late.start()
    into = blank()
    subscription = tr.subscribe(f"http://{address}", into=into, timeout=TIMEOUT)
    late.join()
    with begun[0]:
        assert subscription.update().step == 3 and has(into, 3)
    with pytest.raises(tr.errors.RelayError, match=address):
        tr.subscribe(f"http://{address}", into=into, timeout=0.5)


def test_what_does_not_fit_is_refused_at_once() -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wrong = blank()
        wrong["model"]["half"] = torch.zeros(33, 18, dtype=torch.bfloat16)
        with pytest.raises(tr.errors.MismatchError, match="half"):
            tr.subscribe(endpoint.url, into=wrong, timeout=TIMEOUT)
        extra = blank() | {"more": torch.zeros(2)}
        with pytest.raises(tr.errors.MismatchError, match="more"):
            tr.subscribe(endpoint.url, into=extra, timeout=TIMEOUT)
        some = tr.subscribe(endpoint.url, into=extra, strict=False, timeout=TIMEOUT)
        assert some.update().report.missing_keys == ("['more']",)
        with pytest.raises(tr.errors.UsageError, match="into="):
            tr.subscribe(endpoint.url, into=None)
        with pytest.raises(tr.errors.UsageError, match="publisher"):
            tr.subscribe(42, into=extra)  # type: ignore[arg-type]
        some.close()
        with pytest.raises(tr.errors.UsageError, match="closed"):
            some.update()


def test_a_layout_that_changes_is_planned_again_and_checked() -> None:
    with tr.serve({"a": torch.arange(6.0)}, step=1, timeout=TIMEOUT) as endpoint:
        into = {"a": torch.zeros(6)}
        subscription = tr.subscribe(endpoint.url, into=into, same_host=False, timeout=TIMEOUT)
        subscription.update()
        more = {"b": torch.zeros(1000), "a": torch.arange(6.0) + 2}
        endpoint.publish(more, step=2).result(TIMEOUT)
        with pytest.raises(tr.errors.MismatchError, match="b"):
            subscription.update()
        assert torch.equal(into["a"], torch.arange(6.0))
        endpoint.publish({"a": torch.arange(6.0) + 3}, step=3).result(TIMEOUT)
        assert subscription.update().step == 3
        assert torch.equal(into["a"], torch.arange(6.0) + 3)


def test_a_part_of_a_state_is_followed(wires: Callable[[str], Wire]) -> None:
    state = {"model": {"a": torch.arange(6.0), "b": torch.ones(1 << 20)}, "optimizer": [1, 2]}
    with tr.serve(state, step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        into = {"a": torch.zeros(6)}
        subscription = tr.subscribe(
            wire.url, into=into, key="model", include="a", same_host=False, timeout=TIMEOUT
        )
        subscription.update()
        assert torch.equal(into["a"], torch.arange(6.0))
        assert wire.received < 20_000  # the other tensor has 4 MiB


def test_a_token_is_needed() -> None:
    access = tr.Access(token="a-token-that-readers-send")
    with tr.serve(weights(1), step=1, access=access, timeout=TIMEOUT) as endpoint:
        with pytest.raises(tr.errors.EndpointError, match="token"):
            tr.subscribe(endpoint.url, into=blank(), same_host=False, timeout=5)
        into = blank()
        subscription = tr.subscribe(
            endpoint.url, into=into, access=access, same_host=False, timeout=TIMEOUT
        )
        subscription.update()
        assert has(into, 1)
