"""The wire's records and the fan-out's schedule, without processes."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.errors import RemoteProtocolError
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines import fanout

RANKS = 8
PLACE = wire.Place("b7e1", 1000, 4026531836, 4321)
MESSAGES: list[wire.Message] = [
    wire.Join(None),
    wire.Join(1 << 60),
    wire.Join(5, PLACE),
    wire.Join(None, PLACE, b"n" * 16, 9),
    wire.Survey(),
    wire.Select((wire.Cut(3, (0, 1), (2, 1 << 40)), wire.Cut(0, (), ()))),
    wire.Inventory(b"{}" * 5000),
    wire.Selected((1 << wire.ID_BITS) - 1),
    wire.Accept(),
    wire.Accept("host", b"ring", {"cuda_ipc": "no GPU"}, (3, 5)),
    wire.Word(b"\x92\x03\x01"),
    wire.Pulled(),
    wire.Refuse("mismatch", "dtype differs", "model.weight"),
    wire.Refuse("step", "x" * 3000),
    wire.Blocked(3),
    wire.Stalled(),
    wire.Need(tuple(range(200)), 2),
    wire.Unlink(),
    wire.Done(),
    wire.Leave("gave up", True),
    wire.Offer(b"\x93" * 5000, False),
    wire.Offer(b""),
    wire.Offer(b"x", True, "cpu", True, {"host": wire.RouteOffer(b"m", b"r" * 24)}, "host"),
    wire.Go(0, 2, (1 << wire.ID_BITS) - 1, 2.5),
    wire.Go(1),
    wire.Go(0, patience=1.0, threads=4, word=b"ring", route="host"),
    wire.Go(3, 2, 7, 1.0, reads=True, notes=True),
    wire.Knock(),
    wire.Detach(),
    wire.Reroute(),
    wire.Hashes(8, (b"d" * 16,) * 40),
    wire.Trailer((b"d" * 16,) * 40),
    wire.Fin(),
    wire.Abort("disk on fire"),
]


# Prelude


@pytest.mark.parametrize("transfer", [0, 1, 12345, (1 << wire.ID_BITS) - 1])
def test_prelude_round_trip(transfer):
    value = wire.prelude(transfer)
    assert -(1 << 63) <= value < 0
    assert wire.read_prelude(value) == transfer


@pytest.mark.parametrize("length", [0, 1, 812, 1 << 40, (1 << 63) - 1])
def test_a_torch_senders_length_is_recognised(length):
    assert wire.read_prelude(length) is None


def test_another_major_version_names_both():
    theirs = wire.prelude(7) + (41 << 32)
    with pytest.raises(RemoteProtocolError, match=rf"version {wire.MAJOR + 41}.* {wire.MAJOR}\b"):
        wire.read_prelude(theirs)


@pytest.mark.parametrize("value", [-1, -(1 << 63), wire.prelude(0) + (1 << wire.ID_BITS)])
def test_other_negative_numbers_are_refused(value):
    with pytest.raises(RemoteProtocolError, match="no torchrelay or torch sender"):
        wire.read_prelude(value)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_number_is_a_length_an_id_or_an_error(value):
    try:
        transfer = wire.read_prelude(value)
    except RemoteProtocolError:
        return
    assert (transfer is None) == (value >= 0)
    assert transfer is None or wire.prelude(transfer) == value


def test_tags_are_apart():
    ids = [0, 1, 2, 1 << 20, (1 << wire.ID_BITS) - 1]
    tags = [wire.tag(one, lane) for one in ids for lane in range(wire.LANES)]
    assert len(set(tags)) == len(tags)
    assert all(1 << 30 <= tag < 1 << 31 for tag in tags)  # a signed 32-bit number, far from torch's


# Frames


def opened(head: bytes, payload: bytes) -> wire.Message:
    length, inline = wire.read_frame(head)
    assert inline is not None or length == len(payload)
    return wire.read_message(payload if inline is None else inline, RANKS)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_frame_round_trip(message):
    for nbytes in (wire.FRAME_BYTES, wire.FIRST_FRAME_BYTES):
        head, payload = wire.frame(message, nbytes)
        assert len(head) == nbytes
        assert opened(head, payload) == message


def test_what_a_receiver_says_first_is_one_message():
    place = wire.Place("m" * 36, 65534, 1 << 32, 1 << 22, ("GPU-" + "d" * 36,) * 4)
    join = wire.Join(1 << 40, place, bytes(16), 1 << 20, bytes(16))
    assert wire.frame(join, wire.FIRST_FRAME_BYTES)[1] == b""


def test_every_message_is_tried():
    assert {type(message) for message in MESSAGES} == set(wire.Message.__args__)
    assert set(wire.TERMINAL) <= set(wire.Message.__args__)


def head_with(magic: bytes = b"TRLY", major: int = wire.MAJOR, length: int = 1) -> bytes:
    return struct.pack("<4sHHQ", magic, major, wire.MINOR, length).ljust(wire.FRAME_BYTES, b"\0")


@pytest.mark.parametrize(
    "head",
    [
        head_with(magic=b"HTTP"),
        head_with(major=wire.MAJOR + 1),
        head_with(length=wire.MAX_MESSAGE_BYTES + 1),
        head_with(length=(1 << 64) - 1),
        bytes(wire.FRAME_BYTES),
    ],
)
def test_bad_heads_are_refused_before_anything_is_allocated(head):
    with pytest.raises(RemoteProtocolError):
        wire.read_frame(head)


def test_the_cap_itself_is_allowed():
    assert wire.read_frame(head_with(length=wire.MAX_MESSAGE_BYTES)) == (1 << 30, None)


@pytest.mark.parametrize("version", [(1, wire.MINOR - 1), (1, wire.MINOR + 1), (2, wire.MINOR)])
def test_a_frame_of_another_version_is_refused(version: tuple[int, int]):
    other = struct.pack("<4sHHQ", b"TRLY", *version, 1).ljust(wire.FRAME_BYTES, b"\0")
    with pytest.raises(
        RemoteProtocolError, match=rf"wire version {version[0]}\.{version[1]}, this"
    ):
        wire.read_frame(other)


def test_twenty_thousand_mutations():
    chance = random.Random(0)
    framed = [wire.frame(message) for message in MESSAGES]
    read = 0
    for _ in range(20_000):
        head, payload = chance.choice(framed)
        if payload and chance.random() < 0.5:
            target = mutated(payload, chance)
            attempt = [lambda payload: wire.read_message(payload, RANKS)]
        else:
            target = mutated(head, chance)[: wire.FRAME_BYTES].ljust(wire.FRAME_BYTES, b"\0")
            attempt = [wire.read_frame, lambda frame: wire.read_message(frame[1] or b"", RANKS)]
        try:
            result: object = target
            for one in attempt:
                result = one(result)
            read += 1
        except RemoteProtocolError:
            pass
    assert 0 < read < 20_000


def mutated(data: bytes, chance: random.Random) -> bytes:
    data = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(data)) if data else 0
        kind = chance.randrange(5)
        if kind == 0 and data:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and data:
            data[at] = chance.choice([0, 0x7F, 0x80, 0x90, 0xC1, 0xDD, 0xDF, 0xFF])
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.randint(1, 9))
        elif kind == 3:
            del data[at : at + chance.randint(1, 30)]
        else:
            other = chance.randrange(len(data)) if data else 0
            data[at : at + 8] = data[other : other + 8]
    return bytes(data)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x92\xa4join\xcb" + b"\0" * 8],
)
def test_known_abuses(payload):
    with pytest.raises(RemoteProtocolError):
        wire.read_message(payload, RANKS)


# Fan-out


def test_chain_in_order():
    assert fanout.chain(9, [4, 2, 7]) == [(4, 9, 2), (2, 4, 7), (7, 2, None)]
    assert fanout.chain(0, [1]) == [(1, 0, None)]


def test_orphans_are_those_behind_the_lost_who_still_lack_something():
    hops = fanout.chain(0, [1, 2, 3, 4])
    assert fanout.orphans(hops, {1}, ()) == [2]
    assert fanout.orphans(hops, {1, 2}, ()) == [3]
    assert fanout.orphans(hops, {1, 3}, ()) == [2, 4]
    assert fanout.orphans(hops, {1, 3}, {4}) == [2]
    assert fanout.orphans(hops, {4}, ()) == []


def test_the_nearest_starving_one_is_fed():
    hops = fanout.chain(0, [1, 2, 3, 4])
    assert fanout.first_starving(hops, {3, 4}, 0) == 3
    assert fanout.first_starving(hops, {1, 2}, 0) is None  # the sender itself is slow
    assert fanout.first_starving(hops, (), 0) is None


def test_the_farthest_blocked_one_is_to_blame():
    hops = fanout.chain(0, [1, 2, 3, 4])
    assert fanout.culprits(hops, {1}) == [1]
    assert fanout.culprits(hops, {1, 3}) == [3]
    assert fanout.culprits(hops, {1, 2, 3, 4}) == [4]
    assert fanout.culprits(hops, ()) == []
    apart = fanout.served_by(hops, 3, 0)  # two chains: 1, 2 and 3, 4
    assert fanout.culprits(apart, {1, 2, 3}) == [2, 3]


def test_another_upstream():
    hops = fanout.served_by(fanout.chain(0, [1, 2, 3]), 2, 0)
    assert hops == [(1, 0, None), (2, 0, 3), (3, 2, None)]


class Simulation:
    """Receivers as counters of chunks, fed along the hops; the sender reroutes as it does live."""

    def __init__(self, receivers: int, chunks: int) -> None:
        self.ranks = list(range(1, receivers + 1))
        self.chunks = chunks
        self.hops = fanout.chain(0, self.ranks)
        self.got: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        self.lost: set[int] = set()

    @property
    def finished(self) -> set[int]:
        return {rank for rank in self.ranks if len(self.got[rank]) == self.chunks}

    def kill(self, rank: int) -> None:
        self.lost.add(rank)
        for orphan in fanout.orphans(self.hops, self.lost, self.finished):
            self.hops = fanout.served_by(self.hops, orphan, 0)

    def step(self) -> bool:
        """One chunk over every link that has one; whether any moved."""
        have = {0: self.chunks, **{rank: len(self.got[rank]) for rank in self.ranks}}
        moved = False
        for hop in self.hops:
            live = hop.rank not in self.lost and hop.upstream not in self.lost
            if live and have[hop.rank] < have[hop.upstream]:
                self.got[hop.rank].append(have[hop.rank])
                moved = True
        return moved


@given(st.integers(1, 7), st.integers(1, 12), st.randoms(use_true_random=False))
def test_whoever_lives_is_fed_each_chunk_once(receivers, chunks, chance):
    run = Simulation(receivers, chunks)
    doomed = chance.sample(run.ranks, chance.randint(0, receivers))
    while True:
        if doomed and chance.random() < 0.3:
            run.kill(doomed.pop())
        elif not run.step():
            if not doomed:
                break
            run.kill(doomed.pop())
    for rank in set(run.ranks) - run.lost:
        assert run.got[rank] == list(range(chunks))


def test_every_order_of_deaths_in_a_chain_of_four():
    for order in itertools.permutations(range(1, 5), 3):
        run = Simulation(4, 9)
        for victim in order:
            run.step()
            run.step()
            run.kill(victim)
        while run.step():
            pass
        [survivor] = set(run.ranks) - run.lost
        assert run.got[survivor] == list(range(9)), order


def test_without_faults_each_chunk_leaves_the_sender_once():
    run = Simulation(5, 20)
    while run.step():
        pass
    assert run.finished == set(run.ranks)
    assert [hop.rank for hop in run.hops if hop.upstream == 0] == [1]
