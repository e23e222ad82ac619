"""Memory that received states were in, kept for the next."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import random
import threading
import time
from typing import Any

import pytest
import torch

import torchrelay as tr
from torchrelay.errors import MismatchError
from torchrelay.landing.workspace import LARGE_BYTES
from torchrelay.memory import pool as module
from torchrelay.memory.pages import PAGE
from torchrelay.memory.pool import Pool, Pooled

BIG = 64 * PAGE


def test_what_goes_comes_back_and_is_used_again() -> None:
    pool = Pool(1 << 30)
    one, two = pool.take([3 * PAGE, 5 * PAGE - 7])
    assert (one.numel(), two.numel()) == (3 * PAGE, 5 * PAGE - 7)
    assert one.dtype == torch.uint8 and int(one.max()) == 0 == int(two.max())
    addresses = one.data_ptr(), two.data_ptr()
    assert pool.idle_bytes == 0
    del one
    assert pool.idle_bytes == 3 * PAGE
    del two
    assert pool.idle_bytes == 8 * PAGE
    # By size in pages, in any order.
    second, first, third = pool.take([5 * PAGE, 3 * PAGE, 3 * PAGE])
    assert (first.data_ptr(), second.data_ptr()) == addresses
    assert third.data_ptr() not in addresses and pool.idle_bytes == 0


def test_no_tensor_keeps_anothers_memory() -> None:
    pool = Pool(1 << 30)
    taken = pool.take([BIG] * 8)
    assert len({tensor.untyped_storage().data_ptr() for tensor in taken}) == 8
    assert all(tensor.untyped_storage().nbytes() == BIG for tensor in taken)
    kept = taken[3]
    kept.fill_(9)
    del taken
    assert pool.idle_bytes == 7 * BIG
    again = pool.take([BIG] * 7)
    for tensor in again:
        tensor.fill_(1)
    assert int(kept.min()) == 9
    view = kept[4:12].view(torch.int32)  # a view keeps it too
    del kept
    assert pool.idle_bytes == 0
    del view
    assert pool.idle_bytes == BIG


def test_a_tensor_is_saved_without_the_others() -> None:
    one, _ = Pool(1 << 30).take([PAGE, 100 * PAGE])
    file = io.BytesIO()
    torch.save(one, file)
    assert PAGE <= file.tell() < 4 * PAGE


def test_no_more_than_the_limit_lies_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(module, "release", lambda address, nbytes: released.append(address))
    pool = Pool(3 * BIG)
    taken = pool.take([BIG] * 5)
    addresses = [tensor.data_ptr() for tensor in taken]
    while taken:
        taken.pop(0)
        assert pool.idle_bytes <= pool.limit
    assert pool.idle_bytes == 3 * BIG and released == addresses[:2]  # the oldest went
    # What is new and does not fit there either drives out what is idle.
    large = pool.take([2 * BIG])
    assert pool.idle_bytes == BIG and len(released) == 4
    del large
    assert pool.idle_bytes == 3 * BIG
    nothing = Pool(0)
    del (t := nothing.take([BIG]))[:]
    assert nothing.idle_bytes == 0 and t == []


def test_what_is_idle_for_long_is_given_back() -> None:
    pool = Pool(1 << 30, seconds=0.5)
    early, late = pool.take([BIG, BIG])
    del early
    assert pool.idle_bytes in (BIG, 0)  # 0 where this process was held up for so long
    end = time.monotonic() + 30
    while pool._timed or pool.kept_bytes:
        assert time.monotonic() < end
        time.sleep(0.01)
    late.fill_(7)
    assert int(late.min()) == 7
    del late  # too late for another to have it
    assert pool.idle_bytes == 0
    [again] = pool.take([BIG])
    assert pool._timed and int(again.max()) == 0  # fresh


def test_tensors_outlive_the_pool_and_its_close() -> None:
    pool = Pool(1 << 30)
    one, two = pool.take([BIG, BIG])
    del two
    one.fill_(5)
    pool.close()
    assert pool.idle_bytes == 0
    assert int(one.min()) == 5
    [late] = pool.take([BIG])
    late.fill_(6)
    del pool
    gc.collect()
    assert int(one.min()) == 5 and int(late.min()) == 6
    del one, late


def test_nothing_is_kept_after_close() -> None:
    pool = Pool(1 << 30)
    taken = pool.take([BIG])
    pool.close()
    taken.clear()
    assert pool.idle_bytes == 0


def test_a_tensor_may_go_while_the_pool_is_at_work() -> None:
    """A collection can run in `take` itself, in a thread that holds the lock."""
    pool = Pool(1 << 30)
    taken: list[Any] = pool.take([BIG])
    taken.append(taken)  # only a collection frees it
    with pool._lock:
        del taken
        gc.collect()
    assert pool.idle_bytes == BIG


def test_a_forked_child_has_a_copy() -> None:
    [one] = Pool(1 << 30).take([BIG])
    one.fill_(5)
    child = os.fork()
    if child == 0:
        ctypes.memset(one.data_ptr(), 6, BIG)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(one.max()) == 5


def test_sizes_that_are_nothing_or_too_much() -> None:
    pool = Pool(1 << 30)
    none, one = pool.take([0, 1])
    assert none.numel() == 0 and one.numel() == 1
    assert pool.take([]) == []
    with pytest.raises(MemoryError):
        pool.take([1 << 62])
    with pytest.raises(MismatchError, match="no memory"):
        Pooled(pool).buffers([1 << 62])
    assert pool.take([BIG])[0].numel() == BIG


def test_several_threads() -> None:
    pool = Pool(40 * BIG)
    faults: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        held: list[tuple[int, torch.Tensor]] = []
        for number in range(120):
            for tensor in pool.take([chance.choice([PAGE, BIG, BIG + PAGE]) for _ in range(3)]):
                mark = (seed * 50 + number) % 251
                tensor.fill_(mark)
                held.append((mark, tensor))
            while len(held) > 8:
                mark, tensor = held.pop(chance.randrange(len(held)))
                if int(tensor.min()) != mark or int(tensor.max()) != mark:
                    faults.append(f"seed {seed}, number {number}")
                del tensor

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert faults == []
    assert 0 < pool.idle_bytes <= pool.limit


def test_small_pieces_and_other_devices_are_torchs() -> None:
    pool = Pool(1 << 30)
    means = Pooled(pool)
    assert means.stage(BIG, "meta").is_meta
    (alone,) = Pooled(None).buffers([BIG])
    assert alone.numel() == BIG
    small, large = means.stage(LARGE_BYTES - 1), means.stage(LARGE_BYTES)
    assert (small.numel(), large.numel()) == (LARGE_BYTES - 1, LARGE_BYTES)
    del small
    assert pool.idle_bytes == 0
    del large
    assert pool.idle_bytes == LARGE_BYTES


# In a relay


def kept_between_receives(rank: int, group: Any, size: int | None) -> Any:
    relay = tr.Relay(group, timeout=20, pool=size)
    places, idle = [], []
    for step in range(3):
        if rank == 0:
            state = {name: torch.full((1 << 19,), step + n) for n, name in enumerate("ab")}
            relay.send(state, 1, step=step)
            continue
        got: Any = relay.recv(0, step=step).state
        assert [int(got[name].unique()) for name in "ab"] == [step, step + 1]
        places.append({got[name].data_ptr() for name in "ab"})
        one = got.pop("a")
        del got
        idle.append(relay._pool.idle_bytes if relay._pool is not None else 0)
        assert int(one.unique()) == step
        last = one
        del one
        if step < 2:
            del last
    if rank == 0:
        return None
    relay.close()
    return places[0] == places[1] == places[2], idle, int(last.unique())


def test_a_relay_keeps_memory_between_receives(pool2: Any) -> None:
    nbytes = (1 << 19) * 8
    same, idle, last = pool2.run(kept_between_receives, None)[1]
    assert same and idle == [nbytes] * 3 and last == 2
    _, idle, last = pool2.run(kept_between_receives, 0)[1]
    assert idle == [0] * 3 and last == 2
    same, idle, last = pool2.run(kept_between_receives, nbytes - 1)[1]
    assert not any(idle) and last == 2
