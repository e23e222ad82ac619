"""Ranks that meet in a store: values of any length, and nothing of theirs left there."""

from __future__ import annotations

import resource
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.support.ranks import RankPool, run_ranks
from torchrelay.coordination import group_store
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.coordination.group_store import GroupStore
from torchrelay.coordination.messages import CallName, conflicts
from torchrelay.deadlines import Deadline
from torchrelay.errors import CheckpointError

LIMIT = 8 << 20  # bytes of a value at which torch's TCPStore ends


def local_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), wait_for_workers=False)


class Member:
    """A rank whose store is a `TCPStore`: those of the pools have their store in a file."""

    def __init__(self, rank: int, group: Any) -> None:
        self._group = group
        options: Any = (group.size(), rank == 0, timedelta(seconds=20))
        port = 0
        if rank == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, *options, wait_for_workers=False)
            port = self.store.port
        told = [port]
        dist.broadcast_object_list(told, src=0, group=group)
        if rank > 0:
            self.store = dist.TCPStore("127.0.0.1", told[0], *options, wait_for_workers=False)

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def get_group_store(self) -> dist.Store:
        return self.store

    def keys(self) -> int:
        """How many there are, when all ranks are done."""
        dist.barrier(self._group)
        count = int(self.store.num_keys())
        dist.barrier(self._group)
        return count


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, LIMIT + 1])
def test_a_value_of_any_length_is_taken_whole_and_gone(nbytes: int) -> None:
    store = local_store()
    before = store.num_keys()
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy().tobytes()
    values = GroupStore(store, "below/")
    values.put("key", data)
    assert values.read("key") == data and values.take("key") == data
    assert values.read("key") is None and values.take("key") is None
    values.put("key", data)
    assert values.drop("key") and not values.drop("key")
    assert store.num_keys() == before


class Interrupted:
    """A store in which writing breaks off."""

    def __init__(self, store: dist.Store, after: int) -> None:
        self._store, self._after = store, after

    def set(self, key: str, value: bytes) -> None:
        self._after -= 1
        if self._after < 0:
            raise KeyboardInterrupt
        self._store.set(key, value)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_value_that_breaks_off_leaves_no_pieces() -> None:
    store = local_store()
    before = store.num_keys()
    for after in range(3):
        with pytest.raises(KeyboardInterrupt):
            GroupStore(Interrupted(store, after)).put("key", bytes(5 << 19))
        assert store.num_keys() == before


def large_rounds(rank: int, group: Any) -> list[Any]:
    member = Member(rank, group)
    call = Coordinator(member, "test").call("test")
    before = member.keys()
    mine = bytes([rank]) * (LIMIT + 5)
    call.at("at work")
    heard = call.round("plan", lambda: mine, lambda said: said[::-1], Deadline(30))
    call.at("at work")
    call.round("write", lambda: b"", lambda said: said, Deadline(30))
    whole = heard == bytes([1 - rank]) * (LIMIT + 5)
    return [whole, member.keys() - before]


def test_a_message_over_the_limit_of_the_store(pool2: RankPool) -> None:
    assert pool2.run(large_rounds, timeout=60) == [[True, 0]] * 2


def failing_rounds(rank: int, group: Any) -> list[int]:
    """A rank that fails, a decision that fails, a rank that is late: keys that are left of each."""
    member = Member(rank, group)
    every = Coordinator(member, "test")
    every.call("test").round("begin", lambda: b"", lambda said: said, Deadline(20))
    before = member.keys()
    left = []

    def fail(*_: Any) -> Any:
        raise CheckpointError("on purpose")

    for mine, decide in ((fail if rank else bytes, lambda said: said), (bytes, fail)):
        call = every.call("test")
        call.at("failing")
        with pytest.raises(CheckpointError):
            call.round("plan", mine, decide, Deadline(20))
        left.append(member.keys() - before)
    call = every.call("test", 1)
    call.at("slow")
    if rank == 1:  # speaks when the coordinator has given up
        dist.barrier(group)
    with pytest.raises(CheckpointError, match="no message in"):
        call.round("plan", bytes, lambda said: said, Deadline(0.5 if rank == 0 else 20))
    if rank == 0:
        dist.barrier(group)
    left.append(member.keys() - before)
    every.call("test").round("end", lambda: b"", lambda said: said, Deadline(20))
    left.append(member.keys() - before)
    return left


def test_failures_leave_nothing_in_the_store(pool2: RankPool) -> None:
    """But for one note, until the next call: a rank that comes late learns that it is."""
    assert pool2.run(failing_rounds, timeout=60) == [[0, 0, 1, 0]] * 2


def answered_late(rank: int, group: Any) -> int:
    """Rank 1 gives up before the coordinator has spoken; its next round removes the answer."""
    member = Member(rank, group)
    every = Coordinator(member, "test")
    every.call("test").round("begin", bytes, lambda said: said, Deadline(20))
    before = member.keys()
    call = every.call("test")
    call.round("begin", bytes, lambda said: said, Deadline(20))
    member.keys()
    if rank == 1:
        with pytest.raises(CheckpointError, match="did not answer"):
            call.round("plan", bytes, lambda said: said, Deadline(0.1))
        dist.barrier(group)
    else:
        dist.barrier(group)
        call.round("plan", bytes, lambda said: said, Deadline(20))
    member.keys()
    every.call("test").round("end", bytes, lambda said: said, Deadline(20))
    return member.keys() - before


def test_an_answer_that_nobody_awaits_any_more_is_removed(pool2: RankPool) -> None:
    assert pool2.run(answered_late, timeout=60) == [0, 0]


def saves_and_loads(rank: int, group: Any, root: str) -> list[int]:
    """Keys that are left by saves, one in the background, and loads."""
    member = Member(rank, group)
    state = {"w": torch.full((3,), float(rank)), "rng": bytes([rank]) * (LIMIT + 5)}
    with tr.Checkpointer(root, group=member, timeout=60) as held:  # type: ignore[arg-type]
        held.save(1, state)
        counts = [member.keys()]
        for step in range(2, 5):
            held.save(step, state)
        held.save_async(5, state).result(60)
        counts.append(member.keys())
        got = held.load(into={"w": torch.zeros(3), "rng": b""})
        assert got.state["rng"] == state["rng"] and got.state["w"].eq(rank).all()
        counts.append(member.keys())
    return [count - counts[0] for count in counts]


def test_no_save_and_no_load_leaves_a_key(pool2: RankPool, tmp_path: Path) -> None:
    """The state has a value per rank that is longer than the store takes in one piece."""
    assert pool2.run(saves_and_loads, str(tmp_path), timeout=120) == [[0, 0, 0]] * 2


def job(rank: int, group: Any, port: int, root: str, tensors: int, above: str) -> list[Any]:
    """A job as torchrun starts it: the group's store is a `TCPStore` in rank 0."""
    world = dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    model: dict[str, Any] = {f"{above}.{n}": torch.full((2,), float(n)) for n in range(tensors)}
    model["ints"] = list(range(tensors))
    with tr.Checkpointer(root, timeout=600) as held:
        seconds = [held.save(step, {"model": model}).seconds for step in range(2)]
    dist.barrier(dist.new_group())
    return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, *seconds]


def free_port() -> int:
    store = local_store()
    return int(store.port)


def test_the_group_outlives_a_save_with_a_long_plan(tmp_path: Path) -> None:
    above = "layer" * 80
    run_ranks(job, 2, free_port(), str(tmp_path), 6_000, above, timeout=240)
    with tr.Checkpointer(tmp_path, no_dist=True) as held:
        got = held.load().state["model"]
    assert len(got) == 6_001 and got[f"{above}.5999"].eq(5_999).all()


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("ranks", "tensors"), [(2, 45_000), (4, 200_000)])
def test_the_group_outlives_a_save_of_many_tensors(
    tmp_path: Path, ranks: int, tensors: int
) -> None:
    """On rank 0, peak memory in MiB with the seconds of each phase is printed."""
    print(run_ranks(job, ranks, free_port(), str(tmp_path), tensors, "layer", timeout=1200)[0])
    with tr.Checkpointer(tmp_path, no_dist=True) as held:
        assert len(held.load().state["model"]) == tensors + 1


def test_a_rank_that_is_behind_fails_alone_and_once() -> None:
    def failing(*calls: tuple[str, int | None], behind: dict[int, int] | None = None) -> set[int]:
        return set(conflicts([CallName(*call) for call in calls], behind or {}))

    save = "save"
    assert failing((save, 7), (save, 7)) == set() == failing(("load", None), ("load", None))
    assert failing((save, 7), (save, 9), (save, 9)) == {0}
    assert failing((save, 9), (save, 7), (save, 8)) == {1, 2}
    assert failing((save, 8), (save, 9), behind={0: 7}) == {0}, "it comes nearer"
    assert failing((save, 7), (save, 9), behind={0: 7}) == {1}, "it does not"
    assert failing((save, 7), ("load", None)) == {0, 1} == failing(("a", None), ("b", None))


class Clock:
    """Time that passes in sleeps, and for the store's answers."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class Late:
    """A store whose one key comes at a time."""

    def __init__(self, clock: Clock, comes_at: float) -> None:
        self._clock, self._comes_at, self.asked = clock, comes_at, 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self._clock.now += 0.0001
        return self._clock.now >= self._comes_at


@pytest.mark.parametrize(("comes_at", "most"), [(0.01, 21), (1.0, 120), (60.0, 400), (600.0, 2600)])
def test_who_waits_longer_asks_the_store_rarely(
    comes_at: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(group_store, "time", clock)
    store, looks = Late(clock, comes_at), []
    assert GroupStore(store).wait_for(["key"], 1000.0, lambda: looks.append(clock.now))
    assert clock.now <= comes_at * (1 + group_store.OVERDUE) + 0.01, "it is found soon"
    assert store.asked <= most and len(looks) <= store.asked


def test_a_wait_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(group_store, "time", clock)
    assert not GroupStore(Late(clock, 1e9)).wait_for(["key"], 100.0)
    assert 100.0 <= clock.now < 100.01
