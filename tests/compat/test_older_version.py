"""An older wheel of this library and the tree exchange states, both ways.

`tests/compat` has the wheel. Where the formats are those of the tree, every exchange is exact.
Where one of them has changed since, the side that refuses the other names both versions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 150
VERSIONS = (
    "from torchrelay.transports.wire import handshake; from torchrelay.record import schema; "
    "print(handshake.VERSION, schema.VERSION[0])"
)
WAYS = [("older", "tree"), ("tree", "older")]


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each version is imported from."""
    (wheel,) = HERE.glob("torchrelay-*.whl")
    older = tmp_path_factory.mktemp("older")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", older, wheel], check=True, timeout=SECONDS)
    return {"older": older, "tree": ROOT / "src"}


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}


class Side:
    """A process of one version."""

    def __init__(self, home: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), str(home), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(home),
        )

    def url(self) -> str:
        assert self._process.stdout is not None
        return str(json.loads(self._process.stdout.readline())["url"])

    def answer(self) -> dict[str, Any]:
        out, errors = self._process.communicate("\n", timeout=SECONDS)
        assert self._process.returncode == 0, errors
        return dict(json.loads(out.splitlines()[-1]))


def formats(home: Path) -> list[str]:
    """The versions of the wire and of the record."""
    done = subprocess.run(
        [sys.executable, "-c", VERSIONS],
        env=environment(home),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=SECONDS,
    )
    return done.stdout.split()


@pytest.fixture(scope="module")
def same(homes: dict[str, Path]) -> Iterator[bool]:
    """Whether both speak the same wire and write the same records."""
    yield formats(homes["older"]) == formats(homes["tree"])


def check(answers: list[dict[str, Any]], same: bool) -> None:
    if same or all(answer.get("exact") for answer in answers):
        assert [answer.get("exact") for answer in answers] == [True] * len(answers), answers
        return
    named = [answer["error"] for answer in answers if "error" in answer]
    assert any(re.search(r"version .*\d.*\d", text) for text in named), answers


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_step_at_rest(
    homes: dict[str, Path], same: bool, tmp_path: Path, first: str, second: str
) -> None:
    written = Side(homes[first], "save", str(tmp_path / "run")).answer()
    check([written, Side(homes[second], "restore", str(tmp_path / "run")).answer()], same)


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_pull(homes: dict[str, Path], same: bool, first: str, second: str) -> None:
    server = Side(homes[first], "serve")
    pulled = Side(homes[second], "pull", server.url()).answer()
    check([server.answer(), pulled], same)


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_recovery_from_a_keeper(
    homes: dict[str, Path], same: bool, first: str, second: str
) -> None:
    job = f"compat-{first}-{os.getpid()}"
    staged = Side(homes[first], "stage", job).answer()
    check([staged, Side(homes[second], "recover", job).answer()], same)


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(("first", "second"), WAYS)
def test_a_live_state(
    homes: dict[str, Path], same: bool, tmp_path: Path, first: str, second: str
) -> None:
    meeting = str(tmp_path / "meeting")
    sides = [Side(homes[first], "move", "0", meeting), Side(homes[second], "move", "1", meeting)]
    check([side.answer() for side in sides], same)
