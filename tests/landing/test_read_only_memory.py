"""A destination in memory that can only be read is refused by path: a write ends the process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torchrelay as tr
from tests.support.ranks import RankPool
from tests.support.trips import trip
from torchrelay import dropin
from torchrelay.dcp import Reader, Writer
from torchrelay.errors import MismatchError, PeerRefusedError
from torchrelay.memory.writable import first_read_only
from torchrelay.weights.mapping import ParameterRule, SourcePart, WeightMapping
from torchrelay.weights.mapping.destination import MappedDestination

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
COUNT = 100_000
REFUSED = "cannot be written: its memory is mapped for reading"


def mapped(folder: Path, mode: Any) -> torch.Tensor:
    """A tensor over a file that is mapped."""
    file = folder / "values"
    file.write_bytes(bytes(4 * COUNT))
    return torch.from_numpy(np.memmap(file, np.float32, mode))


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": [torch.full((COUNT,), value), torch.ones(3)], "n": 7}


def destinations(folder: Path) -> dict[str, dict[str, Any]]:
    whole = mapped(folder, "r")
    return {
        "row": {"model": [whole, torch.zeros(3)], "n": 0},
        "gapped": {"model": [torch.zeros(COUNT), whole[::1000][:3]], "n": 0},
        "view": {"model": [torch.zeros(COUNT), whole[-3:]], "n": 0},
    }


def refused(call: Callable[[Any], object], folder: Path) -> None:
    for name, into in destinations(folder).items():
        with pytest.raises(MismatchError, match=REFUSED) as caught:
            call(into)
        assert caught.value.path == f"['model'][{0 if name == 'row' else 1}]", name
        assert not any(tensor.any() for tensor in into["model"]) and into["n"] == 0


@pytest.mark.parametrize("atomic", [True, False])
def test_by_load(tmp_path: Path, atomic: bool) -> None:
    with tr.Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(1, state())
        refused(lambda into: checkpointer.load(into, atomic=atomic), tmp_path)
        into = {"model": [mapped(tmp_path, "c"), torch.zeros(3)], "n": 0}  # private: a copy
        checkpointer.load(into, atomic=atomic)
        assert bool((into["model"][0] == 1).all())


@pytest.mark.parametrize("same_host", [True, False])
def test_by_pull_and_subscription(tmp_path: Path, same_host: bool) -> None:
    with tr.serve(state(), step=1, timeout=60) as endpoint:
        refused(
            lambda into: tr.pull(
                endpoint.url,
                into=into,
                timeout=60,
                options=tr.options.PullOptions(same_host=same_host),
            ),
            tmp_path,
        )
        if not same_host:
            return

        def update(into: Any) -> None:
            with tr.subscribe(endpoint.url, into=into) as subscription:
                subscription.update(timeout=60)

        refused(update, tmp_path)


def test_by_torchs_own_load(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"w": torch.ones(COUNT)}, storage_writer=Writer(tmp_path / "step-1"), no_dist=True)
        into = {"w": mapped(tmp_path, "r")}
        with pytest.raises(CheckpointException) as caught:
            dcp.load(into, storage_reader=Reader(tmp_path), no_dist=True)
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], MismatchError) and REFUSED in str(failure[0])
    assert not into["w"].any()


def by_torchs_protocol(rank: int, group: Any, folder: str) -> None:
    into = {"w": mapped(Path(folder), "r")} if rank else {}
    limit, device = timedelta(seconds=30), torch.device("cpu")
    transport = dropin.PGTransport(group, limit, device, lambda: into, protocol="torch")
    if rank == 0:
        transport.send_checkpoint([1], {"w": torch.ones(COUNT)})
        return
    with pytest.raises(MismatchError, match=REFUSED):
        transport.recv_checkpoint(0)


def test_by_torchs_protocol(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(by_torchs_protocol, str(tmp_path))


def by_relay(rank: int, group: Any, folder: str, route: str) -> None:
    with tr.Relay(group, timeout=30, route=route) as relay:
        for step, name in enumerate(("row", "gapped", "view")):
            if rank == 0:
                with pytest.raises(PeerRefusedError):
                    relay.send(state(), to=[1], step=step)
                continue
            into = destinations(Path(folder))[name]
            with pytest.raises(MismatchError, match=REFUSED):
                relay.recv(0, into=into, step=step)
            assert into["n"] == 0


@pytest.mark.parametrize("route", ["memory", "tcp"])
def test_by_relay(pool2: RankPool, tmp_path: Path, route: str) -> None:
    pool2.run(by_relay, str(tmp_path), route)


def test_ranges_are_compared_with_all_that_is_mapped(tmp_path: Path) -> None:
    fixed, fresh = mapped(tmp_path, "r"), torch.zeros(COUNT)

    def found(*ranges: tuple[int, int]) -> int:
        addresses, sizes = np.array(ranges, np.uint64).reshape(-1, 2).T
        return first_read_only(addresses, sizes)

    inside = fixed.data_ptr() + 4096 * 3
    assert found() == -1
    assert found((fresh.data_ptr(), fresh.nbytes)) == -1
    assert found((fresh.data_ptr(), fresh.nbytes), (inside, 1), (inside, 5)) == 1
    assert found((inside, 0)) == -1
    assert found((inside - 1, 4 * COUNT)) == 0


def test_by_a_mapping(tmp_path: Path) -> None:
    mapping = WeightMapping((ParameterRule("ab", (SourcePart("a"), SourcePart("b"))),))
    state = {"a": torch.ones(COUNT // 2), "b": torch.ones(COUNT // 2)}
    into = {"ab": mapped(tmp_path, "r")}
    with pytest.raises(MismatchError, match=REFUSED):
        trip(state, into=MappedDestination(into, mapping))
    assert not into["ab"].any()
