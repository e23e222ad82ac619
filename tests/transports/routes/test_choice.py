"""Which route the bytes take, and why."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import types
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.support.faults import CHUNK, verdict, weights
from tests.support.messages import ROUTE_KINDS
from tests.support.ranks import run_ranks
from tests.support.ways import VERIFIED, by, elsewhere, every_way, patched, refused
from torchrelay.progress import Progress
from torchrelay.transports.resources import Resources
from torchrelay.transports.routes import choice as routes
from torchrelay.transports.routes.host import claims, location
from torchrelay.transports.routes.host.claims import Proof
from torchrelay.transports.routes.host.facts import MemoryFacts, reach
from torchrelay.transports.routes.route import (
    DigestComparison,
    Route,
    RouteFetch,
    RouteService,
    Unavailable,
)
from torchrelay.transports.wire.messages import (
    NONCE_BYTES,
    Accept,
    Go,
    Offer,
    ProcessLocation,
    RouteNote,
)

OLD, NEW = 100, 1
TIMEOUT = 20.0
HERE = ProcessLocation("boot", 1000, 7, 41)


# The choice, without processes


class Fake:
    """A route that works, or says why it does not."""

    def __init__(self, name: str, why: str | None = None) -> None:
        self.name, self.why = name, why
        self.end, self.asked = RouteFetch(), 0

    def fetch(self, facts: bytes, incoming: Any) -> Any:
        self.asked += 1
        return self.end if self.why is None else Unavailable(self.why)


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    *,
    ipc: str | None = "no GPU",
    memory: str | None = None,
    offered: str | None = None,
    wanted: str | None = None,
    unserved: dict[str, str] | None = None,
) -> tuple[str, dict[str, str]]:
    """Which of three routes is taken, and why the faster ones were not."""
    listed = (Fake("cuda_ipc", ipc), Fake("memory", memory), Fake("tcp"))
    unavailable = unserved or {}
    served = {one.name: b"" for one in listed if one.name not in unavailable}
    monkeypatch.setattr(routes, "ROUTES", listed)
    monkeypatch.setattr(routes, "BY_NAME", {one.name: one for one in listed})
    offer = Offer(b"", bytes(16), route=offered, routes=served, unavailable=unavailable)
    incoming: Any = types.SimpleNamespace(offer=offer)
    route, end, instead = routes.choose(incoming, wanted)
    [taken] = [one for one in listed if one is route]
    assert end is taken.end and taken.asked == 1
    later = listed[listed.index(taken) + 1 :]
    assert not any(one.asked for one in later), "slower ones are not tried"
    return route.name, instead


def test_the_fastest_that_works_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, ipc=None) == ("cuda_ipc", {})
    assert chosen(monkeypatch) == ("memory", {"cuda_ipc": "no GPU"})
    assert chosen(monkeypatch, memory="may not") == (
        "tcp",
        {"cuda_ipc": "no GPU", "memory": "may not"},
    )


def test_what_has_nothing_to_say_is_not_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, ipc="", memory="") == ("tcp", {})


def test_a_route_that_the_sender_cannot_serve_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen(monkeypatch, ipc=None, unserved={"cuda_ipc": "no GPU there"}) == (
        "memory",
        {"cuda_ipc": "no GPU there"},
    )
    with pytest.raises(
        tr.errors.RouteError, match="'cuda_ipc' was asked for, but: the library is missing"
    ):
        chosen(monkeypatch, wanted="cuda_ipc", unserved={"cuda_ipc": "the library is missing"})


@pytest.mark.parametrize("by_sender", [True, False])
def test_one_route_alone(monkeypatch: pytest.MonkeyPatch, by_sender: bool) -> None:
    def only(route: str, **facts: Any) -> tuple[str, dict[str, str]]:
        who = {"offered" if by_sender else "wanted": route}
        return chosen(monkeypatch, **facts, **who)

    not_asked = "not asked for"
    assert only("tcp", ipc=None) == ("tcp", {"cuda_ipc": not_asked, "memory": not_asked})
    assert only("memory", ipc=None) == ("memory", {"cuda_ipc": not_asked})
    assert only("cuda_ipc", ipc=None) == ("cuda_ipc", {})
    with pytest.raises(tr.errors.RouteError, match="'cuda_ipc' was asked for, but: no GPU"):
        only("cuda_ipc")
    with pytest.raises(tr.errors.RouteError, match="'memory' was asked for, but: nor this"):
        only("memory", memory="nor this")


def test_two_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tr.errors.RouteError, match="'tcp' alone, this side 'memory'"):
        chosen(monkeypatch, offered="tcp", wanted="memory")
    assert chosen(monkeypatch, offered="memory", wanted="memory")[0] == "memory"


def test_a_route_of_a_newer_sender_is_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(tr.errors.RouteError, match="'teleport'"):
        chosen(monkeypatch, offered="teleport")


def test_a_route_that_is_none() -> None:
    listed = "cuda_ipc, memory, group, tcp or None, not 'host'"
    with pytest.raises(tr.errors.UsageError, match=listed):
        routes.check_route("host")
    for name in (None, *routes.BY_NAME):
        assert routes.check_route(name) == name


def test_the_last_route_always_works() -> None:
    assert routes.ROUTES[-1].name == "tcp"
    assert [route.name for route in routes.ROUTES] == list(routes.FILES)


def reached(monkeypatch: pytest.MonkeyPatch, **there: Any) -> Any:
    monkeypatch.setattr(location, "here", lambda: HERE)
    facts = MemoryFacts(msgspec.structs.replace(HERE, **{"pid": 42, **there}), 1, 2)
    talk = types.SimpleNamespace(sender=0, me=1, process=b"the sender")
    incoming: Any = types.SimpleNamespace(
        conversation=talk,
        offer=Offer(b"", bytes(16)),
        nonce=b"n" * NONCE_BYTES,
        member=types.SimpleNamespace(resources=Resources()),
    )
    return reach(facts, incoming)


def test_a_process_that_may_not_be_read_is_reached_by_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for why in ("", "may not"):
        monkeypatch.setattr(claims, "cannot_read", lambda process, claim, why=why: why)
        monkeypatch.setattr(claims, "cannot_open", lambda process, claim: "")
        assert reached(monkeypatch).reads == (not why)
    monkeypatch.setattr(claims, "cannot_open", lambda process, claim: "nor this")
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
    monkeypatch.setattr(claims, "cannot_open", pytest.fail)
    assert why in reached(monkeypatch, **there).because


def test_messages_of_the_protocol_do_not_name_what_routes_say() -> None:
    """So a route is added without touching them."""
    own = {"memory", "ring", "key", "token", "exports", "slot", "host", "port", "handle"}
    said = own.union(*(kind.__struct_fields__ for kind in ROUTE_KINDS))
    said -= {"verify", "digests", "location", "device", "fd", "chunk"}  # of the whole transfer, too
    for kind in (Offer, Accept, Go, RouteNote):
        assert not said & set(kind.__struct_fields__), kind


def explained(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=30)
    state = {"w": torch.full((1 << 20,), float(rank))}
    report = relay.send(state, to=1) if rank == 0 else relay.recv(0, into=state).report
    relay.close()
    return report.seconds, str(report)


def test_reports_explain_themselves(pool2: Any) -> None:
    for seconds, text in pool2.run(explained):
        assert "by route memory" in text and "not by cuda_ipc:" in text
        for phase in seconds:
            assert phase in text


@pytest.mark.parametrize(
    ("comparison", "compares"),
    [
        (DigestComparison.NEVER, [False, False, False]),
        (DigestComparison.BY_REQUEST, [False, False, True]),
        (DigestComparison.BY_DEFAULT, [False, True, True]),
    ],
)
def test_a_route_claims_no_comparison_that_it_does_not_make(
    comparison: DigestComparison, compares: list[bool]
) -> None:
    made = Route("x", RouteService, lambda facts, incoming: RouteFetch(), comparison=comparison)
    assert [made.compares(verify) for verify in (False, None, True)] == compares
    assert not Route("x", RouteService, made.fetch).compares(True)


# The choice, between processes


def no_opening(process: object, claim: bytes) -> str:
    return "opening is refused by this test"


FACTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "same": contextlib.nullcontext,
    "machine": lambda: elsewhere(machine="another"),
    "user": lambda: elsewhere(user=os.getuid() + 1),
    "pids": lambda: elsewhere(pids=1),
    "unknown": lambda: elsewhere(machine=""),
    "no reading": lambda: patched(claims, cannot_read=refused),
    "nothing": lambda: patched(claims, cannot_read=refused, cannot_open=no_opening),
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
        ("same", 1, "memory", None),
        ("no reading", 1, "memory", None),
        ("machine", 1, "tcp", "another machine"),
        ("machine", 0, "tcp", "another machine"),
        ("user", 1, "tcp", "another user"),
        ("pids", 0, "tcp", "another PID namespace"),
        ("unknown", 1, "tcp", "does not say which machine"),
        ("nothing", 1, "tcp", "opening is refused"),
    ],
)
def test_route_and_reasons_are_reported(
    pool2: Any, fact: str, liar: int, route: str, why: str | None
) -> None:
    for report in pool2.run(transfer, fact, liar):
        assert report.route == route
        assert list(report.routes.values()) == [route]
        assert report.verified == (route == "tcp")
        assert "cuda_ipc" in report.instead
        if why is None:
            assert "memory" not in report.instead
        else:
            assert why in report.instead["memory"], report


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
    except tr.errors.RouteError as raised:
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


@pytest.mark.parametrize(("sender", "receiver"), [("memory", None), (None, "memory")])
@pytest.mark.parametrize(
    ("fact", "why"), [("machine", "another machine"), ("nothing", "opening is refused")]
)
def test_a_forced_route_that_cannot_be_taken_is_refused(
    pool2: Any, fact: str, why: str, sender: str | None, receiver: str | None
) -> None:
    ours, theirs = pool2.run(forced, fact, sender, receiver)
    assert ours[0] is None and why in ours[1] and "'memory' was asked for" in ours[1]
    assert theirs[0] is None and why in theirs[1] and theirs[3] == OLD
    assert (ours[2], theirs[2]) == (1, 0)  # each names the other


def test_routes_that_exclude_each_other_are_refused(pool2: Any) -> None:
    ours, theirs = pool2.run(forced, "same", "tcp", "memory")
    assert ours[0] is theirs[0] is None and theirs[3] == OLD
    for text in (ours[1], theirs[1]):
        assert "'tcp' alone, this side 'memory'" in text


@pytest.mark.parametrize(("sender", "receiver"), [("tcp", None), (None, "tcp")])
def test_either_side_can_force_a_route(pool2: Any, sender: str, receiver: str) -> None:
    ours, theirs = pool2.run(forced, "same", sender, receiver)
    assert ours[0] == theirs[0] == "tcp" and theirs[3] == NEW


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
    assert ours.route == "mixed" and ours.routes == {1: "tcp", 2: "memory", 3: "memory"}
    assert ours.receivers == (1, 2, 3) and ours.failed == {}
    assert [report.route for report in theirs] == ["tcp", "memory", "memory"]
    assert [report.verified for report in theirs] == [True, False, False]
    assert "another machine" in ours.instead["memory"]


def with_digests(rank: int, group: Any, verify: Any) -> bool:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK, verify=verify)
    report = relay.send(weights(NEW), 1) if rank == 0 else relay.recv(0).report
    return bool(report.verified)


@every_way
def test_when_digests_are_compared(pool2: Any, way: str) -> None:
    for verify, expected in ((True, way in VERIFIED), ("all", True), (False, False)):
        assert pool2.run(by, way, with_digests, verify) == [expected] * 2


def counted(rank: int, group: Any) -> Any:
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    seen: list[Progress] = []
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


def reused_number(rank: int, group: Any) -> Any:
    """The sender's number belongs to another process by now: its memory is not taken for ours."""
    relay = tr.Relay(group, timeout=TIMEOUT, chunk_bytes=CHUNK)
    if rank == 1:
        live = weights(OLD)
        report = relay.recv(0, into=live).report
        return verdict(live, OLD, NEW), report.route, report.instead
    with patched(claims, Proof=lambda claim: Proof(b"x" * len(claim))):  # what is not expected
        report = relay.send(weights(NEW), 1)
    return report.route, report.instead


def test_another_process_with_the_senders_number_is_not_read(pool2: Any) -> None:
    (route, instead), (found, *theirs) = pool2.run(reused_number)
    assert found == NEW and route == "tcp" and theirs == [route, instead]
    assert "another process has the sender's number" in instead["memory"]


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
    # Before another user cannot read the store any more, which is a file here.
    relay.send({}, [1, 2]) if rank == 0 else relay.recv(0)
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
    assert ring.route == "memory"
    if root:
        assert other_user.route == "tcp"
        assert "another user" in other_user.instead["memory"], other_user
        assert ours[0].route == "mixed"
    assert same_user.route == ours[1].route == "tcp", same_user
    assert "open the sender's files" in same_user.instead["memory"], same_user
