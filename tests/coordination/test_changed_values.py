"""Bits that change on the way to the group's store, in it, or on the way back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrelay as tr
from tests.coordination.test_coordinator import Member
from tests.support.ranks import RankPool
from torchrelay.coordination import group_store
from torchrelay.coordination.group_store import GroupStore, StoreDamaged

Alter = Callable[[str, bytes], bytes]


def flipped(data: bytes, bit: int) -> bytes:
    copy = bytearray(data)
    copy[bit // 8] ^= 1 << bit % 8
    return bytes(copy)


class Altering:
    """A store that has what `sets` makes of each value, and gives what `gets` makes of it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.sets: Alter = lambda key, data: data
        self.gets: Alter = lambda key, data: data

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self.sets(key, value))  # type: ignore[arg-type]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found: Any = self._store.compare_set(key, expected, desired)
        missing = bytes(found) == expected.encode() == desired.encode()
        return bytes(found) if missing else self.gets(key, bytes(found))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def store() -> Altering:
    return Altering(dist.HashStore())


def test_a_bit_that_changes_in_the_store_is_found(store: Altering) -> None:
    value = b"lr 0.001, adamw"
    length = group_store._HEAD_BYTES + len(value)
    for bit in range(8 * length):
        store.sets = lambda key, data, bit=bit: flipped(data, bit)  # type: ignore[misc]
        values = GroupStore(store, "below/")
        values.put("key", value)
        with pytest.raises(StoreDamaged, match="other bytes under below/key than"):
            values.read("key")
        with pytest.raises(StoreDamaged):
            values.take("key")
        assert values.drop("key") and values.read("key") is None


@pytest.mark.parametrize("piece", [0, 1, 2])
def test_each_piece_of_a_long_value_is_covered(store: Altering, piece: int) -> None:
    value = bytes(range(256)) * ((2 * group_store.PIECE_BYTES + 5 * 256) // 256)
    name = f"key/{piece}" if piece else "key"
    store.sets = lambda key, data: flipped(data, 8 * len(data) - 3) if key == name else data
    values = GroupStore(store)
    values.put("key", value)
    with pytest.raises(StoreDamaged):
        values.read("key")
    store.sets = lambda key, data: data
    values.put("key", value)
    assert values.take("key") == value


def test_a_value_that_changes_on_its_way_back_is_read_again(store: Altering) -> None:
    values = GroupStore(store)
    values.put("key", b"value")
    for times in range(group_store.READS + 1):
        left = [0] * times

        def gets(key: str, data: bytes, left: list[int] = left) -> bytes:
            return flipped(data, left.pop() + 200) if left else data

        store.gets = gets
        if times < group_store.READS:
            assert values.read("key") == b"value" and not left
        else:
            with pytest.raises(StoreDamaged):
                values.read("key")


def test_a_value_of_another_key_is_not_taken(store: Altering) -> None:
    """A bit of a key may change, too: then a value of one rank stands where another's is read."""
    values = GroupStore(store, "ranks/")
    values.put("2", b"of rank 2")
    store.set("ranks/3", store.get("ranks/2"))
    assert values.read("2") == b"of rank 2"
    with pytest.raises(StoreDamaged):
        values.read("3")


def test_a_text_that_changes_is_found(store: Altering) -> None:
    values = GroupStore(store)
    assert values.compare_set("passed", "", "12") == b"12"
    assert values.compare_set("passed", "11", "13") == b"12"
    assert values.compare_set("passed", "12", "13") == b"13"
    for bit in range(8 * (2 + group_store._SEAL_DIGITS)):
        store.gets = lambda key, data, bit=bit: flipped(data, bit)  # type: ignore[misc]
        with pytest.raises(StoreDamaged):
            values.compare_set("passed", "12", "13")


# Between ranks


def state_of(rank: int, step: int) -> dict[str, Any]:
    values = {"lr": 0.001 * step, "name": f"adamw {step}", "mine": f"{step} of {rank}"}
    return {"w": torch.full((300,), float(rank)), **values}


def disturbed_saves(rank: int, group: Any, root: str, liar: int, most: int) -> list[Any]:
    """In each save another value that `liar` writes changes. For each: the error, the step that a
    load finds, whether its values are right, and whether so many values were written."""
    member = Member(rank, group)
    store = Altering(member.store)
    member.store = store  # type: ignore[assignment]
    found: list[Any] = []
    for nth in range(1, most):
        with tr.Checkpointer(root, group=member, timeout=3) as held:  # type: ignore[arg-type]
            count = [0]

            def sets(key: str, data: bytes, count: list[int] = count, nth: int = nth) -> bytes:
                count[0] += 1
                return flipped(data, (7919 * nth) % (8 * len(data))) if count[0] == nth else data

            if rank == liar:
                store.sets = sets
            error = None
            try:
                held.save(nth, state_of(rank, nth))
            except tr.errors.RelayError as fault:
                error = f"{type(fault).__name__}: {fault}"
            store.sets = lambda key, data: data
            member.keys()  # all ranks are here
            step = held.latest()
            right = True
            if step is not None:
                got = held.load(step=step).state
                right = str(got) == str(state_of(rank, step))
            found.append((error, step, right, count[0] >= nth))
            member.keys()
    return found


@pytest.mark.parametrize("liar", [0, 1])
def test_a_save_has_the_values_that_ranks_wrote_or_fails(
    pool2: RankPool, tmp_path: Path, liar: int
) -> None:
    found = pool2.run(disturbed_saves, str(tmp_path), liar, 6, timeout=200)
    disturbed = 0
    for nth, trials in enumerate(zip(*found, strict=True), 1):
        assert all(right for _, _, right, _ in trials), (nth, trials)
        if not trials[liar][3]:
            assert [error for error, *_ in trials] == [None, None], (nth, trials)
            continue
        errors = [error for error, *_ in trials if error is not None]
        # Without an error it was a note of what a rank does, which no rank has read.
        assert not errors or any("other bytes" in error for error in errors), (nth, trials)
        assert len({step for _, step, _, _ in trials}) == 1
        disturbed += bool(errors)
    assert disturbed >= 2
