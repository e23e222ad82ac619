"""How ranks find each other: in a store, by one message each way, or by what they were given."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.faults import attempt, same, weights
from tests.support.storeless import Storeless
from torchrelay.deadlines import Deadline
from torchrelay.errors import DigestError, PeerLostError, RemoteProtocolError
from torchrelay.transports.meeting import directory as module
from torchrelay.transports.meeting.directory import (
    Directory,
    Identity,
    MessageDirectory,
    StoreDirectory,
    directory_of,
    from_message,
    identity_from_text,
    read_identity,
    to_message,
)
from torchrelay.transports.meeting.node import node_of
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


# By messages


def without_a_store(rank: int, group: Any) -> Any:
    mine = Storeless(group)
    relay = tr.Relay(mine, timeout=LONG)
    right = []
    for seed in range(3):
        if rank == 0:
            relay.send(weights(seed), [1, 2, 3])
        else:
            right.append(same(relay.recv(0).state, weights(seed)))
    if rank in (2, 3):  # the other way round, and between two that have not met
        if rank == 3:
            relay.send(weights(7), 2)
        else:
            right.append(same(relay.recv(3).state, weights(7)))
    return isinstance(node_of(mine).directory, MessageDirectory), right, sorted(mine.messages)


def test_a_group_without_a_store_passes_one_message_each_way(pool4: Any) -> None:
    found = pool4.run(without_a_store, fresh_group=True)
    assert all(by_message for by_message, _, _ in found)
    assert [right for _, right, _ in found] == [[], [True] * 3, [True] * 4, [True] * 3]
    met = {0: (1, 2, 3), 1: (0,), 2: (0, 3), 3: (0, 2)}
    for rank, (_, _, messages) in enumerate(found):
        wanted = [(kind, peer, 512) for kind in ("recv", "send") for peer in met[rank]]
        assert messages == sorted(wanted)


ENDINGS = {"zeros": bytes(32), "one zero": b"x" * 31 + b"\0", "two": b"x" * 30 + b"\0\0"}


class Mailbox:
    """A group of two without a store, in one process: what one sends the other receives."""

    def __init__(self) -> None:
        self.boxes: dict[int, list[Any]] = {0: [], 1: []}

    def member(self, rank: int) -> Any:
        def send(tensors: Any, to: int, tag: int) -> None:
            self.boxes[to] += [one.clone() for one in tensors]

        def recv(tensors: Any, source: int, tag: int) -> Callable[[], None]:
            return lambda: tensors[0].copy_(self.boxes[rank].pop())

        return Mock(send=send, recv=recv)


@pytest.mark.parametrize("token", ENDINGS.values(), ids=ENDINGS)
def test_a_token_with_any_ending_arrives(monkeypatch: pytest.MonkeyPatch, token: bytes) -> None:
    """A token is random: one in 256 ends with a zero, as the padding does."""
    arrivals: list[Callable[[], None]] = []

    def watch(group: Any, work: Any, data: Any, report: Any) -> None:
        if work is not None:
            arrivals.append(lambda: (work(), report(None)))

    monkeypatch.setattr(module, "watch", watch)
    mailbox = Mailbox()
    groups = [mailbox.member(rank) for rank in (0, 1)]
    found = [msgspec.structs.replace(identity(), token=token) for _ in groups]
    directories = [MessageDirectory(group) for group in groups]
    for rank, one in enumerate(directories):
        one.publish(found[rank])
        one.introduce(1 - rank)
    for arrive in arrivals:
        arrive()
    assert [one.find(1 - rank, Deadline(LONG)) for rank, one in enumerate(directories)] == [
        found[1],
        found[0],
    ]


@given(st.binary(min_size=32, max_size=32), st.text(max_size=64))
def test_a_message_has_the_identity_that_it_was_made_of(token: bytes, host: str) -> None:
    one = msgspec.structs.replace(identity(), token=token, host=host)
    message = to_message(one)
    assert len(message) == 512 and from_message(message, 3) == one


@given(st.binary(min_size=512, max_size=512))
def test_other_messages_are_refused(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        from_message(message, 3)


def test_a_message_without_a_length_or_with_more_behind_it_is_refused() -> None:
    one = identity()
    for message in (one.encode().ljust(512, b"\0"), to_message(one)[:-1] + b"x", b"\xff" * 512):
        with pytest.raises(RemoteProtocolError, match="unreadable identity") as caught:
            from_message(message, 3)
        assert caught.value.rank == 3


def nobody_there(rank: int, group: Any) -> Any:
    """Rank 0 calls a rank that has no relay yet, and again when it has."""
    mine = Storeless(group)
    if rank == 0:
        relay = tr.Relay(mine, timeout=LONG)
        out = attempt(lambda: relay.recv(1, timeout=0.3))
        dist.barrier(group)
        return out.error, out.seconds < 5, same(relay.recv(1).state, weights(1))
    dist.barrier(group)
    if rank == 1:
        tr.Relay(mine, timeout=LONG).send(weights(1), 0)
    return None


def test_a_rank_that_comes_later_is_met_then(pool4: Any) -> None:
    assert pool4.run(nobody_there, fresh_group=True)[0] == ("TransferTimeoutError", True, True)


def test_a_group_tells_how_its_ranks_meet() -> None:
    class WithStore(Storeless):
        def get_group_store(self) -> Any:
            return dist.HashStore()

    class Raises(Storeless):
        def get_group_store(self) -> Any:
            raise RuntimeError("no store was set")

    class One:
        def rank(self) -> int:
            return 0

    assert isinstance(directory_of(WithStore(One())), StoreDirectory)
    assert isinstance(directory_of(Raises(One())), MessageDirectory)
    assert isinstance(directory_of(Storeless(One())), MessageDirectory)


# As it was given


def test_what_was_given_is_found() -> None:
    directory, one = Directory(), identity()
    assert not directory.knows(4)
    directory.give(4, one)
    directory.forget(4)
    assert directory.knows(4) and directory.find(4, Deadline(1)) == one


def test_a_directory_ends_with_its_group_after_a_failed_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault that is kept does not lead back to it: the collector may be off for hours."""
    reports: list[Any] = []
    group: Any = Mock()
    monkeypatch.setattr(module, "watch", lambda group, work, data, report: reports.append(report))
    gc.disable()
    try:
        for fault in (RuntimeError("the pair broke"), None):  # or bytes that say nothing
            made = MessageDirectory(group)
            made.publish(identity())
            made.introduce(1)
            reports[1](fault)
            assert made._met[1]
            gone = weakref.ref(made)
            reports.clear()
            del made
            assert gone() is None
    finally:
        gc.enable()
