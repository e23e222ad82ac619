"""Connections to several receivers on the sender's host: used side by side, and each for itself."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

import torchrelay as tr
from tests.support.faults import CHUNK, RECEIVER, held_at, received, sent, verdict, weights
from tests.support.ranks import Ranks
from tests.support.ways import by, elsewhere, patched, taking
from torchrelay.transports.protocol import receiver, wire
from torchrelay.transports.protocol.machines import fanout
from torchrelay.transports.routes.choice import BY_NAME
from torchrelay.transports.routes.sockets import addresses, channels
from torchrelay.transports.routes.sockets import tcp as lanes
from torchrelay.transports.routes.sockets.channels import Channel, Channels
from torchrelay.transports.routes.sockets.tcp import Lanes
from torchrelay.transports.transfer import outflow

OLD, LONG = 100, 25.0
START = 60.0  # seconds for processes to be there


def transfer(rank: int, relay: tr.Relay, seed: int, to: list[int], live: Any, **how: Any) -> Any:
    """Connections, why none, and bytes that the group or connections carried, of whoever is in."""
    if rank == 0:
        report = relay.send(weights(seed), to, step=seed)
        assert report.receivers == tuple(to) and report.verified
    elif rank in to:
        before = live["seed"]
        report = relay.recv(0, into=live, step=seed, **how).report
        assert verdict(live, before, seed) == seed
    else:
        return None
    return report.connections, report.instead.get("connections"), report.wire_bytes


def side_by_side(rank: int, group: Any, to: list[int], atomic: bool) -> Any:
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG), weights(OLD)
    return [transfer(rank, relay, seed, to, live, atomic=atomic) for seed in range(3)]


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("to", [[1, 2], [3, 1, 2]])
def test_each_of_several_has_connections(pool4: Any, to: list[int], atomic: bool) -> None:
    ours, *theirs = pool4.run(by, "channel", side_by_side, to, atomic, fresh_group=True)
    for lap, (connections, why, nbytes) in enumerate(ours):
        assert (connections, why) == (2 * len(to), None)
        each = [theirs[rank - 1][lap] for rank in to]
        assert [told[:2] for told in each] == [(2, None)] * len(to)
        assert nbytes == sum(told[2] for told in each)


def hashes_counted(rank: int, group: Any) -> Any:
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG), weights(OLD)
    beside: list[int] = []
    on_the_way: list[int] = []
    digest, hash_piece = outflow.digest_of, lanes._Pieces.hash

    def counted(data: Any, *, cells: bool) -> bytes:
        beside.append(data.numel())
        return digest(data, cells=cells)

    def noted(self: Any, running: Any, piece: Any) -> None:
        on_the_way.append(piece.nbytes)
        hash_piece(self, running, piece)

    with patched(outflow, digest_of=counted), patched(lanes._Pieces, hash=noted):
        told = transfer(rank, relay, 1, [1, 2, 3], live)
    return told, sum(beside) + sum(on_the_way) if rank == 0 else 0


def test_a_chunk_is_hashed_once_for_all_of_them(pool4: Any) -> None:
    (told, hashed), *theirs = pool4.run(by, "channel", hashes_counted)
    assert told[0] == 6 and told[2] == 3 * hashed
    assert hashed == theirs[0][0][2]


def one_without(rank: int, group: Any, how: str, victim: int) -> Any:
    """One receiver does not get connections; the others do."""
    wants = 0 if how == "not wanted" and rank == victim else 2
    relay = tr.Relay(group, chunk_bytes=CHUNK, connections=wants, timeout=LONG, join_window=4.0)
    live = weights(OLD)

    def unreachable(*args: Any) -> Any:
        raise OSError("no way there")

    def forged(record: Channel, token: bytes, ends: float) -> Lanes:
        return real(record, bytes(channels.TOKEN_BYTES), ends)

    real = channels._connect
    with contextlib.ExitStack() as stack:
        if rank == victim and how in ("refused", "forged"):
            way = unreachable if how == "refused" else forged
            stack.enter_context(patched(channels, _connect=way))
        if rank == victim and how == "another host":
            stack.enter_context(patched(channels, own=lambda host: False))
        if rank == victim and how == "another machine":
            stack.enter_context(elsewhere(machine="another"))
        return [transfer(rank, relay, seed, [1, 2, 3], live, atomic=seed > 1) for seed in (1, 2)]


WITHOUT = ("not wanted", "refused", "forged", "another host", "another machine")


@pytest.mark.parametrize(("how", "victim"), list(zip(WITHOUT, (1, 2, 3, 1, 2), strict=True)))
def test_one_that_has_none_gets_it_over_the_group(pool4: Any, how: str, victim: int) -> None:
    results = pool4.run(by, "channel", one_without, how, victim, fresh_group=True)
    for rank, laps in enumerate(results):
        assert [told[0] for told in laps] == [{0: 4, victim: 0}.get(rank, 2)] * 2, results
    # Who cannot connect says why in its answer, so the sender's report has it too.
    whose = {"refused": (0, victim), "forged": (0,)}.get(how, ())
    for rank, laps in enumerate(results):
        assert all(("not made" in (told[1] or "")) == (rank in whose) for told in laps), results


def over_links(rank: int, group: Any) -> Any:
    """Connections that would share a link, as the sender sees it."""
    relay, live = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG), weights(OLD)
    with patched(lanes._Lane, local=False):
        return [transfer(rank, relay, seed, [1, 2, 3], live) for seed in (1, 2)]


def test_bytes_cross_a_link_once(pool4: Any) -> None:
    ours, *theirs = pool4.run(by, "channel", over_links, fresh_group=True)
    for lap, (connections, why, nbytes) in enumerate(ours):
        assert (connections, why) == (0, None)
        assert [told[lap][:2] for told in theirs] == [(0, None)] * 3
        assert nbytes == theirs[0][lap][2]


def broken_midway(rank: int, group: Any, victim: int, atomic: bool, verify: bool) -> Any:
    relay = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG, verify=verify)
    live, count = weights(OLD), [0]
    original = lanes._Lane.fill

    def breaks(self: Any, data: memoryview) -> None:
        count[0] += 1
        if count[0] == 6:
            self._connection.shutdown(socket.SHUT_RDWR)
        original(self, data)

    with patched(lanes._Lane, fill=breaks) if rank == victim else contextlib.nullcontext():
        if rank == 0:
            first = sent(relay, 1, [1, 2, 3], LONG)
        else:
            first = received(relay, 0, live, OLD, 1, LONG, atomic=atomic)
    relay = tr.Relay(group, chunk_bytes=CHUNK, connections=2, timeout=LONG)
    return first, count[0] >= 6, transfer(rank, relay, 2, [1, 2, 3], live)[0]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("atomic", [True, False])
def test_connections_that_break_are_nobodys_end(pool4: Any, atomic: bool, verify: bool) -> None:
    results = pool4.run(by, "channel", broken_midway, 2, atomic, verify, fresh_group=True)
    assert [first.error for first, _, _ in results] == [None] * 4, results
    assert [first.weights for first, _, _ in results[1:]] == [1] * 3
    assert results[2][1], "nothing was broken"
    assert [after for _, _, after in results] == [6, 2, 2, 2]


LOSSES = ((1, True), (4, False))  # who is killed, and whether the receive is atomic


def loses_one(rank: int, group: Any) -> list[Any]:
    live, seed, outcomes = weights(OLD), OLD, []
    for number, (victim, atomic) in enumerate(LOSSES):
        to = sorted({victim, 2, 3})
        with taking("channel"):
            relay = tr.Relay(group, chunk_bytes=CHUNK, join_window=20, connections=2)
            if rank == 0:
                outcomes.append(sent(relay, number, to, LONG))
            elif rank in to:
                spot = RECEIVER["channel"]["data"]
                hold = held_at(spot, "there") if rank == victim else contextlib.nullcontext()
                with hold:
                    out = received(relay, 0, live, seed, number, 2 * LONG, atomic=atomic)
                outcomes.append(out)
                seed = number
    return outcomes


def test_a_killed_one_leaves_the_others_right() -> None:
    with Ranks(loses_one, 5) as ranks:
        for victim, _ in LOSSES:
            ranks.wait_reached(victim, "there", START)
            ranks.kill(victim)
        ours, *theirs = ranks.results(60, ranks=[0, 2, 3])
    for number, (victim, _) in enumerate(LOSSES):
        # Where all data had left before it was killed, the sender cannot know.
        lost = ours[number].failed + ours[number].unknown
        assert lost == (victim,) and ours[number].receivers == (2, 3), ours
        for out in theirs:
            assert out[number].error is None and out[number].weights == number, theirs
            assert out[number].seconds < LONG


# The parts


def test_a_chain_by_way_of_connections_is_refused() -> None:
    offer, agreed = wire.Offer(b""), BY_NAME["connections"]
    for go in (wire.Go(0, 2, route="connections"), wire.Go(2, route="connections")):
        assert "connections" in receiver.off_schedule(go, offer, agreed, me=1, sender=0)
    for good in (wire.Go(0, route="connections"), wire.Go(0), wire.Go(2), wire.Go(0, 2)):
        assert not receiver.off_schedule(good, offer, agreed, me=1, sender=0)


def test_a_route_that_was_not_agreed_on_is_refused() -> None:
    offer = wire.Offer(b"")
    for agreed, said in (("group", "host"), ("group", "connections"), ("host", "group")):
        go = wire.Go(0, route=said)
        assert "agreed" in receiver.off_schedule(go, offer, BY_NAME[agreed], me=1, sender=0)


def test_an_address_is_own_or_it_is_not() -> None:
    assert addresses.own("127.0.0.1")
    for host in ("192.0.2.1", "2001:db8::1"):
        assert not addresses.own(host)


def test_no_packet_goes_to_another_host_for_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "check_peer", lambda host: None)
    monkeypatch.setattr(channels, "_connect", lambda *args: pytest.fail("it connects"))
    here = Channels()
    record = Channel("x", 2, "192.0.2.1", 5)
    assert here.answer(0, record, 2, LONG, local=True).record is None
    assert not here._failed  # it may be tried for a transfer to this rank alone


def test_ends_on_one_host_have_one_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        for source, local in ((("127.0.0.1", 0), True), (("127.0.0.2", 0), False)):
            near = socket.create_connection(there.getsockname(), source_address=source)
            channel, far = Lanes("x", [there.accept()[0]]), Lanes("x", [near])
            assert channel.local == far.local == local
            channel.cut()
            far.cut()
            assert not channel.local


def test_a_star_is_fed_by_the_sender_and_blamed_one_by_one() -> None:
    hops = fanout.chain(0, [4, 5]) + fanout.star(0, [1, 2])
    assert hops[2:] == [fanout.Hop(1, 0, None), fanout.Hop(2, 0, None)]
    assert fanout.culprits(hops, {1, 4, 5}) == [5, 1]
    assert fanout.first_starving(hops, {1, 5}, 0) == 5  # whatever one of the star says
