"""Which way the bytes take, why, and what a side that lies about its memory achieves: an error."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import types
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import torchrelay as tr
from tests.support.faults import CHUNK, attempt, received, verdict, weights
from tests.support.messages import ROUTE_KINDS
from tests.support.ranks import run_ranks
from tests.support.ways import VERIFIED, by, elsewhere, every_way, patched, refused
from torchrelay.geometry.runs import Runs
from torchrelay.transports.group.lines import ControlLine
from torchrelay.transports.protocol import wire
from torchrelay.transports.protocol.machines.fanout import by_machine
from torchrelay.transports.routes import choice as routes
from torchrelay.transports.routes.host import HostServer, Memory, reach
from torchrelay.transports.routes.nearby import place
from torchrelay.transports.routes.nearby.place import Proof
from torchrelay.transports.routes.nearby.ring import Fill, Ring
from torchrelay.transports.routes.seam import Mover, Unavailable

OLD, NEW = 100, 1
TIMEOUT = 20.0
HERE = wire.Place("boot", 1000, 7, 41)


# The choice, without processes


class Fake:
    """A route that works, or says why it does not."""

    pulls = False

    def __init__(self, name: str, why: str | None = None, *, by_request: bool = False) -> None:
        self.name, self.asked_as, self.by_request = name, name, by_request
        self.why, self.mover, self.asked = why, Mover(), 0

    def accept(self, offer: Any, incoming: Any) -> Any:
        self.asked += 1
        return self.mover if self.why is None else Unavailable(self.why)


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    *,
    ipc: str | None = "no GPU",
    host: str | None = None,
    offered: str | None = None,
    wanted: str | None = None,
) -> tuple[str, dict[str, str]]:
    listed = Fake("cuda_ipc", ipc), Fake("host", host), Fake("wish", by_request=True), Fake("group")
    monkeypatch.setattr(routes, "ROUTES", listed)
    incoming: Any = types.SimpleNamespace(offer=wire.Offer(b"", route=offered))
    route, mover, instead = routes.choose(incoming, wanted)
    [taken] = [one for one in listed if one is route]
    assert mover is taken.mover
    assert [one.asked for one in listed if one.name in instead].count(0) == sum(
        why == "not asked for" for why in instead.values()
    )
    return route.name, instead


def test_the_fastest_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, ipc=None) == ("cuda_ipc", {})
    assert chosen(monkeypatch) == ("host", {"cuda_ipc": "no GPU"})
    assert chosen(monkeypatch, host="may not") == (
        "group",
        {"cuda_ipc": "no GPU", "host": "may not"},
    )


def test_what_has_nothing_to_say_is_not_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, ipc="", host="") == ("group", {})


@pytest.mark.parametrize("by_sender", [True, False])
def test_one_route_alone(monkeypatch: pytest.MonkeyPatch, by_sender: bool) -> None:
    def only(route: str, **facts: str | None) -> tuple[str, dict[str, str]]:
        who = {"offered" if by_sender else "wanted": route}
        return chosen(monkeypatch, **facts, **who)

    not_asked = "not asked for"
    assert only("group", ipc=None) == ("group", {"cuda_ipc": not_asked, "host": not_asked})
    assert only("host", ipc=None) == ("host", {"cuda_ipc": not_asked})
    assert only("cuda_ipc", ipc=None) == ("cuda_ipc", {})
    assert only("wish") == ("wish", {"cuda_ipc": not_asked, "host": not_asked})
    with pytest.raises(tr.RouteError, match="'cuda_ipc' was asked for, but: no GPU"):
        only("cuda_ipc")
    with pytest.raises(tr.RouteError, match="'host' was asked for, but: nor this"):
        only("host", host="nor this")


def test_two_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tr.RouteError, match="'group' alone, this side 'host'"):
        chosen(monkeypatch, offered="group", wanted="host")
    assert chosen(monkeypatch, offered="host", wanted="host")[0] == "host"


def test_a_route_of_a_newer_sender_is_not_taken_for_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(tr.RouteError, match="'teleport'"):
        chosen(monkeypatch, offered="teleport")


def test_a_route_that_is_none() -> None:
    with pytest.raises(tr.UsageError, match="cuda_ipc, host, group, nixl or None, not 'tcp'"):
        routes.check_route("tcp")


class Alone:
    """A receiver's line without a group."""

    def __init__(self) -> None:
        self.group: Any = types.SimpleNamespace(rank=lambda: 1)
        self.peer, self.transfer = 0, 7


def reached(monkeypatch: pytest.MonkeyPatch, **there: Any) -> Any:
    monkeypatch.setattr(place, "here", lambda: HERE)
    memory = Memory(msgspec.structs.replace(HERE, **{"pid": 42, **there}), 1, 2)
    incoming: Any = types.SimpleNamespace(line=Alone(), nonce=b"n" * wire.NONCE_BYTES)
    return reach(memory, incoming)


def test_a_process_that_may_not_be_read_is_reached_by_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for why in ("", "may not"):
        monkeypatch.setattr(place, "cannot_read", lambda process, claim, why=why: why)
        monkeypatch.setattr(place, "cannot_open", lambda process, claim: "")
        assert reached(monkeypatch).reads == (not why)
    monkeypatch.setattr(place, "cannot_open", lambda process, claim: "nor this")
    assert reached(monkeypatch) == Unavailable("nor this")


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ({"machine": "another boot"}, "another machine"),
        ({"machine": ""}, "does not say which machine"),
        ({"user": 0}, "another user: 0 there, 1000 here"),
        ({"pids": 8}, "another PID namespace"),
        ({"pid": 41}, "this process itself"),
    ],
)
def test_who_is_elsewhere_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(place, "cannot_open", pytest.fail)
    assert why in reached(monkeypatch, **there).because


def test_a_sender_that_does_not_tell_is_served_over_the_group() -> None:
    for name in ("host", "cuda_ipc"):
        found: Any = routes.BY_NAME[name].accept(None, None)  # type: ignore[arg-type]
        assert found.because.startswith("the sender does not say")


def test_messages_of_the_protocol_do_not_name_what_routes_say() -> None:
    """So a route is added without touching them."""
    own = {"memory", "ring", "channel", "token", "exports", "slot", "host", "fd", "port", "handle"}
    said = own.union(*(kind.__struct_fields__ for kind in ROUTE_KINDS))
    said -= {"device", "verify", "digests"}  # of the whole transfer, too
    for kind in (wire.Offer, wire.Accept, wire.Go, wire.Trailer, wire.Word):
        assert not said & set(kind.__struct_fields__), kind


def explained(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=30)
    state = {"w": torch.full((1 << 20,), float(rank))}
    report = relay.send(state, to=1) if rank == 0 else relay.recv(0, into=state).report
    relay.close()
    return report.seconds, report.explain()


def test_reports_explain_themselves(pool2: Any) -> None:
    for seconds, text in pool2.run(explained):
        assert "by route host" in text and "not by cuda_ipc:" in text and "total" in text
        for phase in seconds:
            assert phase in text


def test_machines_stay_together() -> None:
    where = {1: "a", 2: "b", 3: "a", 4: "", 5: "b", 6: "a"}
    assert by_machine([1, 2, 3, 4, 5, 6], where.__getitem__) == [1, 3, 6, 2, 5, 4]
    assert by_machine([], where.__getitem__) == []


# The choice, between processes


def no_opening(process: object, claim: bytes) -> str:
    return "opening is refused by this test"


FACTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "same": contextlib.nullcontext,
    "machine": lambda: elsewhere(machine="another"),
    "user": lambda: elsewhere(user=os.getuid() + 1),
    "pids": lambda: elsewhere(pids=1),
    "unknown": lambda: elsewhere(machine=""),
    "no reading": lambda: patched(place, cannot_read=refused),
    "nothing": lambda: patched(place, cannot_read=refused, cannot_open=no_opening),
}


def transfer(rank: int, group: Any, fact: str, liar: int, **forced: Any) -> Any:
    """One transfer between two ranks, of which one is in a place as `fact` says."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    with FACTS[fact]() if rank == liar else contextlib.nullcontext():
        if rank == 0:
            return relay.send(weights(NEW), 1, route=forced.get("sender"))
        live = weights(OLD)
        report = relay.recv(0, into=live, route=forced.get("receiver")).report
        assert verdict(live, OLD, NEW) == NEW
        return report


@pytest.mark.parametrize(
    ("fact", "liar", "route", "why"),
    [
        ("same", 1, "host", None),
        ("no reading", 1, "host", None),
        ("machine", 1, "group", "another machine"),
        ("machine", 0, "group", "another machine"),
        ("user", 1, "group", "another user"),
        ("pids", 0, "group", "another PID namespace"),
        ("unknown", 1, "group", "does not say which machine"),
        ("nothing", 1, "group", "opening is refused"),
    ],
)
def test_route_and_reasons_are_reported(
    pool2: Any, fact: str, liar: int, route: str, why: str | None
) -> None:
    for report in pool2.run(transfer, fact, liar):
        assert report.route == route and report.routes == {1: route}
        assert report.verified == (route == "group")
        assert "cuda_ipc" in report.instead
        if why is None:
            assert "host" not in report.instead
        else:
            assert why in report.instead["host"], report


def forced(rank: int, group: Any, fact: str, sender: str | None, receiver: str | None) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    live = weights(OLD)
    fault: Any = None
    try:
        with FACTS[fact]() if rank == 1 else contextlib.nullcontext():
            if rank == 0:
                route = relay.send(weights(NEW), 1, route=sender).route
            else:
                route = relay.recv(0, into=live, route=receiver, atomic=False).report.route
    except tr.RouteError as raised:
        fault, route = raised, None
        if rank == 0:
            assert isinstance(raised.report, tr.Report) and 1 in raised.report.failed
    # The group is as good as before, and nothing was written.
    if rank == 0:
        relay.send(weights(2), 1)
        return route, str(fault), getattr(fault, "rank", None)
    found = verdict(live, OLD, NEW)
    relay.recv(0, into=live)
    assert verdict(live, 2) == 2
    return route, str(fault), getattr(fault, "rank", None), found


@pytest.mark.parametrize(("sender", "receiver"), [("host", None), (None, "host")])
@pytest.mark.parametrize(
    ("fact", "why"), [("machine", "another machine"), ("nothing", "opening is refused")]
)
def test_a_forced_route_that_cannot_be_taken_is_refused(
    pool2: Any, fact: str, why: str, sender: str | None, receiver: str | None
) -> None:
    ours, theirs = pool2.run(forced, fact, sender, receiver)
    assert ours[0] is None and why in ours[1] and "'host' was asked for" in ours[1]
    assert theirs[0] is None and why in theirs[1] and theirs[3] == OLD
    assert (ours[2], theirs[2]) == (1, 0)  # each names the other


def test_routes_that_exclude_each_other_are_refused(pool2: Any) -> None:
    ours, theirs = pool2.run(forced, "same", "group", "host")
    assert ours[0] is theirs[0] is None and theirs[3] == OLD
    for text in (ours[1], theirs[1]):
        assert "'group' alone, this side 'host'" in text


@pytest.mark.parametrize(("sender", "receiver"), [("group", None), (None, "group")])
def test_either_side_can_force_a_route(pool2: Any, sender: str, receiver: str) -> None:
    ours, theirs = pool2.run(forced, "same", sender, receiver)
    assert ours[0] == theirs[0] == "group" and theirs[3] == NEW


def fan(rank: int, group: Any, atomic: bool) -> Any:
    """Rank 1 is on another machine, rank 2 reads, rank 3 may not read."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 0:
        return relay.send(weights(NEW), [1, 2, 3])
    live = weights(OLD)
    with FACTS[("machine", "same", "no reading")[rank - 1]]():
        report = relay.recv(0, into=live, atomic=atomic).report
    assert verdict(live, OLD, NEW) == NEW
    return report


@pytest.mark.parametrize("atomic", [True, False])
def test_receivers_may_differ(pool4: Any, atomic: bool) -> None:
    ours, *theirs = pool4.run(fan, atomic)
    assert ours.route == "mixed" and ours.routes == {1: "group", 2: "host", 3: "host"}
    assert ours.receivers == (1, 2, 3) and ours.failed == {}
    assert [report.route for report in theirs] == ["group", "host", "host"]
    assert [report.verified for report in theirs] == [True, False, False]
    assert "another machine" in ours.instead["host"]


def with_digests(rank: int, group: Any, verify: bool | None) -> bool:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, verify=verify)
    report = relay.send(weights(NEW), 1) if rank == 0 else relay.recv(0).report
    return bool(report.verified)


@every_way
def test_when_digests_are_compared(pool2: Any, way: str) -> None:
    for verify, expected in ((None, way in VERIFIED), (True, True), (False, False)):
        assert pool2.run(by, way, with_digests, verify) == [expected] * 2


def counted(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    seen: list[tr.Progress] = []
    if rank == 0:
        relay.send(weights(NEW), 1, progress=seen.append)
    else:
        relay.recv(0, progress=seen.append)
    return seen


@every_way
def test_progress_grows_to_the_total(pool2: Any, way: str) -> None:
    for seen in pool2.run(by, way, counted):
        done = [one.done for one in seen]
        assert done == sorted(done) and seen[-1].done == seen[-1].total


# Senders and receivers that say what is not so


def table(*rows: tuple[int, int, int]) -> bytes:
    """Start, address and size of stretches, as `Runs.pack` writes them."""
    return np.array(rows, "<u8").T.tobytes()


BIG = (1 << 64) - 1
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "torn table": ({"host": b"x" * 25}, "RemoteProtocolError"),
    "outside the stream": ({"host": table((1 << 40, 0, 8))}, "RemoteProtocolError"),
    "longer than the stream": ({"host": table((0, 0, 1 << 40))}, "RemoteProtocolError"),
    "sums that wrap": ({"host": table((16, 0, BIG))}, "RemoteProtocolError"),
    "overlap": ({"host": table((0, 0, 64), (32, 0, 64))}, "RemoteProtocolError"),
    "out of order": ({"host": table((64, 0, 16), (0, 0, 16))}, "RemoteProtocolError"),
    "no such chunks": ({"apart": ((0, 999),)}, "RemoteProtocolError"),
    "more chunks than memory": ({"apart": ((0, wire.MAX_CHUNKS),)}, "RemoteProtocolError"),
    "negative chunks": ({"apart": ((-1, 1),)}, "RemoteProtocolError"),
    "chunks backwards": ({"apart": ((3, 1),)}, "RemoteProtocolError"),
    "wild addresses": ({"host": None}, "PeerLostError"),
}


def lying_sender(rank: int, group: Any, name: str) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 1:
        live = weights(OLD)
        return received(relay, 0, live, OLD, NEW, TIMEOUT), received(
            relay, 0, live, OLD, 2, TIMEOUT
        )
    lie = dict(LIES[name][0])
    original = HostServer.memory

    def memory(self: HostServer, join: wire.Join, line: ControlLine) -> Memory:
        true = original(self, join, line)
        if lie.get("host", b"") is None:
            size = self._stream_bytes
            lie["host"] = table((0, 1 << 46, size // 2), (size // 2, BIG - 100, size - size // 2))
        return msgspec.structs.replace(true, **lie)

    with patched(HostServer, memory=memory):
        out = attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
    return out, attempt(lambda: relay.send(weights(2), 1, step=2))


@pytest.mark.parametrize("name", LIES)
def test_memory_that_cannot_be(pool2: Any, name: str) -> None:
    (ours, after), (theirs, again) = pool2.run(by, "host", lying_sender, name)
    assert theirs.error == LIES[name][1] and theirs.weights == OLD, theirs
    assert ours.error in ("PeerLostError", "PeerRefusedError") and ours.seconds < TIMEOUT / 2, ours
    assert after.error is None and again.weights == 2


REPLIES: dict[str, Callable[[Any], Any]] = {
    "another chunk": lambda m: filled(m, lambda chunk, slot: (chunk + 1, slot)),
    "no such chunk": lambda m: filled(m, lambda chunk, slot: (9999, slot)),
    "negative chunk": lambda m: filled(m, lambda chunk, slot: (-1, slot)),
    "no such slot": lambda m: filled(m, lambda chunk, slot: (chunk, 9999)),
    "another slot": lambda m: filled(m, lambda chunk, slot: (chunk, 1 - slot)),
    "no slots": lambda m: with_ring(m, slots=0),
    "negative slots": lambda m: with_ring(m, slots=-2, slot_bytes=-(64 << 10)),
    "small slots": lambda m: with_ring(m, slot_bytes=4096),
    "no ring": lambda m: msgspec.structs.replace(m, word=b"") if isinstance(m, wire.Go) else m,
    "a short file": lambda m: with_ring(m, slots=1 << 20),
    "no file": lambda m: with_ring(m, id=1 << 40, fd=1 << 20),
    "many threads": lambda m: (
        msgspec.structs.replace(m, threads=1 << 30) if isinstance(m, wire.Go) else m
    ),
}


def filled(message: Any, lie: Callable[[int, int], tuple[int, int]]) -> Any:
    if not isinstance(message, wire.Word):
        return message
    said = wire.read_as(Fill, message.word)
    return message if said.slot else wire.Word(msgspec.msgpack.encode(lie(said.chunk, said.slot)))


def with_ring(message: Any, **lies: Any) -> Any:
    if not isinstance(message, wire.Go):
        return message
    ring = msgspec.structs.replace(wire.read_as(Ring, message.word), **lies)
    return msgspec.structs.replace(message, word=msgspec.msgpack.encode(ring))


def lying_replies(rank: int, group: Any, name: str) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 1:
        live = weights(OLD)
        return received(relay, 0, live, OLD, NEW, TIMEOUT), received(
            relay, 0, live, OLD, 2, TIMEOUT
        )
    original = ControlLine.send

    def send(self: ControlLine, message: wire.Message) -> None:
        original(self, REPLIES[name](message))

    with patched(ControlLine, send=send):
        out = attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
    return out, attempt(lambda: relay.send(weights(2), 1, step=2))


@pytest.mark.parametrize("name", REPLIES)
def test_a_ring_that_cannot_be(pool2: Any, name: str) -> None:
    (ours, after), (theirs, again) = pool2.run(by, "ring", lying_replies, name)
    if name == "many threads":
        assert ours.error is None and theirs.weights == NEW
    else:
        assert theirs.error in ("RemoteProtocolError", "PeerLostError"), theirs
        assert theirs.weights == OLD and theirs.seconds < TIMEOUT / 2
        assert ours.error == "PeerLostError" and ours.seconds < TIMEOUT / 2, ours
    assert after.error is None and again.weights == 2


def lying_receiver(rank: int, group: Any, name: str) -> Any:
    """A receiver that takes a route there is none of, or asks for what there is none of."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 0:
        out = attempt(lambda: relay.send(weights(NEW), 1, step=NEW))
        return out, attempt(lambda: relay.send(weights(2), 1, step=2))
    original, live = ControlLine.send, weights(OLD)

    def send(self: ControlLine, message: wire.Message) -> None:
        if isinstance(message, wire.Accept) and name == "route":
            message = wire.Accept("teleport")
        if isinstance(message, wire.Word):
            said = wire.read_as(Fill, message.word)
            chunk = {"chunk": 9999, "negative chunk": -1}.get(name, said.chunk)
            slot = {"slot": 9999, "negative slot": -1}.get(name, said.slot)
            message = wire.Word(msgspec.msgpack.encode((chunk, slot)))
        original(self, message)

    with patched(ControlLine, send=send):
        first = received(relay, 0, live, OLD, NEW, TIMEOUT)
    return first, received(relay, 0, live, OLD, 2, TIMEOUT)


@pytest.mark.parametrize("name", ["route", "chunk", "negative chunk", "slot", "negative slot"])
def test_a_receiver_that_asks_for_what_there_is_none_of(pool2: Any, name: str) -> None:
    (ours, after), (theirs, again) = pool2.run(by, "ring", lying_receiver, name)
    assert ours.error == "PeerLostError" and ours.seconds < TIMEOUT / 2, ours
    assert theirs.error == "PeerAbortedError" and theirs.weights == OLD, theirs
    assert after.error is None and again.weights == 2


def reused_number(rank: int, group: Any) -> Any:
    """The sender's number belongs to another process by now: its memory is not taken for ours."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 1:
        live = weights(OLD)
        report = relay.recv(0, into=live).report
        return verdict(live, OLD, NEW), report.route, report.instead
    with patched(place, Proof=lambda claim: Proof(b"x" * len(claim))):  # what is not expected
        report = relay.send(weights(NEW), 1)
    return report.route, report.instead


def test_another_process_with_the_senders_number_is_not_read(pool2: Any) -> None:
    (route, instead), (found, *theirs) = pool2.run(reused_number)
    assert found == NEW and route == "group" and theirs == [route, instead]
    assert "another process has the sender's number" in instead["host"]


# Refusals of the kernel itself

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
READV = {"x86_64": 310, "aarch64": 270}.get(os.uname().machine)
NOBODY = 65534


def prctl(option: int, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *args, *[ctypes.c_ulong(0)] * (4 - len(args))):
        raise OSError(ctypes.get_errno(), "prctl")


def forbid_reading() -> None:
    """process_vm_readv fails in this thread from now on (a seccomp filter)."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    def op(code: int, if_true: int, if_not: int, value: int) -> bytes:
        return struct.pack("HBBI", code, if_true, if_not, value)

    assert READV is not None
    code = op(0x20, 0, 0, 0) + op(0x15, 0, 1, READV)  # load the call's number; is it that one?
    code += op(0x06, 0, 0, 0x50000 | 1) + op(0x06, 0, 0, 0x7FFF0000)  # EPERM; or allow
    prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1))
    prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(Program(4, code)))


def shut() -> None:
    """No process of the same user may look into this one from now on."""
    if os.getuid() == 0:
        os.setuid(NOBODY)
    prctl(PR_SET_DUMPABLE, ctypes.c_ulong(0))


def in_a_sandbox(rank: int, group: Any) -> Any:
    """Rank 1 may not read. Rank 2 becomes another user, if it can; then the sender the same."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    reports = []
    if rank == 1:
        forbid_reading()
    for step in range(2):
        if rank == (2, 0)[step]:
            shut()
        torch.distributed.barrier(group)
        if rank == 0:
            reports.append(relay.send(weights(step), [1, 2] if step == 0 else [2]))
        elif rank == 2 or step == 0:
            got = relay.recv(0)
            assert verdict(got.state, step) == step
            reports.append(got.report)
    return reports


@pytest.mark.skipif(READV is None, reason="the number of process_vm_readv is not known here")
def test_what_the_kernel_refuses_goes_another_way() -> None:
    root = os.getuid() == 0
    ours, (ring,), (other_user, same_user) = run_ranks(in_a_sandbox, 3, timeout=90)
    assert ring.route == "host"
    if root:
        assert other_user.route == "group"
        assert "another user" in other_user.instead["host"], other_user
        assert ours[0].route == "mixed"
    assert same_user.route == ours[1].route == "group", same_user
    assert "open the sender's files" in same_user.instead["host"], same_user


def test_an_unpacked_table_is_the_one_that_was_packed() -> None:
    runs = Runs([0, 40, 48], [1 << 63, 7, 15], [40, 8, 16])
    again = Runs.unpack(runs.pack(), 64)
    assert again.starts.tolist() == [0, 40] and again.addresses.tolist() == [1 << 63, 7]
