"""Peers that say too much, too little, or point at nothing: bounded memory, and no stale bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, weights
from tests.support.messages import altering
from tests.support.strangers import resident
from tests.support.ways import by, patched
from torchrelay.geometry.runs import Runs
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.transports.routes.host.facts import MemoryTable
from torchrelay.transports.routes.memory import MemoryService
from torchrelay.transports.routes.outgoing import Outgoing
from torchrelay.transports.wire.messages import Accept, Confirmed, Need, Offer, RouteNote

OLD, NEW = 100, 1
TIMEOUT = 10.0


# Messages that nobody waits for

MESSAGES, MESSAGE_BYTES = 300, 1 << 20


def pile(rank: int, group: Any) -> Any:
    """Rank 0 follows its last message with a flood, which rank 1 is not going to read."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 1:
        live, before = weights(OLD), resident()
        first = received(relay, 0, live, OLD, NEW, TIMEOUT)
        grown = resident() - before
        dist.barrier(group)
        return first, grown, received(relay, 0, live, NEW, 2, TIMEOUT)
    flood = Offer(bytes(MESSAGE_BYTES), bytes(16))
    with altering(lambda m: [m, *[flood] * MESSAGES] if isinstance(m, Confirmed) else m):
        out = attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
    dist.barrier(group)
    return out, attempt(lambda: relay.send(weights(2), 1, step=2))


def test_messages_do_not_pile_up_after_recv_is_over(pool2: Any) -> None:
    (_, after), (first, grown, again) = pool2.run(pile, timeout=60, fresh_group=True)
    assert first.weights == NEW and grown < MESSAGES * MESSAGE_BYTES // 2, (first, grown)
    assert after.error is None and again.weights == 2


# Receivers that ask for too much


def asks_again(rank: int, group: Any, what: str) -> Outcome:
    """The receiver asks for the same thing again and again, and takes nothing."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 0:
        return attempt(lambda: relay.send(weights(NEW), 1, step=NEW))

    def alter(message: Any) -> Any:
        if what == "fill" and isinstance(message, RouteNote):
            return [message] * 200
        if what == "need" and isinstance(message, Accept):
            return [message, *[Need((0,))] * 200]
        if what == "restart" and isinstance(message, Accept):
            return [message, *[Need((0,), restart=True)] * 200]
        return message

    with altering(alter):
        return received(relay, 0, weights(OLD), OLD, NEW, TIMEOUT)


@pytest.mark.parametrize(
    ("what", "way"), [("fill", "ring"), ("need", "tcp"), ("restart", "tcp"), ("need", "memory")]
)
def test_a_receiver_that_asks_again_and_again_is_given_up(pool2: Any, what: str, way: str) -> None:
    ours, theirs = pool2.run(by, way, asks_again, what, fresh_group=True)
    assert ours.error == "PeerLostError" and ours.seconds < TIMEOUT / 2, ours
    assert theirs.error is not None and theirs.weights == OLD


# Bytes that never come


def nothing_told(rank: int, group: Any, verify: Any, atomic: bool) -> Any:
    """The sender's table of memory is empty, and so are the digests that it tells."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, verify=verify, pool=64 << 20)
    if rank == 1:
        live = weights(OLD)
        relay.recv(0, into=live)  # memory that is used again has these weights in it
        before = live["w"].clone()
        got = relay.recv(0, into=live, atomic=atomic)
        zeros = not any(t.count_nonzero() for t in (live["w"], live["h"], *live["small"]))
        return zeros, torch.equal(before, live["w"]), got.report.route, got.report.verified
    relay.send(weights(NEW), 1)
    original = MemoryService.table

    def table(self: MemoryService, outgoing: Outgoing) -> MemoryTable:
        return msgspec.structs.replace(original(self, outgoing), host=b"")

    def zero(self: Outgoing, index: int) -> bytes:
        return digest_of(torch.zeros(self.snapshot.chunks.sizes[index], dtype=torch.uint8))

    with patched(MemoryService, table=table), patched(Outgoing, digest=zero):
        relay.send(weights(NEW), 1)
    return None


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("verify", ["all", False])
def test_an_empty_table_of_memory_gives_no_bytes_of_an_earlier_state(
    pool2: Any, verify: Any, atomic: bool
) -> None:
    zeros, unchanged, route, verified = pool2.run(by, "memory", nothing_told, verify, atomic)[1]
    assert route == "memory" and verified == bool(verify)
    assert zeros and not unchanged


@given(st.data())
def test_what_one_has_without_the_other(data: Any) -> None:
    def runs(base: int) -> tuple[Runs, dict[int, int]]:
        starts, sizes, at = [], [], 0
        for _ in range(data.draw(st.integers(0, 6))):
            at += data.draw(st.integers(0, 5))
            size = data.draw(st.integers(1, 9))
            starts.append(at)
            sizes.append(size)
            at += size
        places = {s + i: base + s + i for s, n in zip(starts, sizes, strict=True) for i in range(n)}
        return Runs(starts, [base + start for start in starts], sizes), places

    (mine, ours), (other, theirs) = runs(1000), runs(5000)
    left = mine.without(other)
    columns = (left.starts.tolist(), left.addresses.tolist(), left.stops.tolist())
    found = {s + i: a + i for s, a, e in zip(*columns, strict=True) for i in range(e - s)}
    assert found == {at: place for at, place in ours.items() if at not in theirs}
