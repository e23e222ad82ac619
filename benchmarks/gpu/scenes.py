"""What the ranks of `routes` do: transfers, and what is expected of them. Rank 0 sends."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import torchrelay as tr
from benchmarks.gpu import mixed as m
from benchmarks.gpu.crew import Me, Wrong
from torchrelay.transports.routes.host import claims

TIMEOUT = 10.0
CHUNK = 256 << 10
MODES: dict[str, dict[str, Any]] = {
    "in place": {"atomic": False},
    "in place, atomic": {"atomic": True},
    "new tensors": {},
}
NEW = "new tensors"
OLD = 900  # seed of what a destination holds before


# Tools


def relay_of(me: Me, **options: Any) -> tr.Relay:
    return tr.Relay(me.group, timeout=TIMEOUT, **options)


def told(report: tr.Report, note: str = "") -> dict[str, Any]:
    return {"route": report.route, "instead": report.instead, "note": note}


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def expect(kinds: tuple[str, ...], call: Callable[[], Any], cause: str = "") -> str:
    """What a call said that must fail with one of these errors, in time."""
    begun = time.monotonic()
    try:
        call()
    except tr.errors.RelayError as fault:
        name, why = type(fault).__name__, type(fault.__cause__).__name__
        if name not in kinds:
            raise Wrong(f"{name} instead of {' or '.join(kinds)}: {fault}") from fault
        if cause and name == "TornStateError" and why != cause:
            raise Wrong(f"torn by {why}, not {cause}: {fault.__cause__}") from fault
        text = f"{name}: {fault}"
    else:
        raise Wrong(f"no error, where {' or '.join(kinds)} was due")
    if time.monotonic() - begun > TIMEOUT + 2:
        raise Wrong(f"{name} came only after {time.monotonic() - begun:.1f} s")
    return text


# Whole states


def whole(me: Me, route: str | None, mode: str, tiny: int, refused: bool) -> Any:
    """A mixed state; twice by one relay, once by another with small chunks."""
    relay, again = relay_of(me, route=route), relay_of(me, route=route, chunk_bytes=CHUNK)
    with ExitStack() as stack:
        if refused:
            no = "refused by this test"
            stack.enter_context(patched(claims, "cannot_read", lambda process, claim: no))
        for seed, one in ((1, relay), (20, relay), (40, again)):
            tiny = tiny if one is relay else tiny // 10
            if me.rank == 0:
                report = one.send(m.mixed(seed, me.device, tiny), to=1, step=seed)
                continue
            into = None if mode == NEW else m.mixed(OLD, me.device, tiny)
            held = dict(m.flat(into)) if into is not None else {}
            got = one.recv(0, into=into, step=seed, **MODES[mode])
            report = got.report
            m.check_same(
                m.mixed(seed, "cpu", tiny), got.state, device=me.device, in_place=mode != NEW
            )
            for path, leaf in m.flat(got.state) if held else ():
                if isinstance(leaf, torch.Tensor) and leaf is not held[path]:
                    raise Wrong(f"{path}: another tensor than the destination's own")
    relay.close()
    again.close()
    return told(report)


def verified(me: Me, route: str, verify: Any, expected: bool) -> Any:
    relay = relay_of(me, route=route, verify=verify)
    if me.rank == 0:
        report = relay.send(m.weights(1, me.device), to=1)
    else:
        into = m.weights(OLD, me.device)
        report = relay.recv(0, into=into, atomic=False).report
        m.check_same(m.weights(1, "cpu"), into, device=me.device, in_place=True)
        if report.verified is not expected:
            raise Wrong(f"report.verified is {report.verified}")
    relay.close()
    return told(report)


# Destinations


def destination(me: Me, route: str, mode: str, kind: str) -> Any:
    relay = relay_of(me, route=route, chunk_bytes=CHUNK)
    act: dict[str, Any] = {"framed": _framed, "part": _part, "tied": _tied, "clash": _clash}
    report = act[kind](me, relay, MODES[mode])
    relay.close()
    return report


def _framed(me: Me, relay: tr.Relay, options: dict[str, Any]) -> Any:
    """Strided source and destination; the memory around the latter must not change."""
    if me.rank == 0:
        return told(relay.send(m.weights(3, me.device), to=1))
    framed = m.Framed(me.device)
    report = relay.recv(0, into=framed.into, **options).report
    framed.check(3)
    return told(report)


def _part(me: Me, relay: tr.Relay, options: dict[str, Any]) -> Any:
    """Missing and extra keys, with `strict=False`; refused without."""
    state = m.weights(3, me.device)
    mine = m.weights(OLD, me.device)
    into = {"a": mine["a"], "only here": mine["b"], "g": mine["g"]}
    untouched = m.bits(mine["b"])
    if me.rank == 0:
        expect(("PeerRefusedError",), lambda: relay.send(state, to=1))
        return told(relay.send(state, to=1))
    expect(("MismatchError",), lambda: relay.recv(0, into=into, **options))
    if m.bits(into["a"]) != m.bits(m.weights(OLD, "cpu")["a"]):
        raise Wrong("a refused state has changed the destination")
    report = relay.recv(0, into=into, strict=False, **options).report
    if len(report.unexpected_keys) != len(state) - 2 or len(report.missing_keys) != 1:
        raise Wrong(f"missing {report.unexpected_keys}, extra {report.missing_keys}")
    for name in ("a", "g"):
        if m.bits(into[name]) != m.bits(m.weights(3, "cpu")[name]):
            raise Wrong(f"/{name}: WRONG BITS")
    if m.bits(into["only here"]) != untouched:
        raise Wrong("what is only here has changed")
    return told(report)


def _tied(me: Me, relay: tr.Relay, options: dict[str, Any]) -> Any:
    """Tied on both sides, then at the sender alone."""
    one, other, third = (m.weights(seed, me.device)["b"] for seed in (3, OLD, OLD + 1))
    if me.rank == 0:
        relay.send({"x": one, "y": one, "part": one[7:1000]}, to=1)
        return told(relay.send({"x": one, "y": one}, to=1))
    into = {"x": other, "y": other, "part": other[7:1000]}
    relay.recv(0, into=into, **options)
    expected = m.weights(3, "cpu")["b"]
    if m.bits(other) != m.bits(expected) or into["x"] is not into["y"]:
        raise Wrong("tied on both sides: WRONG BITS or no longer tied")
    apart = {"x": m.weights(OLD, me.device)["b"], "y": third}
    report = relay.recv(0, into=apart, **options).report
    if not all(m.bits(tensor) == m.bits(expected) for tensor in apart.values()):
        raise Wrong("tied at the sender alone: WRONG BITS")
    return told(report)


def _clash(me: Me, relay: tr.Relay, options: dict[str, Any]) -> Any:
    """Tied at the receiver alone: one memory for two values is refused, and nothing is written."""
    one, other = m.weights(3, me.device)["b"], m.weights(4, me.device)["b"]
    if me.rank == 0:
        return {
            "note": expect(("PeerRefusedError",), lambda: relay.send({"x": one, "y": other}, 1))
        }
    tied = m.weights(OLD, me.device)["b"]
    text = expect(("MismatchError",), lambda: relay.recv(0, into={"x": tied, "y": tied}, **options))
    if m.bits(tied) != m.bits(m.weights(OLD, "cpu")["b"]):
        raise Wrong("a refused state has changed the destination")
    return {"note": text}


def crossing(me: Me, route: str | None, mode: str, here: str, there: str) -> Any:
    """From one kind of device to another; "both": every second tensor on the one or the other."""

    def make(seed: int, kind: str, turn: int) -> dict[str, Any]:
        if kind != "both":
            return m.weights(seed, kind)
        sides = [m.weights(seed, side) for side in ("cpu", me.device)]
        return {name: sides[(index + turn) % 2][name] for index, name in enumerate(sides[0])}

    relay = relay_of(me, route=route, chunk_bytes=CHUNK)
    if me.rank == 0:
        report = relay.send(make(3, here, 0), to=1)
    elif mode == NEW:
        got = relay.recv(0, device=there)
        m.check_same(m.weights(3, "cpu"), got.state, device=there, in_place=False)
        report = got.report
    else:
        into = make(OLD, there, 0 if route == "cuda_ipc" else 1)
        report = relay.recv(0, into=into, **MODES[mode]).report
        for name, tensor in m.weights(3, "cpu").items():
            if m.bits(tensor) != m.bits(into[name]):
                raise Wrong(f"/{name}: WRONG BITS")
    relay.close()
    return told(report)


# Several in a row


def in_a_row(me: Me, route: str, mode: str) -> Any:
    """One relay, memory that stays, moves, goes and comes back: always the newest bits."""
    relay = relay_of(me, route=route)
    mine = m.weights(1 if me.rank == 0 else OLD, me.device)
    kept: list[Any] = []
    same_address = 0
    steps: list[tuple[str, int]] = [
        ("first", 1),
        ("same again", 1),
        ("changed in place", 3),
        ("changed in place", 4),
        ("changed by an alias", 5),
        ("the sender's are new", 6),
        ("the receiver's are new", 7),
        ("the sender's freed and made again", 8),
        ("the receiver's freed and made again", 9),
        ("both freed and made again", 10),
        ("changed in place", 11),
    ]
    for what, seed in steps:
        if "freed" in what and ("both" in what or (me.rank == 0) == ("sender" in what)):
            before = {tensor.data_ptr() for tensor in mine.values()}
            mine = {}
            kept.clear()
            gc.collect()
            if me.device != "cpu":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            mine = m.weights(seed if me.rank == 0 else OLD, me.device)
            same_address += len(before & {tensor.data_ptr() for tensor in mine.values()})
        elif "new" in what and (me.rank == 0) == ("sender" in what):
            kept.append(mine)  # so that the new ones lie elsewhere
            mine = m.weights(seed if me.rank == 0 else OLD, me.device)
        if me.rank == 0:
            if what == "changed by an alias":
                fresh = m.weights(seed, me.device)
                for name, tensor in mine.items():
                    m.alias(tensor).copy_(m.alias(fresh[name]))
            else:
                m.overwrite(mine, seed)
            report = relay.send(mine, to=1, step=seed)
        else:
            got = relay.recv(0, into=None if mode == NEW else mine, step=seed, **MODES[mode])
            report = got.report
            try:
                m.check_same(
                    m.weights(seed, "cpu"), got.state, device=me.device, in_place=mode != NEW
                )
            except Wrong as fault:
                raise Wrong(f"{what}: {fault}") from None
    _views_that_grow(me, relay, mode)
    relay.close()
    return told(report, f"{same_address} tensors made again at the same address")


def _views_that_grow(me: Me, relay: tr.Relay, mode: str) -> None:
    """Other lengths at the same addresses, within what alignment leaves open and beyond."""
    base = m.Draw(77 if me.rank == 0 else OLD, me.device)((4096,), torch.uint8)
    expected = m.bits(m.Draw(77, "cpu")((4096,), torch.uint8))
    for low, high in ((60, 50), (50, 60), (57, 63), (4000, 60), (60, 4000)):
        for size in (low, high):
            state = {"x": base[: size // 2], "y": base[size // 2 : size]}
            if me.rank == 0:
                relay.send(state, to=1)
                continue
            got: Any = relay.recv(0, into=None if mode == NEW else state, **MODES[mode]).state
            if m.bits(got["x"]) + m.bits(got["y"]) != expected[:size]:
                raise Wrong(f"views of {low}, then {high} bytes: WRONG BITS")


# Routes


def default_route(me: Me, expected: str, where: str, state: str = "weights") -> Any:
    """The route that is taken unasked, and what is said about a faster one; then exact bits."""
    if state == "expandable" and me.rank == 0:
        m.large(1, me.device, 1 << 20)
        if not any(one.get("is_expandable") for one in torch.cuda.memory_snapshot()):
            raise Wrong("expandable_segments has no effect here: nothing was tested")
    relay = relay_of(me)
    if me.rank == 0:
        sent = m.weights(1, me.device)
        report = relay.send({"s": sent["strided"]} if state == "strided" else sent, to=1)
    else:
        into = m.weights(OLD, where)
        into = {"s": into["strided"]} if state == "strided" else into
        report = relay.recv(0, into=into).report
        wanted = m.weights(1, "cpu")
        wanted = {"s": wanted["strided"]} if state == "strided" else wanted
        m.check_same(wanted, into, device=where, in_place=True)
    relay.close()
    if report.route != expected:
        raise Wrong(f"route {report.route} instead of {expected}: {report.instead}")
    if (expected == "cuda_ipc") == bool(report.instead.get("cuda_ipc")):
        raise Wrong(f"what is said about cuda_ipc: {report.instead}")
    return told(report, report.instead.get("cuda_ipc", ""))


def forced(me: Me, here: str, where: str) -> Any:
    """`cuda_ipc` where it cannot be: refused on both sides, whichever asks, nothing written."""
    notes = [_forced(me, asks, here, where) for asks in (0, 1)]
    return {"note": "; ".join(dict.fromkeys(notes))}


def _forced(me: Me, asks: int, here: str, where: str) -> str:
    relay = relay_of(me, route="cuda_ipc" if me.rank == asks else None)
    if me.rank == 0:
        state = m.weights(1, here)
        text = expect(("RouteError",), lambda: relay.send(state, to=1))
    else:
        into = m.weights(OLD, where)
        text = expect(("RouteError",), lambda: relay.recv(0, into=into))
        m.check_same(m.weights(OLD, "cpu"), into, device=where, in_place=True)
    relay.close()
    return text


# Streams


def streams(me: Me, route: str, mode: str, side: bool) -> Any:
    """Work queued before a transfer comes before it, on both sides; work after it, after."""
    relay = relay_of(me, route=route)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    square = torch.randn(8192, 8192, device=me.device, dtype=torch.bfloat16)
    old, new = m.large(OLD, me.device, 8 << 20), m.large(1, me.device, 8 << 20)
    state = {name: tensor.clone() for name, tensor in old.items()}
    seen = {name: torch.zeros_like(tensor) for name, tensor in old.items()}
    square @ square
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        begun = time.perf_counter()
        for _ in range(10):
            square @ square
        torch.cuda.synchronize()
        each = max((time.perf_counter() - begun) / 10, 1e-5)
        chain = square
        for _ in range(min(int(0.25 / each), 800)):
            chain = square @ chain
        for name, tensor in state.items():
            if me.rank == 0:
                tensor.copy_(new[name])  # behind the chain, and not awaited
            else:
                seen[name].copy_(tensor)
        done = torch.cuda.Event()
        done.record()
        if done.query():
            raise Wrong("the queue was empty before the transfer: nothing was tested")
        if me.rank == 0:
            report = relay.send(state, to=1)
            got: Any = new
        else:
            received = relay.recv(0, into=None if mode == NEW else state, **MODES[mode])
            report, got = received.report, received.state
        after = {name: tensor.clone() for name, tensor in got.items()}
    torch.cuda.synchronize()
    if me.rank:
        if not m.same_large(new, after):
            raise Wrong("what was queued before the send is not in what came, or not at once")
        if not m.same_large(old, seen):
            raise Wrong("what was queued before the receive has seen new weights")
    relay.close()
    return told(report)


# Several receivers


def fan(me: Me, routes: list[str | None], expected: list[str]) -> Any:
    """Rank 0 to all others; each by its route, and in another mode. Twice."""
    mode = list(MODES)[me.rank % len(MODES)]
    relay = relay_of(me, route=routes[me.rank])
    mine = m.weights(1 if me.rank == 0 else OLD, me.device)
    for seed in (1, 2):
        if me.rank == 0:
            m.overwrite(mine, seed)
            report = relay.send(mine, to=range(1, len(routes)))
            if report.failed or list(report.routes.values()) != expected:
                raise Wrong(f"routes {report.routes}, failed {report.failed}")
        else:
            got = relay.recv(0, into=None if mode == NEW else mine, **MODES[mode])
            report = got.report
            m.check_same(m.weights(seed, "cpu"), got.state, device=me.device, in_place=mode != NEW)
    relay.close()
    return told(report)
