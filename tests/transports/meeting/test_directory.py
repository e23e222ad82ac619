"""How ranks find each other: in a store, or by what they were given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.faults import attempt, same, weights
from tests.support.storeless import Storeless
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline
from torchrelay.dropin import PGTransport
from torchrelay.errors import DigestError, PeerLostError, RemoteProtocolError, UsageError
from torchrelay.transports.meeting.directory import (
    Directory,
    Identity,
    StoreDirectory,
    directory_of,
    identity_from_text,
    read_identity,
)
from torchrelay.transports.wire import handshake

LONG = 25.0


def identity(port: int = 7) -> Identity:
    return Identity(handshake.VERSION, "10.0.0.1", port, handshake.new_id(), handshake.new_key())


def test_an_identity_is_read_as_it_was_written() -> None:
    one = identity()
    assert read_identity(one.encode(), 3) == one == identity_from_text(one.as_text(), 3)
    assert len(one.encode()) < 200


def test_an_identity_that_changed_on_its_way_is_refused() -> None:
    """Also where every field is still one that a process may have."""
    data = identity().encode()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((DigestError, RemoteProtocolError)) as caught:
            read_identity(bytes(changed), 3)
        assert caught.value.rank == 3  # type: ignore[attr-defined]


def test_another_version_is_named_before_anything_else_is_read() -> None:
    """Later versions may have other fields."""
    data = msgspec.msgpack.encode([handshake.VERSION + 1, {"host": "x"}])
    with pytest.raises(RemoteProtocolError, match="rank 3 speaks wire version") as caught:
        read_identity(data, 3)
    assert "same version of torchrelay" in str(caught.value) and caught.value.rank == 3


@given(st.binary(max_size=80))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_identity(data, 3)


@given(st.text(max_size=80))
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        identity_from_text(text, 3)


# In a store


def store_of(rank: int, store: Any) -> StoreDirectory:
    return StoreDirectory(store, rank)


def test_ranks_meet_in_a_store_whichever_comes_first() -> None:
    store = dist.HashStore()
    one, two = store_of(1, store), store_of(2, store)
    mine = identity()
    assert not two.knows(1)
    found: list[Identity] = []
    looking = threading.Thread(target=lambda: found.append(two.find(1, Deadline(LONG))))
    looking.start()
    one.publish(mine)
    looking.join(LONG)
    assert found == [mine] and two.knows(1) and two.find(1, Deadline(LONG)) == mine


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    begun = time.monotonic()
    with pytest.raises(tr.errors.TransferTimeoutError, match="rank 5 made no Relay on this group"):
        store_of(1, dist.HashStore()).find(5, Deadline(0.1))
    assert time.monotonic() - begun < 5


def test_a_rank_that_was_started_again_is_found_again() -> None:
    store = dist.HashStore()
    one, two = store_of(1, store), store_of(2, store)
    first, second = identity(7), identity(8)
    one.publish(first)
    assert two.find(1, Deadline(LONG)) == first
    one.publish(second)
    assert two.find(1, Deadline(LONG)) == first, "it is kept while it works"
    two.forget(1)
    assert two.find(1, Deadline(LONG)) == second


def test_garbage_in_a_store_is_a_typed_error() -> None:
    store = dist.HashStore()
    dist.PrefixStore("torchrelay/ranks", store).set("1", b"\xc1garbage")
    with pytest.raises(RemoteProtocolError, match="unreadable identity"):
        store_of(2, store).find(1, Deadline(LONG))


def test_a_store_that_is_gone_is_named() -> None:
    host = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=5), wait_for_workers=False)
    guest = dist.TCPStore(
        "127.0.0.1", host.port, 1, False, timedelta(seconds=5), wait_for_workers=False
    )
    directory = store_of(2, guest)
    assert not directory.knows(1)
    del host
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="the group's store does not say where rank 1 is"):
        directory.find(1, Deadline(LONG))
    assert time.monotonic() - begun < LONG and not directory.knows(1)


def test_a_store_is_used_by_others_while_a_rank_looks() -> None:
    """The store's own wait would keep the other threads of this process from it."""
    host = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=60), wait_for_workers=False)

    def look() -> None:
        with pytest.raises(tr.errors.TransferTimeoutError):
            store_of(1, host).find(5, Deadline(1))

    looking = threading.Thread(target=look)
    looking.start()
    begun = time.monotonic()
    for number in range(50):
        host.set(f"mine {number}", b"x")
    assert time.monotonic() - begun < 0.9 and looking.is_alive()
    looking.join(LONG)


# Groups of other making


def with_a_store(rank: int, group: Any) -> Any:
    """The group brings no store, so its ranks name one."""
    mine, store = Storeless(group), dist.PrefixStore("ours", group.get_group_store())
    relay = tr.Relay(mine, timeout=LONG, store=store)
    right = []
    for seed in range(3):
        if rank == 0:
            relay.send(weights(seed), [1, 2, 3])
        else:
            right.append(same(relay.recv(0).state, weights(seed)))
    if rank == 3:  # the other way round, and between two that have not met
        relay.send(weights(7), 2)
    elif rank == 2:
        right.append(same(relay.recv(3).state, weights(7)))
    return right


def test_a_group_without_a_store_meets_in_one_that_is_named(pool4: Any) -> None:
    right = pool4.run(with_a_store, fresh_group=True)
    assert right == [[], [True] * 3, [True] * 4, [True] * 3]


def from_a_peer(rank: int, group: Any) -> Any:
    mine, store = Storeless(group), dist.PrefixStore("ours", group.get_group_store())
    with tr.Relay(mine, timeout=LONG, store=store) as relay:
        if rank == 1:
            with relay.share(weights(1), step=5):
                dist.barrier(group)
                dist.barrier(group)
            return None
        dist.barrier(group)
        got = tr.recover(sources=[relay.peer(1)], no_dist=True)
        dist.barrier(group)
        return got.step, same(got.state, weights(1))


def test_a_shared_state_is_found_in_a_store_that_is_named(pool2: Any) -> None:
    assert pool2.run(from_a_peer, fresh_group=True)[0] == (5, True)


def two_relays(rank: int, group: Any) -> Any:
    """Each makes its own object for the same store, as two libraries in one process do."""
    mine, store = Storeless(group), group.get_group_store()
    first, second = (
        tr.Relay(mine, timeout=LONG, store=dist.PrefixStore("ours", store)) for _ in range(2)
    )
    right = []
    for seed, relay in enumerate((first, second, first)):
        if rank == 0:
            relay.send(weights(seed), 1)
        else:
            right.append(same(relay.recv(0).state, weights(seed)))
    return right


def test_two_relays_of_one_group_are_one_process_to_its_ranks(pool2: Any) -> None:
    assert pool2.run(two_relays, fresh_group=True) == [[], [True] * 3]


def nobody_there(rank: int, group: Any) -> Any:
    """Rank 0 calls a rank that has no relay yet, and again when it has."""
    mine, store = Storeless(group), dist.PrefixStore("ours", group.get_group_store())
    if rank == 0:
        relay = tr.Relay(mine, timeout=LONG, store=store)
        out = attempt(lambda: relay.recv(1, timeout=0.3))
        dist.barrier(group)
        return out.error, same(relay.recv(1).state, weights(1))
    dist.barrier(group)
    if rank == 1:
        tr.Relay(mine, timeout=LONG, store=store).send(weights(1), 0)
    return None


def test_a_rank_that_comes_later_is_met_then(pool4: Any) -> None:
    assert pool4.run(nobody_there, fresh_group=True)[0] == ("TransferTimeoutError", True)


class Alone:
    """Rank 0 of two."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Raises(Storeless):
    def get_group_store(self) -> Any:
        raise RuntimeError("no store was set")


WITHOUT_STORE = {
    "no method": lambda: Storeless(Alone()),
    "none": lambda: dist.ProcessGroup(0, 2),
    "an error": lambda: Raises(Alone()),
}
REFUSED = r"has no store, in which its ranks find each other: .* Relay\(group, store=...\)"


@pytest.mark.parametrize("make", WITHOUT_STORE.values(), ids=WITHOUT_STORE)
def test_a_group_without_a_store_is_refused(make: Callable[[], Any]) -> None:
    group = make()
    with pytest.raises(UsageError, match=f"^{type(group).__name__} {REFUSED}$"):
        tr.Relay(group)
    store = dist.HashStore()
    tr.Relay(group, store=store).close()
    with pytest.raises(UsageError, match=REFUSED):  # also when another relay named one
        tr.Relay(group)
    with pytest.raises(UsageError, match=REFUSED):
        PGTransport(group, timedelta(seconds=LONG), torch.device("cpu"))
    with pytest.raises(UsageError, match=REFUSED):
        Coordinator(group, "test")


def test_the_store_that_a_caller_names_is_used() -> None:
    class WithStore(Storeless):
        own = dist.HashStore()

        def get_group_store(self) -> Any:
            return self.own

    group, store = WithStore(Alone()), dist.HashStore()
    mine, theirs = tr.Relay(group)._member(), tr.Relay(group, store=store)._member()
    assert mine.node is theirs.node, "a process has one identity in a group"
    for found in (WithStore.own, store):
        assert directory_of(group, found).find(0, Deadline(LONG)) == mine.node.identity


def test_a_store_is_a_store_of_torch() -> None:
    with pytest.raises(UsageError, match=r"store is a torch.distributed.Store, not dict"):
        tr.Relay(Storeless(Alone()), store={})


# As it was given


def test_what_was_given_is_found() -> None:
    directory, one = Directory(), identity()
    assert not directory.knows(4)
    directory.give(4, one)
    directory.forget(4)
    assert directory.knows(4) and directory.find(4, Deadline(1)) == one
