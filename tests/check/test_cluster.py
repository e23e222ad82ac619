"""Four ranks on two hosts of their own: nothing is found where nothing is wrong, and each planted
problem is found and named, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import netns
from tests.support.netns import GIGABIT, Switch
from tests.support.s3 import S3

ROOT = Path(__file__).resolve().parents[2]
WORLD, PORT, FIREWALLED = 4, 29511, 45123
pytestmark = pytest.mark.timeout(240)


def switch(rate: int = 20 * GIGABIT) -> Switch:
    try:
        return Switch(2, rate)
    except netns.Unavailable as fault:
        pytest.skip(str(fault))


def check(net: Switch, folder: Path, plants: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Run the check: ranks 0 and 1 on host `a`, 2 and 3 on host `b`; the JSON of rank 0."""
    processes = []
    for rank in range(WORLD):
        host = rank // 2
        planted = {"namespace": net.door(host), "host": "ab"[host], **plants.get(rank, {})}
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_RANK": str(rank % 2),
            "MASTER_ADDR": net.address(0),
            "MASTER_PORT": str(PORT),
            "PLANTS": json.dumps(planted),
        }
        command = [sys.executable, "-m", "tests.support.check_rank", "--json"]
        command += ["--folder", str(folder)]
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=ROOT
        )
        processes.append(started)
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert outputs[0][0], outputs[0][1]
    found: dict[str, Any] = json.loads(outputs[0][0])
    assert processes[0].returncode == (0 if found["ok"] else 1)
    assert [process.returncode for process in processes[1:]] == [0] * 3, outputs
    return found


def wrong(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, str]]:
    """The rows that are not ok, by area and subject. How fast the disk of this machine is at the
    moment is not judged: other tests use it."""
    rows = {(row["area"], row["subject"]): row for row in found["rows"] if row["verdict"] != "ok"}
    if rows.get(("folder", "write speed"), {}).get("verdict") == "slow":
        del rows["folder", "write speed"]
    return rows


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong(tmp_path: Path) -> None:
    with switch() as net:
        found = check(net, tmp_path / "run", {})
    assert wrong(found) == {}
    assert found["ok"]
    areas = {row["area"] for row in found["rows"]}
    assert areas == {"machines", "connections", "routes", "folder", "recovery"}
    assert list((tmp_path / "run").iterdir()) == []


def test_each_planted_problem_is_found_and_nothing_else(tmp_path: Path) -> None:
    with switch(rate=GIGABIT // 5) as net:
        net.refuse(host=0, port=FIREWALLED)
        plants: dict[int, dict[str, Any]] = {
            0: {"no_links": True},
            1: {"no_ptrace": True},
            2: {"shm": 64 << 20, "late_lists": 3.0},
            3: {"shm": 64 << 20, "late_lists": 3.0, "port": FIREWALLED},
        }
        found = check(net, tmp_path / "run", plants)
    rows = wrong(found)
    assert set(rows) == {
        ("machines", "/dev/shm of b"),
        ("connections", "a to b"),
        ("connections", "link from a to b"),
        ("routes", "ranks 0 and 1 on a"),
        ("folder", "hard links"),
        ("folder", "listings"),
    }
    assert all(row["remedy"] for row in rows.values())
    assert "0 to 3" in rows["connections", "a to b"]["found"]
    assert rows["connections", "a to b"]["verdict"] == "problem"
    assert rows["folder", "listings"]["verdict"] == "problem"
    assert "rank 2, 3" in rows["folder", "listings"]["found"]
    assert not found["ok"]


def test_a_bucket_without_conditional_puts_is_a_problem(s3: S3) -> None:
    from torchrelay.check import bucket

    assert {row.verdict for row in bucket.probe(s3.url("good"))} <= {"ok", "slow"}
    s3.without = ("if-none-match",)
    rows = {row.subject: row for row in bucket.probe(s3.url("bad"))}
    assert rows["conditional puts"].verdict == "problem"
    assert "replaced" in rows["conditional puts"].found
    assert rows["upload in parts"].verdict == "ok"
    assert s3.ask("GET", "/bucket?list-type=2")[1].count(b"<Key>") == 0
