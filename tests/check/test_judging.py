"""Facts become rows: which are problems, and what each row says."""

from __future__ import annotations

import json
from typing import Any

import pytest

import torchrelay as tr
from torchrelay.check import bucket, folder, links, machine, report, routes
from torchrelay.check.ranks import Launch, first_node, launch_of
from torchrelay.check.report import Finding
from torchrelay.check.run import neighbours, same_host


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "host": "a",
        "machine": "boot-a",
        "address": "10.0.0.1",
        "versions": {"torchrelay": "0.1.0", "torch": "2.13.0"},
        "cuda": None,
        "gpus": 0,
        "local": 0,
        "shm": 16 << 30,
        "memlock": None,
        "descriptors": 65536,
        "memory": 64 << 30,
        "cgroup": None,
        **changes,
    }


B = {"host": "b", "machine": "boot-b", "address": "10.0.0.2"}


def verdicts(rows: list[Finding]) -> dict[str, str]:
    return {row.subject: row.verdict for row in rows if row.verdict != "ok"}


@pytest.mark.parametrize(
    ("found", "clocks", "wrong"),
    [
        ([facts(), facts(**B)], [5.0, 5.5], {}),
        ([facts(), None], [5.0, None], {"ranks": "problem"}),
        ([facts(), facts(**{**B, "host": "a"})], [], {"host names": "problem"}),
        ([facts(), facts(**{**B, "address": "127.0.1.1"})], [], {"host names": "problem"}),
        ([facts(), facts(**B)], [5.0, 65.0], {"clocks": "problem"}),
        ([facts(shm=64 << 20)], [], {"/dev/shm of a": "slow"}),
        ([facts(shm=None)], [], {}),
        ([facts(descriptors=256)], [], {"open files of a": "slow"}),
        ([facts(memlock=65536)], [], {}),
        ([facts(memlock=65536, gpus=8)], [], {"locked memory of a": "slow"}),
        ([facts(), facts(versions={"torchrelay": "0.2.0"})], [], {"versions": "problem"}),
        (
            [facts(), facts(versions={"torchrelay": "0.1.0", "torch": "2.15.0"})],
            [],
            {"versions": "slow"},
        ),
    ],
)
def test_machines(
    found: list[Any], clocks: list[float | None], wrong: dict[str, str], monkeypatch: Any
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    rows = machine.judge(found, clocks)
    assert verdicts(rows) == wrong
    assert all(bool(row.remedy) == (row.verdict != "ok") for row in rows)


def test_connections_that_fail_are_named_with_their_ranks() -> None:
    addresses = [["10.0.0.1", 1], ["10.0.0.1", 2], ["10.0.0.2", 3]]
    reached = [{"1": "", "2": "timed out"}, {"0": "", "2": "timed out"}, {"0": "", "1": ""}]
    rows = links.judge_connections(["a", "a", "b"], addresses, reached)
    (row,) = [row for row in rows if row.verdict == "problem"]
    assert row.subject == "a to b" and "0 to 2, 1 to 2" in row.found
    assert {row.subject for row in rows if row.verdict == "ok"} == {"ranks 0, 1", "ranks 2"}


def test_a_slow_link_names_the_fast_interface() -> None:
    assert links.judge_speed("a", "b", 1e9, {}).verdict == "ok"
    row = links.judge_speed("a", "b", 12e6, {"eth0": 1000, "ib0": 200_000})
    assert row.verdict == "slow" and "ib0 (200 Gbit/s)" in row.remedy


def test_routes() -> None:
    found = {
        "memory": {"exact": True, "seconds": 1.0, "speed": 1e9},
        "tcp": {"exact": False, "seconds": 0.1, "speed": 1e9},
        "group": {"why": "not installed"},
    }
    rows = routes.judge("pair", found, {"memory": 20e9})
    assert [row.verdict for row in rows] == ["slow", "problem", "ok"]
    (row,) = routes.judge("pair", {"tcp": {"why": "no"}}, {})
    assert row.verdict == "problem"


GOOD = {"rename": "", "fsync": "", "lock": "", "link": "", "write": 1e9, "read": 1e9}


@pytest.mark.parametrize(
    ("seen", "changes", "lists", "wrong"),
    [
        ([0.0, 0.0], {}, [[0.0, True], [0.1, True]], {}),
        ([0.0, None], {}, [[0.0, True], [None, False]], {"the same for all ranks": "problem"}),
        ([0.0, 0.0], {"rename": "no"}, [[0.0, True]] * 2, {"rename": "problem"}),
        ([0.0, 0.0], {"fsync": "no"}, [[0.0, True]] * 2, {"fsync": "problem"}),
        ([0.0, 0.0], {"lock": "no"}, [[0.0, True]] * 2, {"locks": "slow"}),
        ([0.0, 0.0], {"write": "full"}, [[0.0, True]] * 2, {"write speed": "problem"}),
        ([0.0, 0.0], {"read": 1e6}, [[0.0, True]] * 2, {"read speed": "slow"}),
        ([0.0, 0.0], {}, [[0.0, True], [4.0, True]], {"listings": "problem"}),
        ([0.0, 0.0], {}, [[0.0, True], [None, False]], {"listings": "problem"}),
        ([0.0, 0.0], {}, [[0.0, True], [0.1, False]], {"renames as others see them": "problem"}),
    ],
)
def test_folders(seen: Any, changes: dict[str, Any], lists: Any, wrong: dict[str, str]) -> None:
    assert verdicts(folder.judge("/run", seen, {**GOOD, **changes}, lists)) == wrong


def test_buckets() -> None:
    good = {"conditional": "", "parts": "", "write": 1e9, "read": 1e9}
    assert verdicts(bucket.judge("s3://b", good)) == {}
    assert verdicts(bucket.judge("s3://b", {**good, "conditional": "replaced"})) == {
        "conditional puts": "problem"
    }
    assert verdicts(bucket.judge("s3://b", {"conditional": "", "parts": "cut"})) == {
        "upload in parts": "problem"
    }


def test_the_exit_status_is_that_of_the_problems() -> None:
    fine, slow = Finding("a", "b", "ok", "c"), Finding("a", "d", "slow", "e", "f")
    bad = Finding("g", "h", "problem", "i", "j")
    assert report.exit_status([fine, slow]) == 0
    assert report.exit_status([fine, bad]) == 1
    text = report.as_text([fine, slow, bad])
    assert "-> j" in text and text.endswith("1 ok, 1 slow, 1 problem")
    assert json.loads(report.as_json([bad]))["rows"][0]["subject"] == "h"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a1,a2", "a1"),
        ("rack[3]", "rack3"),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_launchers() -> None:
    assert launch_of({}) is None
    assert launch_of({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h"}
    with pytest.raises(tr.errors.UsageError, match="MASTER_PORT"):
        launch_of(torchrun)
    agent = {"MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert launch_of({**torchrun, **agent}) == Launch(3, 4, 1, "h", 29500, True, "0")
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "5",
        "SLURM_STEP_NODELIST": "gpu[01-02]",
        "SLURM_JOB_ID": "123",
        "SLURM_STEP_ID": "2",
    }
    assert launch_of(slurm) == Launch(5, 16, 5, "gpu01", 20123, False, "2")


def test_pairs_of_hosts_take_turns() -> None:
    hosts = ["a", "a", "b", "b", "c", "d"]
    assert neighbours(hosts) == [[(0, 2), (4, 5)], [(2, 4)]]
    assert same_host(hosts) == [(0, 1), (2, 3)]
    assert neighbours(["a", "a"]) == []
