"""A transfer passes through the modules that docs/design.md lists, in that order, and no others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.ranks import RankPool

SOURCES = Path(tr.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design.md"
SIDES = ("Send", "Receive")
MOST = 16  # stops on a side


def entered(call: Callable[[], object]) -> list[str]:
    """The modules of the library that a call enters from another one, in order."""
    found: list[str] = []
    inside = [""]

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            file = Path(frame.f_code.co_filename)
            ours = file.is_relative_to(SOURCES)
            module = file.relative_to(SOURCES).as_posix() if ours else inside[-1]
            if module != inside[-1]:
                found.append(module)
            inside.append(module)
        elif event == "return" and len(inside) > 1:
            inside.pop()

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def transfer(rank: int, group: Any) -> list[str]:
    """The second transfer of a relay: what is imported or started once is there."""
    state = {"model": torch.nn.Linear(300, 300), "w": torch.ones(1000), "step": 3}
    walk: list[str] = []
    with tr.Relay(group) as relay:
        for _ in range(2):
            if rank == 0:
                walk = entered(lambda: relay.send(state, to=1))
            else:
                walk = entered(lambda: relay.recv(0, into=state))
    return walk


@pytest.fixture(scope="module")
def walks(pool2: RankPool) -> list[list[str]]:
    walks: list[list[str]] = pool2.run(transfer, timeout=60)
    return walks


@pytest.fixture(scope="module")
def section() -> str:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("### The modules on the way")
    return rest.partition("\n## ")[0]


def listed(section: str, side: str) -> list[str]:
    rows = section.partition(f"\n{side}\n")[2].partition("\n\n")[0].splitlines()
    assert [int(row.split()[0]) for row in rows] == list(range(1, len(rows) + 1))
    return [row.split()[1] for row in rows]


def vocabulary(section: str) -> tuple[str, ...]:
    rows = section.partition("\nVocabulary")[2].partition("\n")[2]
    return tuple(rows.partition("```")[0].split())


@pytest.mark.parametrize("rank", [0, 1], ids=SIDES)
def test_the_stops_are_those_that_are_listed(
    walks: list[list[str]], section: str, rank: int
) -> None:
    stops = listed(section, SIDES[rank])
    # The codec of `record/` is a stop; the rest of it is vocabulary.
    words = vocabulary(section)
    assert not set(stops) & set(words)
    traced = [
        one for one in dict.fromkeys(walks[rank]) if one in stops or not one.startswith(words)
    ]
    assert traced == stops
    assert len(stops) <= MOST


@pytest.mark.parametrize("rank", [0, 1], ids=SIDES)
def test_relay_is_entered_once(walks: list[list[str]], rank: int) -> None:
    assert walks[rank].count("relay.py") == 1 and walks[rank][0] == "relay.py"


def test_the_files_that_are_named_exist(section: str) -> None:
    for name in (*listed(section, "Send"), *listed(section, "Receive"), *vocabulary(section)):
        assert (SOURCES / name).exists(), name
