"""Peers that say too much, too little, or point at nothing: bounded memory, and no stale bytes."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, weights
from tests.support.messages import send_payload
from tests.support.ways import by, patched
from torchrelay.geometry.runs import Runs
from torchrelay.record.digest import digest
from torchrelay.transports.group import lines as group_module
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.peers import Peer
from torchrelay.transports.routes.host import HostServer, Memory
from torchrelay.transports.transfer.outflow import Outflow

OLD, NEW = 100, 1
TIMEOUT = 10.0
SOON = 20.0


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def lines_of_this() -> Iterator[list[ControlLine]]:
    """Within: the lines that this process makes."""
    made: list[ControlLine] = []
    original = ControlLine.__init__

    def init(self: ControlLine, *args: Any) -> None:
        made.append(self)
        original(self, *args)

    with patched(ControlLine, __init__=init):
        yield made


# Messages that nobody waits for

MESSAGES, MESSAGE_BYTES = 300, 1 << 20


def pile(rank: int, group: Any) -> Any:
    """Rank 0 answers the last word of rank 1 with a flood in place of its own last word."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, route="group")
    with lines_of_this() as lines:
        if rank == 1:
            before = resident()
            relay.recv(0)
            over = lines[-1].ended.wait(SOON)
            dist.barrier(group)
            return over, resident() - before
        original = ControlLine.send

        def send(self: ControlLine, message: wire.Message) -> None:
            if isinstance(message, wire.Fin):
                payload = msgspec.msgpack.encode(wire.Offer(bytes(MESSAGE_BYTES)))
                for _ in range(MESSAGES):
                    send_payload(self, payload)
            else:
                original(self, message)

        with patched(ControlLine, send=send):
            relay.send(weights(NEW), 1)
        dist.barrier(group)
        return None


def test_messages_do_not_pile_up_after_recv_is_over(pool2: Any) -> None:
    over, grown = pool2.run(pile, timeout=60, fresh_group=True)[1]
    assert over and grown < MESSAGES * MESSAGE_BYTES // 2, (over, grown)


def idle(rank: int, group: Any) -> Any:
    """Nobody takes what rank 0 says on a line: some of it waits here, the rest there."""
    transfer = 77
    line = ControlLine(group, 1 - rank, transfer)
    if rank == 0:
        for _ in range(group_module.UNHEARD + 300):
            send_payload(line, msgspec.msgpack.encode(wire.Knock()))
        send_payload(line, msgspec.msgpack.encode(wire.Offer(bytes(MESSAGE_BYTES))))
        send_payload(line, msgspec.msgpack.encode(wire.Fin()))
        line.ended.wait(SOON)
        return None
    full = group_module.UNHEARD + 1
    ends = time.monotonic() + SOON
    while len(line._inbox) < full and time.monotonic() < ends:
        line.ended.wait(0.01)
    line.ended.wait(0.2)  # so that more would come, if it were taken
    kept = len(line._inbox)
    heard: list[Any] = []
    line.listen(heard.append)
    over = line.ended.wait(SOON)
    line.send(wire.Done())
    return kept, over, len(heard), type(heard[-1]).__name__


def test_an_idle_line_takes_a_bounded_number_and_loses_nothing(pool2: Any) -> None:
    kept, over, heard, last = pool2.run(idle, timeout=60, fresh_group=True)[1]
    assert kept == group_module.UNHEARD + 1
    assert over and last == "Fin" and heard == group_module.UNHEARD + 302


# Receivers that ask for too much


def test_chunks_are_asked_for_once_on_a_new_lane() -> None:
    def peer() -> Peer:
        return Peer(1, 7)

    one = peer()
    assert one.may_ask(wire.Need((3, 1), 2), 4) and one.may_ask(wire.Need((3,), 3), 4)
    assert not one.may_ask(wire.Need((0,), 3), 4)  # used
    assert not peer().may_ask(wire.Need((4,), 2), 4)  # there is none
    assert not peer().may_ask(wire.Need((1, 1), 2), 4)  # twice


def asks_again(rank: int, group: Any, what: str) -> Outcome:
    """The receiver asks for the same thing again and again, and takes nothing."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 0:
        return attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
    original = ControlLine.send

    def send(self: ControlLine, message: wire.Message) -> None:
        original(self, message)
        if what == "fill" and isinstance(message, wire.Word):
            for _ in range(200):
                original(self, message)
        if what == "need" and isinstance(message, wire.Accept):
            for _ in range(200):
                original(self, wire.Need((0,), 2))

    with patched(ControlLine, send=send):
        return received(relay, 0, weights(OLD), OLD, NEW, TIMEOUT)


@pytest.mark.parametrize(("what", "way"), [("fill", "ring"), ("need", "group")])
def test_a_receiver_that_asks_again_and_again_is_given_up(pool2: Any, what: str, way: str) -> None:
    ours, theirs = pool2.run(by, way, asks_again, what, fresh_group=True)
    assert ours.error == "PeerLostError" and ours.seconds < TIMEOUT / 2, ours
    assert theirs.error is not None and theirs.weights == OLD


# Bytes that never come


def nothing_told(rank: int, group: Any, verify: bool, atomic: bool) -> Any:
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
    original = HostServer.memory

    def memory(self: HostServer, join: wire.Join, line: ControlLine) -> Memory:
        return msgspec.structs.replace(original(self, join, line), host=b"")

    def digests(self: Outflow) -> tuple[bytes, ...]:
        return tuple(digest(torch.zeros(n, dtype=torch.uint8)) for n in self._chunks.sizes)

    with patched(HostServer, memory=memory), patched(Outflow, all_digests=digests):
        relay.send(weights(NEW), 1)
    return None


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_an_empty_table_of_memory_gives_no_bytes_of_an_earlier_state(
    pool2: Any, verify: bool, atomic: bool
) -> None:
    zeros, unchanged, route, verified = pool2.run(by, "host", nothing_told, verify, atomic)[1]
    assert route == "host" and verified == verify
    assert zeros and not unchanged


def short(rank: int, group: Any) -> Any:
    """gloo takes a message that is shorter than the memory for it: the rest must not be old."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, verify=False, route="group")
    if rank == 1:
        relay.recv(0)
        got = relay.recv(0).state["w"].view(torch.uint8).flatten()
        return int((got == 7).sum()), int((got == 9).sum()), got.numel()
    relay.send({"w": torch.full((1 << 16,), 9, dtype=torch.uint8)}, 1)
    original = Outflow._bytes_of

    def half(self: Outflow, *args: Any, **how: Any) -> Any:
        data, lease = original(self, *args, **how)
        return data[: data.numel() // 2], lease

    with patched(Outflow, _bytes_of=half):
        relay.send({"w": torch.full((1 << 16,), 7, dtype=torch.uint8)}, 1)
    return None


def test_a_short_message_is_filled_up_with_zeros(pool2: Any) -> None:
    new, old, total = pool2.run(short)[1]
    assert new == total // 2 and old == 0


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
