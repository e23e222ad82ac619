"""This torch and another one exchange states and checkpoints, each in an interpreter of its own.

`TORCHRELAY_OTHER_PYTHON` names an interpreter that has another torch, for example that of an
environment which `tools/versions.py` made. Where it has this library's dependencies, too, ours
speaks with ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import _mesh_layout

from tests.support import torch_states as states
from tests.support.torch_peers import Peers
from torchrelay.dropin.conversion import convert
from torchrelay.dropin.stock_dcp import read_stock

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(400),  # up to four interpreters start in a test
]
OTHER = os.environ.get("TORCHRELAY_OTHER_PYTHON", "")
NO_OTHER = "no other torch: TORCHRELAY_OTHER_PYTHON names no interpreter that has one"


PYTHONS = {"here": sys.executable, "other": OTHER}


class Pairs:
    """Groups of two ranks, each of this torch ("here") or of the other one."""

    def __init__(self) -> None:
        self._peers: dict[tuple[str, str], Peers] = {}

    def of(self, *ranks: str) -> Peers:
        first, second = ranks
        found = self._peers.get((first, second))
        if found is not None and not found.alive:
            found.close()
            found = None
        if found is None:
            found = self._peers[first, second] = Peers([PYTHONS[first], PYTHONS[second]])
        return found

    def transfer(self, sender: str, receiver: str, content: str, in_place: bool) -> list[str]:
        """What differs in what arrived. An end is "here" or "other" and what it calls."""
        (one, sends), (two, receives) = sender.split("-"), receiver.split("-")
        found: list[str] = self.of(one, two).call(
            {"call": "send", "how": sends, "content": content},
            {"call": "recv", "how": receives, "content": content, "in_place": in_place},
        )[1]
        return found

    def close(self) -> None:
        for one in self._peers.values():
            one.close()


@pytest.fixture(scope="module")
def pairs() -> Iterator[Pairs]:
    if not OTHER:
        pytest.skip(NO_OTHER)
    made = Pairs()
    yield made
    made.close()


CONTENTS = [("plain", False), ("dense", True), ("distributed", False), ("copies", True)]


@pytest.mark.parametrize(("content", "in_place"), CONTENTS)
@pytest.mark.parametrize("receiver", ["here-ours", "here-relay"])
def test_we_receive_from_the_other_stock_torch(
    pairs: Pairs, receiver: str, content: str, in_place: bool
) -> None:
    assert pairs.transfer("other-stock", receiver, content, in_place) == []


@pytest.mark.parametrize(("content", "in_place"), CONTENTS)
def test_the_other_stock_torch_receives_from_us(pairs: Pairs, content: str, in_place: bool) -> None:
    if content in ("distributed", "copies") and layout_of(OTHER) != layout_of(sys.executable):
        pytest.skip("no such case: torch 2.11 has another class for the layout of a mesh")
    assert pairs.transfer("here-ours", "other-stock", content, in_place) == []


@pytest.mark.parametrize(("sender", "receiver"), [("here", "other"), ("other", "here")])
@pytest.mark.parametrize(("content", "in_place"), [("plain", False), ("plain", True)])
def test_ours_receives_from_ours(
    pairs: Pairs, sender: str, receiver: str, content: str, in_place: bool
) -> None:
    if not all(pairs.of(sender, receiver).both("has_ours")):
        pytest.skip("no other torch: that interpreter cannot import this library")
    assert pairs.transfer(f"{sender}-relay", f"{receiver}-relay", content, in_place) == []


def layout_of(python: str) -> bool:
    """Whether meshes are described as torch after 2.11 describes them."""
    if python == sys.executable:
        return hasattr(_mesh_layout, "_FlatLayout")
    program = "from torch.distributed import _mesh_layout as m; print(hasattr(m, '_FlatLayout'))"
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=100)
    return said.stdout.strip() == "True"


# Checkpoints: two ranks of one torch write them, and the other torch reads them -------------------


def test_a_directory_of_the_other_torch_is_read_here(pairs: Pairs, tmp_path: Path) -> None:
    pairs.of("other", "other").both("save", how="stock", path=str(tmp_path / "dcp"))
    assert states.differences(read_stock(tmp_path / "dcp"), states.as_dcp(states.whole())) == []


def test_the_other_torch_reads_a_directory_of_ours(pairs: Pairs, tmp_path: Path) -> None:
    steps, converted = tmp_path / "steps", tmp_path / "dcp"
    pairs.of("here", "here").both("save", how="writer", path=str(steps))
    convert(steps, converted, to="dcp")
    other = pairs.of("other", "other")
    assert other.both("load", how="stock", path=str(converted)) == [[], []]
    if all(other.both("has_ours")):
        assert other.both("load", how="writer", path=str(steps)) == [[], []]
