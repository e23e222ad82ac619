"""Connections beside the group: how they are made, cut, lost and used again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.faults import CHUNK, Outcome, attempt, received, sent, verdict, weights
from tests.support.ways import by, patched
from torchrelay.deadlines import Deadline
from torchrelay.record.digest import digest, running_digest
from torchrelay.transports.protocol.machines import fanout
from torchrelay.transports.routes import connections
from torchrelay.transports.routes.sockets import addresses, channels
from torchrelay.transports.routes.sockets import tcp as lanes
from torchrelay.transports.routes.sockets.channels import (
    TOKEN_BYTES,
    Channel,
    Channels,
    channels_of,
)
from torchrelay.transports.routes.sockets.tcp import Lanes
from torchrelay.transports.transfer import intake

OLD, LONG = 100, 25.0
SOON = 10.0  # seconds within which a thread that was woken up has answered


# One channel, without ranks


def pair(count: int = 1) -> tuple[Lanes, Lanes]:
    sockets = [socket.socketpair() for _ in range(count)]
    return Lanes("x", [a for a, _ in sockets]), Lanes("x", [b for _, b in sockets])


class Told:
    """A report that can be waited for."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.digest = b""
        self._there = threading.Event()

    def __call__(self, fault: Exception | None, read: bool, digest: bytes = b"") -> None:
        self.fault, self.digest = fault, digest
        self._there.set()

    def wait(self) -> Told:
        assert self._there.wait(SOON)
        return self


def test_chunks_come_in_order_over_several_connections() -> None:
    out, into = pair(3)
    chunks = [torch.full((50_000 + n,), n, dtype=torch.uint8) for n in range(20)]
    rooms = [torch.zeros_like(chunk) for chunk in chunks]
    sending, receiving = out.way_on(7), into.way_in(7)
    told = [Told() for _ in range(2 * len(chunks))]
    for chunk, room, (ours, theirs) in zip(
        chunks, rooms, zip(told[:20], told[20:], strict=True), strict=True
    ):
        receiving.put(room, theirs)
        sending.put(chunk, ours)
    assert [one.wait().fault for one in told] == [None] * 40
    assert all(torch.equal(a, b) for a, b in zip(chunks, rooms, strict=True))
    sending.close()
    receiving.close()


@pytest.mark.parametrize("size", [1, lanes.IN_CACHE, 3 * lanes.IN_CACHE + 7])
def test_digests_are_made_on_the_way(size: int) -> None:
    out, into = pair(2)
    make = torch.Generator().manual_seed(size)
    chunks = [torch.randint(0, 256, (size,), generator=make, dtype=torch.uint8) for _ in range(3)]
    sending, receiving = out.way_on(7, hashes=True), into.way_in(7, hashes=True)
    for chunk in chunks:
        ours, theirs, room = Told(), Told(), torch.zeros_like(chunk)
        receiving.put(room, theirs)
        sending.put(chunk, ours)
        assert ours.wait().digest == theirs.wait().digest == digest(chunk)
        assert torch.equal(room, chunk)
    sending.close()
    receiving.close()


def test_pieces_become_chunks_where_another_thread_keeps_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = memoryview(bytearray(8 * lanes.IN_CACHE))
    pieces = lanes._Pieces()
    assert [piece.nbytes for piece in pieces.of(data)] == [lanes.IN_CACHE] * 8
    monkeypatch.setattr(lanes, "SLOW_SECONDS", -1.0)  # as if each took long
    sizes = []
    for piece in pieces.of(data):
        pieces.hash(running_digest(), piece)
        sizes.append(piece.nbytes)
    assert sizes == [lanes.IN_CACHE] * lanes.OFTEN + [4 * lanes.IN_CACHE]
    assert [piece.nbytes for piece in pieces.of(data)] == [data.nbytes]


def test_nothing_is_written_once_it_is_cut() -> None:
    here, there = socket.socketpair()
    into = Lanes("x", [here])
    room, told = torch.zeros(64 << 20, dtype=torch.uint8), Told()
    way = into.way_in(7)
    way.put(room, told)
    there.sendall(lanes.NUMBER.pack(7) + b"\1" * 100_000)
    ends = time.monotonic() + SOON
    while not room[50_000] and time.monotonic() < ends:
        pass  # it is in the middle of the chunk
    assert room[50_000]
    into.cut()
    assert not into.whole
    written = room.clone()
    with contextlib.suppress(OSError):
        there.sendall(b"\1" * 1_000_000)
    assert isinstance(told.wait().fault, OSError)
    later = Told()
    way.put(room, later)
    assert isinstance(later.wait().fault, OSError)
    assert torch.equal(room, written)
    way.close()


def test_a_cut_wakes_up_who_sends() -> None:
    out, into = pair()
    told = Told()
    way = out.way_on(7)
    way.put(torch.zeros(64 << 20, dtype=torch.uint8), told)  # more than anybody buffers
    out.cut()
    assert isinstance(told.wait().fault, OSError)
    way.close()
    into.cut()


def test_bytes_of_another_transfer_are_not_taken() -> None:
    out, into = pair()
    room, told = torch.zeros(10, dtype=torch.uint8), Told()
    sending, receiving = out.way_on(7), into.way_in(8)
    sending.put(torch.ones(10, dtype=torch.uint8), Told())
    receiving.put(room, told)
    assert "another transfer" in str(told.wait().fault)
    assert not room.any()
    sending.close()
    receiving.close()


# How two find each other


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Iterator[channels.ChannelUse]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    use = Channels().propose(1, 2, near=False)
    yield use
    use.end(keep=False)


def test_only_who_knows_the_token_is_let_in(proposed: channels.ChannelUse) -> None:
    record = proposed.record
    assert record is not None
    told = b"t" * TOKEN_BYTES
    strangers = [socket.create_connection((record.host, record.port))]  # it says nothing
    for said in (
        b"GET / HTTP/1.1\r\n\r\n" + bytes(99),
        bytes(TOKEN_BYTES + 4),
        told + lanes.NUMBER.pack(2),  # the third of two
        told[:-1],
    ):
        one = socket.create_connection((record.host, record.port))
        one.sendall(said)
        one.shutdown(socket.SHUT_WR)
        strangers.append(one)
    with patched(channels.secrets, token_bytes=lambda count: told[:count]):
        guest = Channels().answer(0, record, 1, LONG)
    assert guest.token == told
    guest.agreed(Deadline(LONG))
    proposed.agreed(Deadline(LONG), guest.token)
    assert proposed.channel is not None and guest.channel is not None
    assert proposed.connections == guest.connections == 2
    for one in strangers:
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
        one.close()
    heard, room = Told(), torch.zeros(5, dtype=torch.uint8)
    guest.channel.way_in(3).put(room, heard)
    proposed.channel.way_on(3).put(torch.ones(5, dtype=torch.uint8), Told())
    assert heard.wait().fault is None and room.all()
    guest.end(keep=False)


def test_a_receiver_that_never_connects_costs_a_bounded_wait(
    proposed: channels.ChannelUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CONNECT_SECONDS", 0.05)
    proposed.agreed(Deadline(LONG), bytes(TOKEN_BYTES))
    assert proposed.channel is None and "timed out" in proposed.instead["connections"]


def test_who_cannot_be_reached_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    tries = []
    connect = socket.create_connection

    def counted(*args: Any) -> socket.socket:
        tries.append(args)
        return connect(*args)

    monkeypatch.setattr(socket, "create_connection", counted)
    monkeypatch.setattr(channels, "check_peer", lambda host: None)
    here = Channels()
    record = Channel("x", 2, "127.0.0.1", port)
    for _ in range(3):
        use = here.answer(0, record, 2, LONG)
        assert use.record is None and "refused" in use.instead["connections"]
    assert len(tries) == 1
    monkeypatch.setattr(channels, "TRY_AGAIN_SECONDS", 0.0)
    here.answer(0, record, 2, LONG)
    assert len(tries) == 2


def test_who_had_no_time_to_connect_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(record: Channel, token: bytes, ends: float) -> Lanes:
        tries.append(record)
        raise TimeoutError("timed out")

    monkeypatch.setattr(channels, "_connect", too_slow)
    monkeypatch.setattr(channels, "check_peer", lambda host: None)
    here, tries = Channels(), []
    record = Channel("x", 2, "127.0.0.1", 5)
    for left, count in ((0.1, 1), (0.1, 2), (LONG, 3), (LONG, 3)):
        assert "timed out" in here.answer(0, record, 2, left).instead["connections"]
        assert len(tries) == count


@pytest.mark.parametrize(
    "record",
    [
        Channel("x", 0, "127.0.0.1", 1),
        Channel("x", 17, "127.0.0.1", 1),
        Channel("x", -1, "127.0.0.1", 1),
        Channel("kept there, lost here", 2),
        Channel("x", 1, "127.0.0.1", 70_000),
        Channel("x", 1, "127.0.0.1", -5),
        Channel("x", 1, "no such host.invalid", 5),
        Channel("x", 1, "a" * 300, 5),
        Channel("x", 1, "a\0b", 5),
    ],
    ids=repr,
)
def test_a_proposal_that_cannot_be(record: Channel) -> None:
    assert Channels().answer(0, record, 2, 1.0).record is None


def test_who_is_near_is_not_listened_for_until_it_takes_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    here = Channels()
    use = here.propose(1, 2, near=True)
    assert use.record is None
    use.answered("host", b"", Deadline(LONG))
    assert here.propose(1, 2, near=True).record is None
    use.answered("group", b"", Deadline(LONG))
    again = here.propose(1, 2, near=True)
    assert again.record is not None
    again.end(keep=False)
    assert here.propose(2, 2, near=True).record is None


def test_idle_channels_are_few() -> None:
    here = Channels()
    give = here._giver("out", 1)
    ends = [pair() for _ in range(channels.KEPT + 2)]
    for mine, _ in ends:
        give(mine)
    assert [mine.whole for mine, _ in ends] == [False, False] + [True] * channels.KEPT
    for mine, other in ends:
        mine.cut()
        other.cut()


def test_the_address_is_where_gloo_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def where() -> str:
        with addresses.listen_here() as listener:
            return str(listener.getsockname()[0])

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert where() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface,lo")
    assert where() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(OSError):
        where()
    use = Channels().propose(1, 2, near=False)
    assert use.record is None and "connections" in use.instead
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, address in (("localhost", "127.0.0.1"), ("no such host.invalid", "127.0.0.1")):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert where() in (address, "::1")


# Between ranks


def one_transfer(rank: int, relay: tr.Relay, seed: int, live: Any, **options: Any) -> Any:
    """How it went, and the report where it went well."""
    if rank == 0:
        report: Any = relay.send(weights(seed), 1, step=seed)
        return report.connections, report.instead.get("connections")
    before = live["seed"]
    got = relay.recv(0, into=live, step=seed, **options)
    assert verdict(live, before, seed) == seed
    return got.report.connections, got.report.instead.get("connections")


def idle(group: Any, rank: int) -> list[str]:
    side = ("out", 1) if rank == 0 else ("in", 0)
    return [channel.id for channel in channels_of(group)._idle.get(side, [])]


def again_and_again(rank: int, group: Any) -> Any:
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=3, timeout=LONG), weights(OLD)
    found = []
    for seed in range(4):
        told = one_transfer(rank, relay, seed, live, atomic=bool(seed % 2))
        found.append((told, idle(group, rank)))
    return found


def test_a_channel_is_used_again(pool2: Any) -> None:
    ours, theirs = pool2.run(by, "channel", again_and_again, fresh_group=True)
    assert [told for told, _ in ours] == [(3, None)] * 4 == [told for told, _ in theirs]
    ids = {tuple(kept) for _, kept in (*ours, *theirs[:-1])}
    assert len(ids) == 1 and len(next(iter(ids))) == 1


def not_wanted(rank: int, group: Any, ours: int, theirs: int) -> Any:
    relay = tr.Relay(group, chunk_bytes=CHUNK, connections=(ours, theirs)[rank], timeout=LONG)
    return one_transfer(rank, relay, 1, weights(OLD))


@pytest.mark.parametrize(("ours", "theirs"), [(0, 2), (2, 0), (0, 0)])
def test_either_side_can_do_without(pool2: Any, ours: int, theirs: int) -> None:
    assert pool2.run(by, "channel", not_wanted, ours, theirs) == [(0, None)] * 2


def test_a_small_state_needs_none(pool2: Any) -> None:
    assert pool2.run(by, "group", not_wanted, 2, 2) == [(0, None)] * 2


@pytest.mark.parametrize("number", [-1, 17])
def test_connections_are_a_number(pool2: Any, number: int) -> None:
    pool2.run(refused_number, number)


def refused_number(rank: int, group: Any, number: int) -> None:
    with pytest.raises(tr.UsageError, match="connections"):
        tr.Relay(group, connections=number)


def kept_from_connecting(rank: int, group: Any, who: str) -> Any:
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG), weights(OLD)
    found = []

    def unreachable(*args: Any) -> Any:
        raise OSError("no way there")

    def forged(record: Channel, token: bytes, ends: float) -> Lanes:
        return real(record, bytes(TOKEN_BYTES), ends)

    real = channels._connect
    with contextlib.ExitStack() as stack:
        if who == "sender" and rank == 0:
            stack.enter_context(patched(channels, listen_here=unreachable))
        if who == "receiver" and rank == 1:
            stack.enter_context(patched(channels, _connect=unreachable))
        if who == "token":
            stack.enter_context(patched(channels, CONNECT_SECONDS=0.3))
            if rank == 1:
                stack.enter_context(patched(channels, _connect=forged))
        found.append(one_transfer(rank, relay, 1, live))
    with patched(channels, TRY_AGAIN_SECONDS=0.0):
        found.append(one_transfer(rank, relay, 2, live))
    return found


@pytest.mark.parametrize("who", ["sender", "receiver", "token"])
def test_what_cannot_connect_goes_over_the_group_and_says_so(pool2: Any, who: str) -> None:
    ours, theirs = pool2.run(by, "channel", kept_from_connecting, who, fresh_group=True)
    assert ours[0][0] == theirs[0][0] == 0
    told = {"sender": ours, "token": ours, "receiver": theirs}[who]
    assert "not made" in told[0][1]
    assert ours[1] == theirs[1] == (2, None)


def hashed(rank: int, group: Any, ours: bool, theirs: bool) -> Any:
    """Each side hashes on the way or beside it, as it likes."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG), weights(OLD)
    mine = (ours, theirs)[rank]
    with patched(connections, on_the_way=lambda: mine), patched(intake, on_the_way=lambda: mine):
        return [one_transfer(rank, relay, seed, live, atomic=seed > 1) for seed in (1, 2)]


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_who_hashes_does_not_matter(pool2: Any, ours: bool, theirs: bool) -> None:
    assert pool2.run(by, "channel", hashed, ours, theirs) == [[(2, None)] * 2] * 2


def broken(rank: int, group: Any, who: int, nth: int, verify: bool, atomic: bool) -> Any:
    """The connections break under a transfer, at one end or the other."""
    relay = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG, verify=verify)
    live = weights(OLD)
    count, lock = [0], threading.Lock()
    name = ("send", "fill")[who]
    original = getattr(lanes._Lane, name)

    def breaks(self: Any, data: memoryview) -> None:
        with lock:
            count[0] += 1
            now = count[0] == nth
        if now:
            self._connection.shutdown(socket.SHUT_RDWR)
        original(self, data)

    with contextlib.ExitStack() as stack:
        if rank == who:
            stack.enter_context(patched(lanes._Lane, **{name: breaks}))
        if rank == 0:
            first: Outcome = sent(relay, 1, 1, LONG)
        else:
            first = received(relay, 0, live, OLD, 1, LONG, atomic=atomic)
    after = one_transfer(rank, relay, 2, live)
    return first, count[0] >= nth, after


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("who", "nth"), [(0, 1), (0, 6), (1, 2), (1, 9)])
def test_connections_that_break_are_not_the_end(
    pool2: Any, who: int, nth: int, verify: bool, atomic: bool
) -> None:
    ours, theirs = pool2.run(by, "channel", broken, who, nth, verify, atomic, fresh_group=True)
    for out, _, after in (ours, theirs):
        assert out.error is None, out
        assert after == (2, None)
    assert (ours, theirs)[who][1], "nothing was broken"
    assert theirs[0].weights == 1


def forgotten(rank: int, group: Any) -> Any:
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG), weights(OLD)
    found = [one_transfer(rank, relay, 1, live)]
    if rank == 1:
        kept = channels_of(group)._idle.pop(("in", 0))
        for channel in kept:
            channel.cut()
    found += [one_transfer(rank, relay, seed, live) for seed in (2, 3)]
    return found


def test_a_channel_that_one_side_lost_is_made_anew(pool2: Any) -> None:
    ours, theirs = pool2.run(by, "channel", forgotten, fresh_group=True)
    assert ours == theirs == [(2, None), (0, None), (2, None)]


def in_one_piece(rank: int, group: Any, atomic: bool) -> Any:
    """Which chunks came to their places without a buffer, of how many."""
    relay = tr.Relay(group, chunk_bytes=1 << 20, connections=2, timeout=LONG)
    state = {
        "large": torch.arange(1 << 20, dtype=torch.int64) + rank,
        "strided": torch.full((1 << 10, 2 << 10), float(rank))[:, ::2],
        "tail": torch.zeros((2 << 20) + 5, dtype=torch.uint8) + rank,
    }
    if rank == 0:
        relay.send(state, 1)
        return None
    rooms = []
    original = intake.Intake._make_room

    def noted(self: Any, slot: Any, chunk: int) -> bool:
        there = original(self, slot, chunk)
        rooms.append(slot.buffer is None)
        return there

    with patched(intake.Intake, _make_room=noted):
        relay.recv(0, into=state, atomic=atomic)
    assert torch.equal(state["large"], torch.arange(1 << 20))
    assert not state["strided"].any() and not state["tail"].any()
    return rooms.count(True), len(rooms)


@pytest.mark.parametrize("atomic", [True, False])
def test_large_tensors_come_straight_to_their_place(pool2: Any, atomic: bool) -> None:
    direct, total = pool2.run(by, "channel", in_one_piece, atomic)[1]
    assert direct >= 8 + 2, (direct, total)  # of the large one, and of the one with a tail
    if not atomic:
        assert total - direct >= 4  # the strided one, and the tail


# Who holds up the others


def test_a_judge_hears_all_before_it_judges() -> None:
    hops = fanout.chain(0, [1, 2, 3])
    judge = fanout.StallJudge()
    assert judge.verdict(hops, 0, 1e9) is None
    judge.blocked(1, 10.0, 2.0)
    judge.blocked(3, 11.0, 2.0)
    judge.starving(3, 11.5, 2.0)
    assert judge.verdict(hops, 0, 11.9) is None
    assert judge.verdict(hops, 0, 12.0) == ([3], 3)
    assert judge.verdict(hops, 0, 1e9) is None


def gone(rank: int, group: Any) -> Any:
    """A sender that gives up with bytes on their way."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG), weights(OLD)
    if rank == 0:

        def stop(done: tr.Progress) -> None:
            raise KeyboardInterrupt

        try:
            relay.send(weights(1), 1, progress=stop)
        except KeyboardInterrupt:
            first = "interrupted"
    else:
        out = attempt(lambda: relay.recv(0, into=live))
        assert verdict(live, OLD) == OLD
        first = str(out.error)
    return first, one_transfer(rank, relay, 2, live)


def test_a_sender_that_is_interrupted(pool2: Any) -> None:
    ours, theirs = pool2.run(by, "channel", gone, fresh_group=True)
    assert ours == ("interrupted", (2, None))
    assert theirs == ("PeerAbortedError", (2, None))
