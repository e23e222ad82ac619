"""A subscription reads the bytes of the record: a server that digests other bytes is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torchrelay as tr
from tests.weights.liars import lying
from torchrelay.parts.runs import PartBox, runs_of
from torchrelay.weights import MappedDestination, ParameterRule, SourcePart, WeightMapping
from torchrelay.weights.record_chunks import RecordChunks, VolumeLayout, completing_runs

TIMEOUT = 30
ELEMENTS = 1_500_000  # three part chunks


def weights(version: int) -> dict[str, Any]:
    return {"w": torch.arange(float(ELEMENTS)) + version, "version": version}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(ELEMENTS), "version": -1}


def is_of(state: dict[str, Any], version: int) -> bool:
    return state["version"] == version and torch.equal(state["w"], weights(version)["w"])


def flipped(number: int, data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def followed(urls: Any, into: object) -> Any:
    return tr.subscribe(urls, into=into, same_host=False, timeout=TIMEOUT)


def test_one_server_that_digests_other_bytes_is_refused() -> None:
    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        with lying(endpoint.url, flipped) as url:
            into = blank()
            subscription = followed(url, into)
            with pytest.raises(tr.errors.PeerLostError, match=r"other bytes of model\.safetensors"):
                subscription.update()
            assert into["version"] == -1 and not into["w"].any()


@pytest.mark.parametrize("first", [0, 1])
def test_a_liar_next_to_an_honest_server_is_dropped(first: int) -> None:
    with (
        tr.serve(weights(1), step=1, timeout=TIMEOUT) as one,
        tr.serve(weights(1), step=1, timeout=TIMEOUT) as other,
        lying(one.url, flipped) as url,
    ):
        into = blank()
        got = followed([url, other.url][:: -1 if first else 1], into).update()
        assert is_of(into, 1) and got.report.verified
        assert set(got.report.failed) <= {url} and (first or set(got.report.failed) == {url})


def test_a_lie_about_an_update_is_found() -> None:
    lies: list[int] = []

    def lie(number: int, data: bytes) -> bytes:
        return flipped(number, data) if lies else data

    with tr.serve(weights(1), step=1, timeout=TIMEOUT) as endpoint:
        with lying(endpoint.url, lie) as url:
            into = blank()
            subscription = followed(url, into)
            assert subscription.update().report.verified and is_of(into, 1)
            endpoint.publish(weights(2), step=2).result(TIMEOUT)
            lies.append(1)
            with pytest.raises(tr.errors.PeerLostError, match="other bytes"):
                subscription.update()
            assert is_of(into, 1)
            lies.clear()
            assert subscription.update().step == 2 and is_of(into, 2)


MAPPING = WeightMapping((ParameterRule("w", (SourcePart("w"),), split=1),))


def columns(version: int) -> dict[str, Any]:
    return {"w": torch.arange(512.0 * 512).reshape(512, 512) + version}


def half(into: dict[str, Any]) -> MappedDestination:
    return MappedDestination(into, MAPPING, shard=(1, 2))


def test_columns_from_one_server_do_not_count_as_verified() -> None:
    with tr.serve(columns(1), step=1, timeout=TIMEOUT) as endpoint:
        into = {"w": torch.zeros(512, 256)}
        report = followed(endpoint.url, half(into)).update().report
        assert torch.equal(into["w"], columns(1)["w"][:, 256:]) and not report.verified
        assert report.bytes == into["w"].nbytes
        assert sum(report.sources.values()) < 1.02 * into["w"].nbytes + 1000


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_servers_that_differ_on_columns_the_record_decides(first: int) -> None:
    with (
        tr.serve(columns(1), step=1, timeout=TIMEOUT) as one,
        tr.serve(columns(1), step=1, timeout=TIMEOUT) as other,
        lying(one.url, flipped) as url,
    ):
        into = {"w": torch.zeros(512, 256)}
        report = followed([url, other.url][:: -1 if first else 1], half(into)).update().report
        assert torch.equal(into["w"], columns(1)["w"][:, 256:]) and report.verified
        if not first:
            assert set(report.failed) == {url}


def test_a_second_honest_server_confirms_columns_by_digests_alone() -> None:
    with (
        tr.serve(columns(1), step=1, timeout=TIMEOUT) as one,
        tr.serve(columns(1), step=1, timeout=TIMEOUT) as other,
    ):
        into = {"w": torch.zeros(512, 256)}
        report = followed([one.url, other.url], half(into)).update().report
        assert report.verified and not report.failed
        assert sum(report.sources.values()) < 1.02 * into["w"].nbytes + 1000


def test_whole_chunks_are_those_of_a_plain_bitmap() -> None:
    """Random boxes against a bitmap of the volume."""
    for seed in range(200):
        print("seed", seed)
        draw = np.random.default_rng(seed)
        layout = VolumeLayout(int(draw.integers(200, 3000)), int(draw.choice([16, 64, 300])), 0)
        layout = layout._replace(head=int(draw.integers(0, 100)))
        boxes: list[PartBox] = []
        bits = np.zeros(layout.nbytes, bool)
        for _ in range(int(draw.integers(1, 6))):
            rows, width = int(draw.integers(1, 12)), int(draw.integers(1, 40))
            if rows * width > layout.nbytes - layout.head:
                continue
            start = int(draw.integers(layout.head, layout.nbytes - rows * width + 1))
            low, high = sorted(draw.integers(0, width + 1, 2).tolist())
            if low == high:
                continue
            boxes.append((start, 1, (rows, width), (0, low), (rows, high - low)))
            bits[start : start + rows * width].reshape(rows, width)[:, low:high] = True
        if not boxes:
            continue
        wanted = runs_of(boxes, layout.nbytes)
        runs = completing_runs(wanted, boxes, layout)
        read = np.zeros(layout.nbytes, bool)
        for run in runs.packed_between(0, runs.total):
            run.of_volume(read)[...] = True
        assert read[bits].all()
        extra = int(read[layout.head :].sum() - bits[layout.head :].sum())
        if wanted.total == int(bits.sum()):  # boxes do not overlap each other
            assert extra <= wanted.total // 64
        chunks = RecordChunks(runs, layout)
        data = draw.integers(0, 256, layout.nbytes).astype(np.uint8)
        packed = np.empty(runs.total, np.uint8)
        runs.pack(data, 0, runs.total, packed)
        touched = 0
        for chunk in range(-(-layout.nbytes // layout.chunk_bytes)):
            start, stop = layout.span(chunk)
            assert (chunk in chunks.whole) == bool(read[start:stop].all())
            touched += bool(read[start:stop].any())
            if chunk in chunks.whole:
                content = chunks.content(chunk, packed)
                assert content is not None and np.array_equal(content, data[start:stop])
            elif read[start:stop].any():
                assert chunk in chunks.partial
        assert touched <= len(chunks.whole) + len(chunks.partial)
