"""Ranks that are killed in the middle of an update: a worker's, and a publisher's."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchrelay as tr
from tests.support.ranks import Ranks, reached, tell
from tests.weights.conftest import Wire
from torchrelay.loading import rank_load
from torchrelay.weights import fetch

TIMEOUT = 30
SHAPE = 512, 64


def whole(version: int) -> torch.Tensor:
    return torch.arange(512.0 * 64).reshape(SHAPE) + version


def sharded(version: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {"w": distribute_tensor(whole(version), mesh, [Shard(dim)]), "version": version}


def version_of(state: dict[str, Any], rank: int | None = None) -> int:
    """The version of a state, whole or of a rank's columns; -99 for a mixture."""
    version: int = state["version"]
    found, wanted = state["w"], whole(version)
    if rank is not None:
        found, wanted = found.to_local(), wanted.chunk(2, 1)[rank]
    return version if torch.equal(found, wanted) else -99


def follow(rank: int, group: Any, url: str, phase: str) -> tuple[str, int]:
    """Follow a publisher; rank 1 stops in the second update. The error, and what `into` has."""
    into = sharded(-1, 1)
    subscription = tr.subscribe(url, into=into, same_host=False, timeout=TIMEOUT)
    subscription.update()
    reached("followed", hold=True)
    if rank == 1:

        def stop(*_: Any, **__: Any) -> None:
            reached(phase)
            threading.Event().wait(TIMEOUT)

        if phase == "fetch":
            fetch._receive = stop
        else:
            rank_load.RankLoad.end = stop  # type: ignore[method-assign]
    try:
        subscription.update(at_least=2, timeout=2.0)
    except tr.errors.RelayError as fault:
        return str(fault), version_of(into, rank)
    return "", version_of(into, rank)


@pytest.mark.parametrize("phase", ["fetch", "land"])
def test_a_worker_rank_that_is_killed(phase: str) -> None:
    state = {"w": whole(1), "version": 1}
    with tr.serve(state, step=1, no_dist=True, timeout=TIMEOUT) as endpoint:
        with Ranks(follow, 2, endpoint.url, phase) as ranks:
            for rank in (0, 1):
                ranks.wait_reached(rank, "followed")
            endpoint.publish({"w": whole(2), "version": 2}, step=2).result(TIMEOUT)
            for rank in (0, 1):
                ranks.release(rank)
            ranks.wait_reached(1, phase)
            ranks.kill(1)
            ((why, version),) = ranks.results(TIMEOUT, ranks=[0])
        assert why and version == 1
        # The publisher goes on, and others follow it.
        assert endpoint.publish({"w": whole(3), "version": 3}, step=3).skipped is None
        into = {"w": whole(0), "version": 0}
        others = tr.subscribe(endpoint.url, into=into, no_dist=True, timeout=TIMEOUT)
        assert others.update(at_least=3).step == version_of(into) == 3


def publish(rank: int, group: Any) -> None:
    with tr.serve(sharded(1, 0), step=1, timeout=TIMEOUT) as endpoint:
        tell(endpoint.url)
        reached("shown", hold=True)
        endpoint.publish(sharded(2, 0), step=2).result(TIMEOUT)
        reached("published", hold=True)


def wait_until_refused(url: str) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        try:
            socket.create_connection((host, int(port)), timeout=TIMEOUT).close()
        except ConnectionError:
            return
    raise TimeoutError(url)


def test_a_publisher_rank_that_is_killed(wires: Callable[[str], Wire]) -> None:
    with Ranks(publish, 2) as ranks:
        for rank in (0, 1):
            ranks.wait_reached(rank, "shown")
        wire = wires(ranks.told(0)[0])
        into = {"w": whole(0), "version": 0}
        subscription = tr.subscribe(
            wire.url, into=into, no_dist=True, same_host=False, timeout=TIMEOUT
        )
        subscription.update()
        assert version_of(into) == 1
        for rank in (0, 1):
            ranks.release(rank)
        for rank in (0, 1):
            ranks.wait_reached(rank, "published")
        lost: list[str] = []

        def meddle(asked: bytes, at: int, data: bytes) -> bytes:
            found = re.search(rb'"(http://[^"]+)"', data)
            if asked.startswith(b"GET /places.json") and found and not lost:
                ranks.kill(1)
                lost.append(found[1].decode())
                wait_until_refused(lost[0])
            return data

        wire.meddle = meddle
        with pytest.raises(tr.errors.RelayError) as caught:
            subscription.update(at_least=2, timeout=3.0)
        assert lost and lost[0] in str(caught.value)
        assert version_of(into) == 1 and subscription.step is None
