"""Replicas are healed over slow links: the right bits, and about one copy from the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forks import run_program
from tests.support.netns import Switch, Unavailable

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_three_are_healed_at_once(tmp_path: Path) -> None:
    try:
        Switch(2).close()
    except Unavailable as missing:
        pytest.skip(str(missing))
    out = tmp_path / "healing.json"
    words = ("--small", "--out", str(out))
    done = run_program("benchmarks.healing", *words, folder=ROOT, seconds=SECONDS)
    assert done.code == 0, done.output
    found = json.loads(out.read_text())
    assert found["exact"]
    stock, ours = found["rows"]
    assert stock["copies_sent"] > 2.9, "torch sends a copy to each"
    assert ours["copies_sent"] < 2.5, "replicas take some of it from each other"
    assert len(ours["one_seconds"]) == len(ours["three_seconds"]) == 1
