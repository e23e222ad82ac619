"""Streams that are damaged or break off, and servers that are gone: old or new, never both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.weights.conftest import Wire

TIMEOUT = 30
ELEMENTS = 3_500_000  # seven part chunks
PARTS = b"POST /parts HTTP/1.1"
LATER = 3 << 20  # bytes into a stream: in its second chunk


def weights(version: int) -> dict[str, Any]:
    return {"w": torch.arange(float(ELEMENTS)) + version, "version": version}


def version_of(state: dict[str, Any]) -> int:
    """The version that a state is of; -99 for a mixture."""
    version: int = state["version"]
    return version if torch.equal(state["w"], weights(version)["w"]) else -99


def followed(urls: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    into = weights(-1)
    given = {"same_host": False, "timeout": TIMEOUT, **options}
    return tr.subscribe(urls, into=into, **given), into


def once(wire: Wire, act: Callable[[bytes], bytes | None]) -> list[int]:
    """Have `act` alter the bytes of one part stream, at one place; where that was."""
    done: list[int] = []

    def meddle(asked: bytes, at: int, data: bytes) -> bytes | None:
        if asked == PARTS and at > LATER and not done:
            done.append(at)
            return act(data)
        return data

    wire.meddle = meddle
    return done


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def test_damage_is_found_and_the_rest_asked_for_again(wires: Callable[[str], Wire]) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        subscription, into = followed(wire.url)
        where = once(wire, flipped)
        assert subscription.update().step == 1 and version_of(into) == 1
        assert len(where) == 1 and wire.asked.count(PARTS) == 2


def test_a_server_that_sends_wrong_bytes_is_named(wires: Callable[[str], Wire]) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        subscription, into = followed(wire.url)
        subscription.update()
        endpoint.publish(weights(2), step=2).result(TIMEOUT)
        wire.meddle = lambda asked, at, data: flipped(data) if asked == PARTS and at else data
        with pytest.raises(tr.errors.PeerLostError, match=wire.url):
            subscription.update()
        assert version_of(into) == 1 and subscription.step is None
        wire.meddle = lambda asked, at, data: data
        assert subscription.update().step == 2 and version_of(into) == 2


def test_a_stream_that_breaks_off_is_continued(wires: Callable[[str], Wire]) -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        wire = wires(endpoint.url)
        subscription, into = followed(wire.url)
        before = wire.received
        where = once(wire, lambda data: None)
        subscription.update()
        assert version_of(into) == 1
        # The chunk that broke off comes twice; the record and the list of steps are small.
        assert where and wire.received - before < 4 * ELEMENTS + (2 << 20) + 20_000


def test_another_server_takes_over(wires: Callable[[str], Wire]) -> None:
    with (
        tr.serve(weights(1), step=1, timeout=TIMEOUT) as one,
        tr.serve(weights(1), step=1, timeout=TIMEOUT) as other,
    ):
        wire, spare = wires(one.url), wires(other.url)
        subscription, into = followed([wire.url, spare.url])

        def lost(data: bytes) -> None:
            wire.close()

        where = once(wire, lost)
        report = subscription.update().report
        assert version_of(into) == 1 and where
        assert wire.url in report.failed and report.sources[spare.url] > ELEMENTS


def test_a_step_that_is_replaced_meanwhile_gives_way_to_the_newest(
    wires: Callable[[str], Wire],
) -> None:
    with tr.serve(
        weights(1), step=1, timeout=TIMEOUT, options=tr.options.ServeOptions(hold_seconds=0.2)
    ) as endpoint:
        wire = wires(endpoint.url)
        subscription, into = followed(wire.url)
        newest: list[int] = []

        def publish(data: bytes) -> bytes:
            """The reader stands still until its step is gone."""
            for step in range(2, 200):
                endpoint.publish(weights(step), step=step).result(TIMEOUT)
                shown = [one["step"] for one in endpoint.status()["steps"]]
                if 1 not in shown:
                    newest.append(shown[-1])
                    break
            return data

        where = once(wire, publish)
        got = subscription.update()
        assert where and newest and got.step == newest[0] == version_of(into)


def test_a_worker_that_stalls_delays_no_one(wires: Callable[[str], Wire]) -> None:
    with tr.serve(
        weights(1),
        step=1,
        timeout=TIMEOUT,
        options=tr.options.ServeOptions(stall_seconds=0.5, hold_seconds=5.0),
    ) as endpoint:
        wire = wires(endpoint.url)
        stuck, into = followed(wire.url)
        others, seen = followed(endpoint.url)
        stalled, release = threading.Event(), threading.Event()

        def hang(data: bytes) -> None:
            stalled.set()
            release.wait(TIMEOUT)

        once(wire, hang)
        failed: list[Exception] = []

        def update() -> None:
            try:
                stuck.update(timeout=TIMEOUT)
            except tr.errors.RelayError as fault:
                failed.append(fault)

        worker = threading.Thread(target=update)
        worker.start()
        assert stalled.wait(TIMEOUT)
        for version in (2, 3):
            while endpoint.publish(weights(version), step=version).skipped is not None:
                pass  # until the reader is dropped, which `stall` bounds
            assert others.update(at_least=version).step == version_of(seen) == version
        assert endpoint.status()["readers"] <= 1
        release.set()
        worker.join(TIMEOUT)
        assert not failed and version_of(into) == 3  # it took the newest instead
