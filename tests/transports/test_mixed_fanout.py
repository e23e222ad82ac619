"""A chain over machines, host memory within each: receivers that read from the one before them.

Rank 0 says that it is on another machine, so the receivers form a chain; they are in one place, so
each but the first reads what it gets.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.support.faults import (
    CHUNK,
    RECEIVER,
    Outcome,
    held_at,
    received,
    same,
    sent,
    verdict,
    weights,
)
from tests.support.ranks import Ranks, reached, run_ranks
from tests.support.ways import elsewhere, patched, refused
from torchrelay.errors import RemoteProtocolError
from torchrelay.memory.vectors import OtherMemoryError
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines import fanout
from torchrelay.transports.protocol.machines.peers import Peer, go
from torchrelay.transports.protocol.receiver import Receiving
from torchrelay.transports.routes import hops as handing
from torchrelay.transports.routes import notes
from torchrelay.transports.routes.nearby import place

OLD, NEW = 100, 1
TIMEOUT = 25.0
START = 90.0
DATA = RECEIVER["group"]["data"]
READ = DATA._replace(owner=handing, name="read_run", after=False)
"""Where a receiver is held: a chunk has come, or is about to be read."""


# Who reads whom, without processes


HERE = wire.Place("boot", 1000, 7)


def told(places: dict[int, wire.Place], silent: tuple[int, ...] = (), **how: Any) -> list[wire.Go]:
    """What the receivers of a chain are told, the sender being rank 0."""
    peers = {}
    for rank, where in places.items():
        peers[rank] = Peer(rank, rank, place=where, reads=rank not in silent)
    hops = fanout.chain(0, list(places))
    return [go(hop, peers, 2.0, may_read=how.get("may_read", True)) for hop in hops]


def pairs(words: list[wire.Go]) -> list[tuple[int, int]]:
    """Who reads and from whom; both of them are told."""
    told_of = [word.notes for word in words]
    assert told_of == [word.reads for word in words[1:]] + [False]
    assert not words[0].reads
    for word in words:
        assert word.patience == 2.0
    return [(word.upstream, word.upstream + 1) for word in words if word.reads]


def test_neighbours_in_one_place_read() -> None:
    assert pairs(told({1: HERE, 2: HERE, 3: HERE})) == [(1, 2), (2, 3)]
    assert pairs(told({1: HERE})) == []
    assert pairs(told({1: HERE, 2: HERE, 3: HERE}, may_read=False)) == []


@pytest.mark.parametrize("lie", [{"machine": "b"}, {"machine": ""}, {"user": 2}, {"pids": 8}])
def test_neighbours_apart_send(lie: dict[str, Any]) -> None:
    there = msgspec.structs.replace(HERE, **lie)
    assert pairs(told({1: HERE, 2: HERE, 3: there})) == [(1, 2)]
    assert pairs(told({1: HERE, 2: there, 3: HERE})) == []


def test_who_says_no_nonce_neither_reads_nor_is_read() -> None:
    chain = dict.fromkeys((1, 2, 3, 4), HERE)
    assert pairs(told(chain, silent=(2,))) == [(3, 4)]
    assert pairs(told(chain, silent=(1,))) == [(2, 3), (3, 4)]
    assert pairs(told(chain, silent=(4,))) == [(1, 2), (2, 3)]


@pytest.mark.parametrize("count", [1, notes.NOTE_CHUNKS])
def test_a_note_round_trip(count: int) -> None:
    chunks = [(1 << 47 | index, 16 + index) for index in range(count)]
    assert len(notes.note(chunks)) == notes.NOTE_NUMBERS
    assert notes.read_note(notes.note(chunks)) == chunks


@pytest.mark.parametrize("start", [[0], [-1], [7], [1], [1, -5, 16], [1, 5, 0], [2, 5, 16, 0, 8]])
def test_a_note_that_cannot_be(start: list[int]) -> None:
    with pytest.raises(RemoteProtocolError):
        notes.read_note(start + [0] * (notes.NOTE_NUMBERS - len(start)))


# Transfers


class Counting:
    """A group that counts the bytes it sends to each rank."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.sent: Counter[int] = Counter()

    def rank(self) -> int:
        return int(self.group.rank())

    def size(self) -> int:
        return int(self.group.size())

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self.group.recv(tensors, src, tag)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.sent[dst] += tensors[0].nbytes
        return self.group.send(tensors, dst, tag)


class Told(NamedTuple):
    report: tr.Report
    sent: dict[int, int]  # bytes by rank, notes and control messages included


def machine_of(rank: int) -> contextlib.AbstractContextManager[None]:
    """Where a rank says it is: receivers together, the sender elsewhere."""
    return contextlib.nullcontext() if rank else elsewhere(machine="another")


def chain(rank: int, group: Any, meddling: str = "", fresh: bool = False, **how: Any) -> Told:
    """One transfer to ranks 1, 2, 3, of which rank 2, or another, does what `meddling` says."""
    counting = Counting(group)
    meddler, meddle = MEDDLINGS.get(meddling, (0, contextlib.nullcontext))
    options = {"chunk_bytes": CHUNK, "join_window": 5.0, **how}
    atomic, route = options.pop("atomic", True), options.pop("routes", {}).get(rank)
    with machine_of(rank), meddle() if rank == meddler else contextlib.nullcontext():
        relay = tr.Relay(counting, timeout=TIMEOUT, route=route, **options)
        if rank == 0:
            return Told(relay.send(weights(NEW), [1, 2, 3], step=NEW), counting.sent)
        live = None if fresh else weights(OLD)
        got = relay.recv(0, into=live, step=NEW, atomic=atomic)
    assert same(got.state, weights(NEW)) and (fresh or same(live, weights(NEW)))
    return Told(got.report, counting.sent)


def chain_with(rank: int, group: Any, how: dict[str, Any]) -> Told:
    return chain(rank, group, **how)


@contextlib.contextmanager
def reading(change: Callable[[int, Callable[[], None], int], None]) -> Iterator[None]:
    """Within: reads of this process are done by `change(number, read, destination)`."""
    original, count, lock = handing.read_run, [0], threading.Lock()

    def read(pid: int, address: int, destination: int, nbytes: int) -> None:
        with lock:
            count[0] += 1
        change(count[0], lambda: original(pid, address, destination, nbytes), destination)

    with patched(handing, read_run=read):
        yield


def refuse_from(first: int) -> contextlib.AbstractContextManager[None]:
    def change(number: int, read: Callable[[], None], destination: int) -> None:
        if number >= first:
            raise OtherMemoryError(errno.EPERM, "refused by this test")
        read()

    return reading(change)


def spoil_fourth() -> contextlib.AbstractContextManager[None]:
    def change(number: int, read: Callable[[], None], destination: int) -> None:
        read()
        if number == 4:
            ctypes.c_uint8.from_address(destination + 7).value ^= 0x10

    return reading(change)


def noting(change: Callable[[list[int]], list[int]]) -> contextlib.AbstractContextManager[None]:
    original = notes.note
    return patched(notes, note=lambda chunks: change(original(chunks)))


def join_as_if_willing(self: Any) -> wire.Join:
    assert self._route == "group"
    return wire.Join(NEW, place.here(), b"n" * wire.NONCE_BYTES)


def no_files(claim: bytes) -> Any:
    raise OSError(errno.ENOSYS, "refused by this test")


def answer_too_many(self: Any, count: int) -> None:
    self._say([count + 7])


MEDDLINGS: dict[str, tuple[int, Callable[[], contextlib.AbstractContextManager[None]]]] = {
    "no token": (2, lambda: patched(place, cannot_read=refused)),
    "refused": (2, lambda: refuse_from(1)),
    "refused later": (2, lambda: refuse_from(5)),
    "spoiled": (2, spoil_fourth),
    "no proof": (2, lambda: patched(place, Proof=no_files)),
    "traded": (2, lambda: patched(Receiving, _join=join_as_if_willing)),
    "wild addresses": (1, lambda: noting(lambda n: [n[0], 1 << 46, n[2], *n[3:]])),
    "wrong sizes": (1, lambda: noting(lambda n: [*n[:2], n[2] + 16, *n[3:]])),
    "wrong counts": (1, lambda: noting(lambda n: [99, *n[1:]])),
    "wrong answers": (2, lambda: patched(handing._Reading, _answer=answer_too_many)),
}
LITTLE = 16 << 10
"""More bytes than the notes and messages of a transfer, fewer than a chunk."""


def check(results: list[Told], handed: list[str], sent_on: list[str]) -> None:
    """What receivers read and what they sent on: "all", "none" or "some" of the state."""
    ours, *theirs = results
    assert ours.report.receivers == (1, 2, 3) and ours.report.failed == {}
    assert ours.report.routes == dict.fromkeys((1, 2, 3), "group") and ours.report.verified
    total = ours.report.wire_bytes
    assert ours.report.bytes <= total <= ours.sent[1] < total + LITTLE
    assert ours.sent[2] < LITTLE and ours.sent[3] < LITTLE  # about one state in all

    def share(nbytes: int) -> str:
        if nbytes < LITTLE:
            return "none"
        return "all" if total <= nbytes < total + LITTLE else "some"

    assert [one.report.wire_bytes for one in theirs] == [total] * 3
    assert [share(one.report.handed_bytes) for one in theirs] == handed
    assert [share(one.sent[rank]) for rank, one in enumerate(theirs, 2)] == sent_on
    assert ours.report.handed_bytes == 0


@pytest.mark.parametrize(
    "how", [{}, {"atomic": False}, {"fresh": True}, {"chunk_bytes": 16 << 10}], ids=str
)
def test_the_state_crosses_once_and_is_read_from_there(pool4: Any, how: dict[str, Any]) -> None:
    results = pool4.run(chain_with, how)
    check(results, ["none", "all", "all"], ["none"] * 3)
    assert "read from the receiver before" in results[2].report.explain()


@pytest.mark.parametrize(
    ("meddling", "handed", "sent_on"),
    [
        ("no token", ["none", "none", "all"], ["all", "none", "none"]),
        ("refused", ["none", "none", "all"], ["all", "none", "none"]),
        ("refused later", ["none", "some", "all"], ["some", "none", "none"]),
        ("no proof", ["none", "all", "none"], ["none", "all", "none"]),
        ("wild addresses", ["none", "none", "all"], ["all", "none", "none"]),
    ],
)
def test_what_cannot_be_read_is_sent(
    pool4: Any, meddling: str, handed: list[str], sent_on: list[str]
) -> None:
    check(pool4.run(chain, meddling), handed, sent_on)


@pytest.mark.parametrize(
    "how", [{"verify": False}, {"routes": {0: "group"}}, {"routes": {2: "group"}}], ids=str
)
def test_who_does_not_want_it_is_sent_chunks(pool4: Any, how: dict[str, Any]) -> None:
    ours, *theirs = pool4.run(chain_with, how)
    assert ours.report.receivers == (1, 2, 3)
    assert [one.report.handed_bytes for one in theirs] == [0, 0, 0]
    assert theirs[0].sent[2] >= ours.report.bytes and theirs[1].sent[3] >= ours.report.bytes


def test_who_does_not_want_it_does_not_read_if_told_to(pool4: Any) -> None:
    results = pool4.run(chain_with, {"meddling": "traded", "routes": {2: "group"}})
    check(results, ["none", "none", "all"], ["all", "none", "none"])


def test_a_spoiled_read_is_asked_for_again_and_not_passed_on(pool4: Any) -> None:
    ours, one, two, three = pool4.run(chain, "spoiled")
    assert ours.report.receivers == (1, 2, 3) and ours.report.failed == {}
    total = one.report.wire_bytes
    extra = two.report.wire_bytes - total
    assert 0 < extra <= CHUNK <= ours.sent[2] and two.report.handed_bytes == total
    # Rank 3 got what was right from rank 2, and the rest from the sender.
    assert three.report.wire_bytes == total and three.report.handed_bytes < total
    assert 3 in ours.report.rerouted


@pytest.mark.parametrize("meddling", ["wrong sizes", "wrong counts", "wrong answers"])
def test_a_neighbour_that_speaks_nonsense_is_gone_round(pool4: Any, meddling: str) -> None:
    how = {"meddling": meddling, "join_window": 1.0}
    ours, *_ = pool4.run(chain_with, how, fresh_group=True)
    assert ours.report.receivers == (1, 2, 3) and ours.report.failed == {}
    assert 2 in ours.report.rerouted


def two_machines(rank: int, group: Any) -> Told:
    """Ranks 1 and 3 are on one machine, 2 and 4 on another, the sender on a third."""
    counting = Counting(group)
    with elsewhere(machine="ABABA"[rank] if rank else "C"):
        relay = tr.Relay(counting, timeout=TIMEOUT, chunk_bytes=CHUNK, join_window=5)
        if rank == 0:
            return Told(relay.send(weights(NEW), [1, 2, 3, 4]), counting.sent)
        got = relay.recv(0)
    assert same(got.state, weights(NEW))
    return Told(got.report, counting.sent)


def test_each_machine_gets_the_state_once() -> None:
    ours, one, two, three, four = run_ranks(two_machines, 5, timeout=START)
    total = ours.report.wire_bytes
    assert ours.report.bytes <= total <= ours.sent[1] < total + LITTLE
    assert [t.report.handed_bytes for t in (one, two, three, four)] == [0, 0, total, total]
    assert one.sent[3] < LITTLE <= total <= three.sent[2] and two.sent[4] < LITTLE


# Deaths and stops


KILLS = (([1, 2, 3], 1, 2), ([2, 4, 3], 4, 4), ([2, 3, 5], 5, 5), ([6, 2, 3], 6, 6))
"""Receivers, the one that is killed, and the one that is held meanwhile: rank 2 as it is about to
read from the dead, or the victim itself, in the middle or at the end of the chain, or before it."""


def loses_one(rank: int, group: Any) -> list[Outcome]:
    live, seed, outcomes = weights(OLD), OLD, []
    with machine_of(rank):
        relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=20)
        for number, (receivers, victim, holder) in enumerate(KILLS):
            if rank == 0:
                outcomes.append(sent(relay, number, receivers, TIMEOUT))
            elif rank in receivers:
                spot = DATA if victim == receivers[0] == holder else READ
                hold = held_at(spot, "there") if rank == holder else contextlib.nullcontext()
                with hold:
                    outcomes.append(received(relay, 0, live, seed, number, 60))
                seed = number
    return outcomes


def test_a_dead_receiver_fails_nobody_else() -> None:
    with Ranks(loses_one, 7) as ranks:
        for _, victim, holder in KILLS:
            ranks.wait_reached(holder, "there", START)
            ranks.kill(victim)
            if holder != victim:
                ranks.release(holder)
        ours, *theirs = ranks.results(60, ranks=[0, 2, 3])
    for number, (receivers, victim, _) in enumerate(KILLS):
        # One that reads from another may die when the sender has told it all that it needs.
        lost = ours[number].failed + ours[number].unknown
        assert ours[number].error is None and lost == (victim,), (victim, ours)
        assert set(ours[number].receivers) == set(receivers) - {victim}
        for out in theirs:
            assert out[number].error is None and out[number].weights == number, (victim, out)
            assert out[number].seconds < TIMEOUT


STOPS = ((1, "data"), (2, "data"), (2, "read"), (3, "read"))


def stops_one(rank: int, group: Any) -> list[Any]:
    live, seed, outcomes = weights(OLD), OLD, []
    with machine_of(rank):
        relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=1.0)
        for number, (victim, phase) in enumerate(STOPS):
            faulty, after = number * 10, number * 10 + 1
            spot = READ if phase == "read" else DATA
            hold = held_at(spot, "there") if rank == victim else contextlib.nullcontext()
            with hold:
                if rank == 0:
                    first = sent(relay, faulty, [1, 2, 3], TIMEOUT)
                else:
                    first = received(relay, 0, live, seed, faulty, TIMEOUT)
            reached("over", hold=True)
            if rank == 0:
                again = sent(relay, after, [1, 2, 3], TIMEOUT)
            else:
                before = seed if rank == victim else faulty
                assert verdict(live, before) == before, "changed behind our back"
                again = received(relay, 0, live, before, after, TIMEOUT)
                seed = after
            outcomes.append((first, again))
    return outcomes


@pytest.mark.slow
def test_a_stopped_receiver_delays_nobody_else() -> None:
    with Ranks(stops_one, 4) as ranks:
        for victim, _ in STOPS:
            ranks.wait_reached(victim, "there", START)
            ranks.stop(victim)
            for rank in {0, 1, 2, 3} - {victim}:
                ranks.wait_reached(rank, "over")
            ranks.cont(victim)
            ranks.release(victim)
            ranks.wait_reached(victim, "over")
            for rank in range(4):
                ranks.release(rank)
        results = ranks.results(30)
    for number, (victim, phase) in enumerate(STOPS):
        scene = [result[number] for result in results]
        assert scene[0][0].failed == (victim,), (victim, phase, scene)
        assert scene[victim][0].error == "PeerAbortedError", (victim, phase, scene)
        for rank in {1, 2, 3} - {victim}:
            assert scene[rank][0].error is None and scene[rank][0].weights == number * 10, scene
        for rank in {0, 1, 2, 3} - {victim}:
            assert scene[rank][0].seconds < 8, (victim, phase, scene)
        assert all(again.error is None for _, again in scene), (victim, phase, scene)
        assert all(again.weights == number * 10 + 1 for _, again in scene[1:]), scene
