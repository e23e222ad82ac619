"""The memory that a process keeps while it does not need it, among all processes of a host."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from torchrelay.deadlines import Deadline
from torchrelay.memory import free
from torchrelay.memory.idle import IdleMemory, idle_memory, processes_by_hint
from torchrelay.memory.pool import Pool
from torchrelay.transports.meeting import directory as module
from torchrelay.transports.meeting.directory import Identity, StoreDirectory
from torchrelay.transports.routes.host.ring import SharedRings
from torchrelay.transports.wire import handshake

MIB = 1 << 20
LIMIT = 2 << 30


class Kept:
    def __init__(self, nbytes: int) -> None:
        self.kept_bytes = nbytes


class Counted:
    def __init__(self, processes: int) -> None:
        self.processes_here = processes


def test_a_tenth_of_the_host_is_divided_by_its_processes() -> None:
    shared = IdleMemory(lambda: LIMIT, lambda: 0)
    assert shared.limit == LIMIT // 10
    small, large = Counted(2), Counted(8)
    shared.count_by(small)
    shared.count_by(large)
    assert shared.limit == LIMIT // 10 // 8
    del large  # a group that has ended
    assert shared.limit == LIMIT // 10 // 2
    assert IdleMemory(lambda: LIMIT, lambda: 4).limit == LIMIT // 10 // 4
    assert IdleMemory(lambda: None, lambda: 1).limit == 0


def test_holders_share_what_the_process_may_keep() -> None:
    shared = IdleMemory(lambda: 1000, lambda: 1)
    one, other = Kept(30), Kept(60)
    shared.add(one)
    shared.add(other)
    assert (shared.left_for(one), shared.left_for(other)) == (40, 70)
    other.kept_bytes = 120
    assert shared.left_for(one) == 0
    del other
    assert shared.left_for(one) == 100


def test_pools_of_one_process_keep_no_more_together_than_one() -> None:
    shared = IdleMemory(lambda: 100 * MIB, lambda: 1)
    pools = [Pool(shared=shared) for _ in range(3)]
    for each in pools:
        tensors = each.take([2 * MIB] * 6)
        del tensors
        assert sum(one.idle_bytes for one in pools) <= 10 * MIB
    assert sum(one.idle_bytes for one in pools) == 10 * MIB
    assert Pool(64 * MIB, shared=shared).limit == 64 * MIB  # the caller has said how much


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("", 0), ("-1", 0), ("many", 0)])
def test_the_hint_of_torchrun(monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert processes_by_hint() == count
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert processes_by_hint() == 0


def test_ranks_of_this_host_are_counted_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have not published an identity may be here."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    store, size = dist.HashStore(), 6  # type: ignore[attr-defined]
    ranks = [StoreDirectory(store, rank, size) for rank in range(size)]
    seen = []
    for rank, one in enumerate(ranks):
        monkeypatch.setattr(module, "machine", lambda rank=rank: f"host {rank // 2}")
        one.publish(Identity(handshake.VERSION, "h", 1, handshake.new_id(), handshake.new_key()))
        seen.append(one.processes_here)
    assert seen == [6, 6, 4, 4, 2, 2]
    monkeypatch.setattr(module, "machine", lambda: "host 0")
    ranks[0].find(1, Deadline(25.0))
    assert ranks[0].processes_here == 2  # everyone has published


def test_torchrun_knows_ranks_that_the_store_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store = dist.HashStore()  # type: ignore[attr-defined]
    ranks = [StoreDirectory(store, rank, 8) for rank in range(4)]
    for one in ranks:
        one.publish(Identity(handshake.VERSION, "h", 1, handshake.new_id(), handshake.new_key()))
    # A hint that is too small does not hide ranks that are here.
    assert [one.processes_here for one in ranks] == [2, 2, 3, 4]


def kept_after_transfers(rank: int, group: Any, route: str | None) -> tuple[int, int, int]:
    """This process runs in a control group of 2 GiB, among eight of the host: bytes that it keeps
    after transfers from its neighbour, in pools and in rings, and that it may keep."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        inner = Path(folder) / "job" / "worker"
        inner.mkdir(parents=True)
        for group_folder, limit in ((inner, 4 * LIMIT), (inner.parent, LIMIT)):
            for name, text in (("max", str(limit)), ("current", "0"), ("stat", "anon 0")):
                (group_folder / f"memory.{name}").write_text(text)
        (Path(folder) / "cgroup").write_text("0::/job/worker\n")
        patch.setattr(free, "_GROUPS", f"{folder}/cgroup")
        patch.setattr(free, "_MOUNT", folder)
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        for name, value in (("_total", free.total_bytes), ("_holders", ()), ("_counters", ())):
            patch.setattr(idle_memory, name, value)
        store = dist.PrefixStore(f"idle-{route}", group.get_group_store())  # type: ignore[attr-defined]
        with tr.Relay(group, store=store) as relay:
            for turn in range(3):
                state = {f"w{n}": torch.full((MIB,), float(rank + n)) for n in range(12 + turn)}
                if route is not None:  # strided on one side: not read where it lies
                    state = {"w": torch.full((4096, 2048), float(rank))[:, ::2]}
                if rank % 2 == 0:
                    relay.send(state, to=rank + 1)
                else:
                    relay.recv(rank - 1)
            rings = relay._resources.of(SharedRings).kept_bytes
            assert relay._pool is not None
            return relay._pool.idle_bytes, rings, idle_memory.limit


@pytest.mark.parametrize("route", [None, "ring"])
def test_eight_processes_keep_a_tenth_of_a_container_together(
    pool8: Any, route: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = pool8.run(kept_after_transfers, route)
    total = sum(pooled + rings for pooled, rings, _ in kept)
    with capsys.disabled():
        figures = ", ".join(f"{(pooled + rings) / MIB:.1f}" for pooled, rings, _ in kept)
        print(f"\n{route or 'memory'}: 8 processes keep {figures} MiB, {total / MIB:.1f} in all;")
        print(f"each may keep {kept[0][2] / MIB:.1f} MiB, all of them {LIMIT / 10 / MIB:.1f}")
    assert {limit for _, _, limit in kept} == {LIMIT // 10 // 8}
    assert 0 < total <= LIMIT // 10
