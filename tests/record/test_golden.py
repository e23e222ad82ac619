"""Steps that earlier versions wrote are read as they were, bit for bit.

Their files never change; `tests/support/make_golden.py` wrote them, and `tests/support/golden.py`
says what they hold.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay as tr
from tests.support import golden, meshes
from tests.support.states import assert_same, bits

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir())


@pytest.fixture(params=VERSIONS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the steps of one format version."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


def test_what_is_there() -> None:
    assert VERSIONS == ["format-4.0"]
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000
    for manifest in GOLDEN.rglob("manifest.json"):
        record = json.loads(manifest.read_text())["record"]
        assert manifest.parts[-3] == "format-{}.{}".format(*record["version"])


def test_by_one_process(root: Path) -> None:
    with tr.Checkpointer(root, timeout=30) as there:
        assert there.verify(golden.ONE) == golden.ONE
        assert_same(golden.state_of_one(), there.load(step=golden.ONE).state, at_rest=True)


def test_values_of_the_standard_library(root: Path) -> None:
    with tr.Checkpointer(root, timeout=30) as there:
        assert there.verify(golden.LIBRARY) == golden.LIBRARY
        got = there.load(step=golden.LIBRARY).state
    sent = golden.state_of_library()
    spaces = [vars(state["namespace"].pop("x")) for state in (sent, got)]
    assert_same(*spaces)
    assert_same(sent, got)
    assert [one.fold for one in got["times"][:3]] == [1, 1, 1]
    assert [repr(one) for one in got["times"]] == [repr(one) for one in sent["times"]]


def test_in_place(root: Path) -> None:
    into = {
        "model": {"weight": torch.zeros(4, 3), "layers.0.bias": nn.Parameter(torch.zeros(3))},
        "x": torch.zeros(5, dtype=torch.int64),
    }
    with tr.Checkpointer(root, timeout=30) as there:
        there.load(into=into, step=golden.ONE, include=["model.*", "x"])
    assert torch.equal(into["x"], torch.arange(5))
    assert torch.equal(into["model"]["weight"], golden.numbers(4, 3))
    assert torch.equal(into["model"]["layers.0.bias"], golden.numbers(3))


def test_by_two_ranks_in_one_process(root: Path) -> None:
    with tr.Checkpointer(root, timeout=30) as there:
        assert there.verify(golden.TWO) == golden.TWO
        got = there.load(step=golden.TWO).state
    assert_same(golden.wholes_of_two(), got.pop("model"))
    assert_same(golden.own_of_two(1)["stage 1"], got.pop("stage 1"))
    assert_same(golden.own_of_two(0), got)


def same_ranks(rank: int, group: Any, root: str) -> list[str]:
    with tr.Checkpointer(root, group=group, timeout=20) as there:
        got = there.load(step=golden.TWO).state
        assert_same(golden.wholes_of_two(), got.pop("model"))
        assert_same(golden.own_of_two(rank), got)
        into = golden.state_of_two(rank)
        for tensor in into["model"].values():
            for local in (
                [shard.tensor for shard in tensor.local_shards()]
                if hasattr(tensor, "local_shards")
                else [tensor.to_local().detach()]
            ):
                local.zero_()
        there.load(into=into, step=golden.TWO)
    expected = golden.state_of_two(rank)["model"]
    return [
        name
        for name, tensor in into["model"].items()
        if meshes.local_bits(tensor.detach() if name == "parameter" else tensor)
        != meshes.local_bits(expected[name])
    ]


def test_by_two_ranks_in_two(root: Path, pool2: Any) -> None:
    assert pool2.run(same_ranks, str(root)) == [[], []]


def four_ranks(rank: int, group: Any, root: str) -> list[str]:
    wholes = {name: value.detach() for name, value in golden.wholes_of_two().items()}
    problems = []
    with tr.Checkpointer(root, group=group, timeout=20) as there:
        for layout in ("rows", "grid", "other shards"):
            into = {
                name: meshes.spread(torch.zeros_like(value), layout)
                for name, value in wholes.items()
            }
            there.load(into={"model": into}, step=golden.TWO, include="model.*")
            problems += [
                f"{name} in {layout}"
                for name, value in wholes.items()
                if meshes.local_bits(into[name]) != meshes.local_bits(meshes.spread(value, layout))
            ]
        position = there.load(step=golden.TWO, include="position.*").state["position"]
        assert position == golden.own_of_two(rank if rank < 2 else 0)["position"]
    return problems


def test_by_two_ranks_in_four(root: Path, pool4: Any) -> None:
    assert pool4.run(four_ranks, str(root)) == [[], [], [], []]


def test_the_model_file_is_an_ordinary_one(root: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    found = load_file(root / f"step-{golden.ONE}" / "model.safetensors")
    assert bits(found["weight"]) == bits(golden.numbers(4, 3))
    assert set(found) == {"weight", "layers.0.bias"}
