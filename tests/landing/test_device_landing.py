"""A landing in device memory, all at once after everything has arrived.

There is no GPU here: plain tensors of the host are taken for tensors of a device. What is held
where, and what goes where at the commit, is the code that runs with a GPU too.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.describing.plain import PlainTensors
from torchrelay.describing.snapshot import Snapshot, capture
from torchrelay.geometry.runs import Moves, copy_one_by_one, moves
from torchrelay.landing import fitting, image_memory
from torchrelay.landing.commit.landing import Landing
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.workspace import Workspace

HOST = torch.device("cpu")


class ByAddress(Workspace):
    """What a pool with kernels does."""

    def __init__(self, able: bool = True) -> None:
        self.able = able
        self.copied = 0

    def copy_by_address(self, moves: Moves, device: torch.device) -> bool:
        if self.able:
            copy_one_by_one(moves)
            self.copied += len(moves.nbytes)
        return self.able


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is looked at counts as one on a device."""
    monkeypatch.setattr(PlainTensors, "gpus", property(lambda self: np.zeros(len(self), int)))
    monkeypatch.setattr(fitting, "device_number", lambda device: 0)
    monkeypatch.setattr(image_memory, "device_of", lambda number: HOST)


def made(seed: int, count: int = 50) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)

    def bits(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(-99, 99, shape, generator=draw).to(dtype)

    base = bits(40)
    return {
        "tiny": [bits(1 + n % 7, dtype=torch.uint8) for n in range(count)],
        "large": bits(500_000),
        "views": [base[:10], base[10:25], base[30:]],
        "others": {"half": bits(33, dtype=torch.float16), "scalar": bits(1)[0]},
        "step": seed,
    }


def flat(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for value in state.values() for leaf in flat(value)]
    if isinstance(state, list):
        return [leaf for value in state for leaf in flat(value)]
    return [state]


def same(one: Any, other: Any) -> bool:
    pairs = zip(flat(one), flat(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def sent(seed: int) -> tuple[Snapshot, dict[str, Any]]:
    state = made(seed)
    return capture(state, step=1, chunk_bytes=1 << 16), state


def write_all(snapshot: Snapshot, landing: Landing) -> None:
    """Bring all chunks to a landing."""
    for chunk, size in enumerate(landing.chunks.sizes):
        data = torch.empty(size, dtype=torch.uint8)
        snapshot.read(chunk, data)
        landing.target().write(chunk, data)


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("by", ["places", "chunks"])
def test_nothing_is_written_before_the_commit_and_everything_by_it(
    able: bool, by: str, request: pytest.FixtureRequest
) -> None:
    snapshot, state = sent(1)
    request.getfixturevalue("on_device")
    into, means = made(2), ByAddress(able)
    landing = land(snapshot.record, into, workspace=means)
    places = landing.target().stream
    if by == "places":
        for there in (places.device, places.host):
            copy_one_by_one(moves(snapshot.stream.host, there))
    else:
        write_all(snapshot, landing)
    assert landing.target().on_device and same(into, made(2))
    tensors = {id(leaf) for leaf in flat(into) if isinstance(leaf, torch.Tensor)}
    landing.commit()
    assert same(into, state)
    assert tensors == {id(leaf) for leaf in flat(into) if isinstance(leaf, torch.Tensor)}
    assert (means.copied > 50) is able


def test_every_byte_has_a_place_of_its_own_that_is_not_the_callers(on_device: None) -> None:
    into = made(2)
    snapshot, _ = sent(1)
    places = land(snapshot.record, into, workspace=ByAddress()).target().stream
    mine = [(leaf.data_ptr(), leaf.nbytes) for leaf in flat(into) if isinstance(leaf, torch.Tensor)]
    rows = sorted(
        (int(low), int(low) + int(stop - start))
        for runs in (places.device, places.host)
        for low, start, stop in zip(runs.addresses, runs.starts, runs.stops, strict=True)
    )
    assert all(high <= low for (_, high), (low, _) in pairwise(rows))
    for address, nbytes in mine:
        assert all(address + nbytes <= low or high <= address for low, high in rows)


def test_a_strided_tensor_beside_plain_ones_lands_too(
    request: pytest.FixtureRequest,
) -> None:
    state = {"plain": torch.arange(100), "strided": torch.arange(600).view(20, 30)[::2]}
    snapshot = capture(state, step=1)
    request.getfixturevalue("on_device")
    into = {"plain": torch.zeros(100, dtype=torch.int64)}
    into["strided"] = torch.zeros(20, 60, dtype=torch.int64)[::2, ::2]
    landing = land(snapshot.record, into, workspace=ByAddress())
    write_all(snapshot, landing)
    landing.commit()
    assert same(into, state)


@pytest.mark.parametrize("atomic", [True, False])
def test_views_of_one_image_may_go_to_plain_and_to_strided_tensors(
    atomic: bool, request: pytest.FixtureRequest
) -> None:
    base = torch.arange(12)
    state = {"plain": base[:8], "strided": base[4:]}
    snapshot = capture(state, step=1)
    request.getfixturevalue("on_device")
    into = {"plain": torch.zeros(8, dtype=torch.int64)}
    into["strided"] = torch.zeros(16, dtype=torch.int64)[::2]
    landing = land(snapshot.record, into, LandingOptions(atomic=atomic), ByAddress())
    # Both tensors take bytes of one image, which is held for them.
    assert not landing.live
    data = torch.empty(landing.chunks.sizes[0], dtype=torch.uint8)
    snapshot.read(0, data)
    landing.target().write(0, data)
    landing.commit()
    assert same(into, state)


def test_device_memory_takes_the_bytes_of_tensors_and_no_padding(on_device: None) -> None:
    snapshot, _ = sent(1)
    places = land(snapshot.record, made(2), workspace=ByAddress()).target().stream
    # What a sender exports has no padding: a chunk is copied on the device if both are the same.
    exported = snapshot.stream.device
    assert len(exported.starts)
    matched = moves(exported, places.device)
    assert int(matched.nbytes.sum()) == int((places.device.stops - places.device.starts).sum())


@pytest.mark.parametrize("atomic", [True, False])
def test_tied_tensors_are_held_on_their_device(
    atomic: bool, request: pytest.FixtureRequest
) -> None:
    one = torch.arange(2000)
    states = [{"x": one, "y": one, "part": one[7:1000]}, {"x": one, "y": one.view(2000)}]
    snapshots = [capture(state, step=1) for state in states]
    request.getfixturevalue("on_device")
    other, apart = torch.zeros_like(one), torch.zeros_like(one)
    intos = [
        {"x": other, "y": other, "part": other[7:1000]},
        {"x": torch.zeros_like(one), "y": apart},
    ]
    for snapshot, into, state in zip(snapshots, intos, states, strict=True):
        landing = land(snapshot.record, into, LandingOptions(atomic=atomic), ByAddress())
        assert landing.target().on_device and not len(landing.target().stream.host.starts)
        write_all(snapshot, landing)
        landing.commit()
        assert same(into, state)
