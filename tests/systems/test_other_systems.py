"""macOS and Windows, imitated: what they lack is removed before torchrelay is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

import torchrelay as tr
from tests.support.systems_state import state_of

READS = {
    "import",
    "load",
    "recover",
    "ls",
    "inspect",
    "inspect --stats",
    "inspect FILE.safetensors",
    "verify",
    "diff",
}
WRITES = {"save", "convert", "pull"}
# Windows has more calls that happen to work; these are promised.
WORKS = {"macos": READS | WRITES, "windows": READS}
REFUSED = {
    "Relay",
    "serve",
    "Keeper",
    "subscribe",
    "save_async",
    "pull(reshare=True)",
    "PGTransport",
    "torchrelay demo",
    "torchrelay check",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("systems")
    with tr.Checkpointer(folder / "written") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
    save_file({"weight": state_of(1)["model"]["weight"]}, folder / "plain.safetensors")
    with tr.serve(state_of(2), step=2) as endpoint:
        yield folder, endpoint.url


@pytest.mark.parametrize("system", WORKS)
def test_steps_are_read_there_and_the_rest_says_that_it_needs_linux(
    system: str, written: tuple[Path, str], tmp_path: Path
) -> None:
    folder, url = written
    job = [sys.executable, "-m", "tests.support.systems_job", system, str(folder), url]
    ran = subprocess.run(job, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.keys() == READS | WRITES | REFUSED
    assert {name: found[name] for name in WORKS[system]} == dict.fromkeys(WORKS[system], "works")
    for name in REFUSED:
        assert found[name].startswith("UnsupportedSystemError: "), (name, found[name])
        assert "needs Linux" in found[name]
