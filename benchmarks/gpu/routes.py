"""Every promise of live transfers on every route that a machine allows: right or wrong, no speed.

    python -m benchmarks.gpu.routes --out benchmarks/gpu/results/routes.json

Spawned ranks share one GPU and a gloo group over loopback. Each case is one line: what it is, the
route asked for and taken, whether all held, and what was said or went wrong. With `--device cpu`
the cases that make sense without a GPU. Exits with 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import faults, scenes
from benchmarks.gpu.crew import Crew, NotStarted, Reply, Wrong
from benchmarks.gpu.scenes import MODES, NEW
from benchmarks.harness import machine

CALL = 40.0
"""Seconds that one call in the ranks may last; the transfers in it give up long before."""
TOTAL = 280.0
"""Seconds for all cases, unless told otherwise: the rest is not run, which is a failure."""
ROUTES = ("cuda_ipc", "memory", "tcp")
IN_PLACE = [mode for mode in MODES if mode != NEW]
SENDER, RECEIVER = 0, 1
_ALLOCATOR = "expandable_segments:True"
CREWS: dict[str, dict[int, dict[str, str]]] = {
    "usual": {},
    "deaths": {},
    "expandable": {
        SENDER: {"PYTORCH_ALLOC_CONF": _ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF": _ALLOCATOR}
    },
    "hidden": {RECEIVER: {"CUDA_VISIBLE_DEVICES": ""}},
}
"""Groups of processes, and what the environment of a rank has in each."""
FANS = 3


class Case(NamedTuple):
    name: str
    asked: str  # a route, or "" for none
    run: Callable[[Crew], dict[str, Any]]
    crew: str = "usual"
    takes: bool = True  # whether the route asked for must be the one taken
    measures: bool = False  # looks at the GPU's free memory, which others must leave alone


class Row(NamedTuple):
    case: str
    asked: str
    taken: str
    result: str  # ok, FAILED, not run or skipped
    reason: str
    seconds: float = 0.0


def together(fn: Callable[..., Any], *args: Any, size: int = 2) -> Callable[[Crew], dict[str, Any]]:
    """Run in the first ranks of a crew; what the last of them tells."""

    def run(crew: Crew) -> dict[str, Any]:
        return all_well(crew.call(fn, *args, ranks=range(size), limit=CALL))

    return run


class Broken(Exception):
    """A rank raised, hung or died: its crew is of no more use."""


def all_well(replies: dict[int, Reply], dead: int | None = None) -> dict[str, Any]:
    """What the last rank says. Raises what went wrong anywhere; `dead` is a rank that must be."""
    if dead is not None:
        ended = replies.pop(dead, Reply("died"))
        if ended.kind != "died":
            raise Broken(f"rank {dead} should be dead: {ended.kind} {ended.value or ''}")
    bad = {rank: reply for rank, reply in replies.items() if reply.kind != "ok"}
    if bad:
        text = "; ".join(
            f"rank {rank} {reply.kind}: {reply.value or ''}" for rank, reply in bad.items()
        )
        only_wrong = all(reply.kind == "wrong" for reply in bad.values())
        raise (Wrong if only_wrong else Broken)(text)
    found: dict[str, Any] = replies[max(replies)].value or {}
    return found


# The cases


def every_case(device: str, tiny: int) -> list[Case]:
    """In order; those that need a GPU last among their kind."""
    gpu = device != "cpu"
    routes = ROUTES if gpu else ROUTES[1:]
    return [
        *_whole(routes, tiny),
        *_destinations(routes, device),
        *_in_a_row(routes),
        *_unasked(device),
        *_checks(routes),
        *(_on_a_gpu(routes) if gpu else ()),
        *_fans(routes),
        *_deaths(routes, gpu),
    ]


def _whole(routes: Iterable[str], tiny: int) -> Iterable[Case]:
    for route in routes:
        for mode in MODES:
            run = together(scenes.whole, route, mode, tiny, False)
            yield Case(f"mixed state, {mode}", route, run)
    for route in routes:
        for mode in MODES if route != "tcp" else ():
            run = together(scenes.whole, route, mode, tiny // 10, True)
            yield Case(f"mixed state, reading is refused, {mode}", route, run)


def _destinations(routes: Iterable[str], device: str) -> Iterable[Case]:
    kinds = {
        "framed": "strided into strided, memory around it stays",
        "part": "part of the state: missing and extra keys",
        "tied": "tied on both sides, and at the sender alone",
        "clash": "tied at the receiver alone is refused",
    }
    for route in routes:
        for kind, name in kinds.items():
            for mode in IN_PLACE:
                run = together(scenes.destination, route, mode, kind)
                yield Case(f"{name}, {mode}", route, run, takes=kind != "clash")
    if device == "cpu":
        return
    for route in ("memory", "tcp", ""):
        for here, there in (("cpu", device), (device, "cpu"), ("both", "both")):
            for mode in MODES if there != "both" else IN_PLACE:
                run = together(scenes.crossing, route or None, mode, here, there)
                yield Case(f"from {here} to {there}, {mode}", route, run)
    for mode in IN_PLACE:
        run = together(scenes.crossing, "cuda_ipc", mode, "both", "both")
        yield Case(f"from both to both, {mode}", "cuda_ipc", run)


def _in_a_row(routes: Iterable[str]) -> Iterable[Case]:
    for route in routes:
        for mode in MODES:
            run = together(scenes.in_a_row, route, mode)
            yield Case(f"many in a row, memory reused, {mode}", route, run)


def _unasked(device: str) -> Iterable[Case]:
    def unasked(name: str, expected: str, *args: str, crew: str = "usual") -> Case:
        run = together(scenes.default_route, expected, *args)
        return Case(f"route taken unasked: {name}", "", run, crew)

    def forced(name: str, here: str, where: str, crew: str = "usual") -> Case:
        run = together(scenes.forced, here, where)
        return Case(f"refused on both sides: {name}", "cuda_ipc", run, crew, takes=False)

    if device == "cpu":
        yield unasked("CPU to CPU", "memory", "cpu")
        yield forced("CPU to CPU", "cpu", "cpu")
        return
    yield unasked("GPU to GPU", "cuda_ipc", device)
    yield unasked("GPU to CPU", "memory", "cpu")
    yield unasked("nothing contiguous", "memory", device, "strided")
    yield forced("GPU to CPU", device, "cpu")
    yield forced("CPU to GPU", "cpu", device)
    yield unasked("expandable_segments", "memory", device, "expandable", crew="expandable")
    yield forced("expandable_segments", device, device, "expandable")
    yield unasked("receiver without GPU", "memory", "cpu", crew="hidden")
    yield forced("receiver without GPU", device, "cpu", "hidden")


def _checks(routes: Iterable[str]) -> Iterable[Case]:
    for route in routes:
        for verify, checked in (("all", True), (False, False), (True, route != "memory")):
            run = together(scenes.verified, route, verify, checked)
            yield Case(f"verify={verify}", route, run)
    for route in routes:
        for verify in (True, "all") if route == "cuda_ipc" else ("all",):
            for mode in MODES:
                run = together(faults.altered, route, mode, verify)
                yield Case(f"digests that do not hold, verify={verify}, {mode}", route, run)
    for route in routes:
        for mode in MODES if route != "tcp" else ():
            run = together(faults.changed_seen, route, mode)
            yield Case(f"changed while it was sent, {mode}", route, run)


def _on_a_gpu(routes: Iterable[str]) -> Iterable[Case]:
    for mode in MODES:
        for route in routes:
            run = together(faults.written_wrong, route, mode)
            yield Case(f"a bit flips after the copy, {mode}", route, run)
        for verify in (True, "all"):
            run = together(faults.changed_unseen, mode, verify)
            yield Case(f"changed, and autograd not told, verify={verify}, {mode}", "cuda_ipc", run)
    yield Case("two relays open the same memory", "cuda_ipc", together(faults.two_relays))
    for route in routes:
        for mode in MODES if route == "cuda_ipc" else IN_PLACE:
            run = together(scenes.streams, route, mode, False)
            yield Case(f"work queued on the default stream, {mode}", route, run)
    for mode in IN_PLACE:
        run = together(scenes.streams, "cuda_ipc", mode, True)
        yield Case(f"work queued on another stream, {mode}", "cuda_ipc", run)
    for how in ("another", "close"):
        name = {"another": "another state came", "close": "close"}[how]
        run = _given_back(how)
        yield Case(f"memory is the sender's again after {name}", "cuda_ipc", run, measures=True)


def _given_back(how: str) -> Callable[[Crew], dict[str, Any]]:
    nbytes = 4 << 30

    def run(crew: Crew) -> dict[str, Any]:
        def step(name: str, ranks: Iterable[int], free: int = 0) -> dict[str, Any]:
            replies = crew.call(
                faults.gives_back, name, nbytes, free, ranks=list(ranks), limit=CALL
            )
            return all_well(replies)

        found = step("send", (0, 1))
        free: Any = crew.call(faults.measure, ranks=[SENDER], limit=CALL)[SENDER].value
        try:
            if how == "another":
                step("another", (0, 1), free)
            else:
                step("close", [RECEIVER])
                step("free", [SENDER], free)
        finally:
            step("end", (0, 1))
        return found

    return run


def _fans(routes: Iterable[str]) -> Iterable[Case]:
    def fan(name: str, asked: list[str | None], taken: list[str], route: str) -> Case:
        run = together(scenes.fan, asked, taken, size=len(asked))
        return Case(name, route, run)

    for route in routes:
        same: list[str | None] = [route] * (FANS + 1)
        yield fan(f"one to {FANS}", same, [route] * FANS, route)
    fastest = next(iter(routes))
    mixed = [fastest, "memory", "tcp"]
    yield fan(f"one to {FANS}, each by another route", [None, *mixed], mixed, "")


def _deaths(routes: Iterable[str], gpu: bool) -> Iterable[Case]:
    """Each takes a rank with it: the first stays, the last comes when all is over."""
    scenes_of = [("receiver", route, True) for route in routes]
    scenes_of += [("sender", route, True) for route in routes]
    scenes_of += [("sender", route, False) for route in routes if route != "tcp"]
    for victim, (who, route, atomic) in enumerate(scenes_of, 1):
        name = f"SIGKILL of the {who} at the copy"
        if who == "sender":
            name += ", in place, atomic" if atomic else ", in place"
        run = _death(who, victim, route, atomic, gpu)
        yield Case(name, route, run, "deaths", takes=False, measures=True)
    for route in routes:
        yield Case("after the deaths, both ways", route, _friend(route), "deaths")


def _death(
    who: str, victim: int, route: str, atomic: bool, gpu: bool
) -> Callable[[Crew], dict[str, Any]]:
    # Much more than a dead process's own context gives back, where that is what is looked at.
    opens = gpu and route == "cuda_ipc"
    nbytes = 4 << 30 if opens else 64 << 20

    def run(crew: Crew) -> dict[str, Any]:
        free: Any = crew.call(faults.measure, ranks=[0], limit=CALL)[0].value
        if who == "receiver":
            args: tuple[Any, ...] = (victim, route, nbytes, free if opens else 0)
            replies = crew.call(faults.receiver_dies, *args, ranks=[0, victim], limit=CALL)
        else:
            args = (victim, crew.pids[victim], route, atomic, nbytes)
            replies = crew.call(faults.sender_dies, *args, ranks=[0, victim], limit=CALL)
        return all_well(replies, dead=victim)

    return run


def _friend(route: str) -> Callable[[Crew], dict[str, Any]]:
    def run(crew: Crew) -> dict[str, Any]:
        friend = crew.size - 1
        return all_well(
            crew.call(faults.after_deaths, friend, route, ranks=[0, friend], limit=CALL)
        )

    return run


# Running them


class Stage:
    """The crews, started at once and anew when one is of no more use."""

    def __init__(self, cases: list[Case], device: str) -> None:
        victims = sum(case.crew == "deaths" and "SIGKILL" in case.name for case in cases)
        self._device = device
        self._sizes = {"usual": FANS + 1, "deaths": victims + 2}
        self._crews: dict[str, Crew] = {}
        for name in dict.fromkeys(case.crew for case in cases):
            self._start(name)

    def _start(self, name: str) -> Crew:
        self._crews[name] = crew = Crew(self._sizes.get(name, 2), self._device, CREWS[name])
        return crew

    def play(self, case: Case) -> Row:
        begun = time.monotonic()
        taken = ""
        try:
            for crew in self._crews.values() if case.measures else ():
                with suppress(NotStarted):  # told by the first case that needs it
                    crew.wait_ready()
            found = case.run(self._crews.get(case.crew) or self._start(case.crew))
            taken = found.get("route", "")
            if case.takes and case.asked and taken != case.asked:
                raise Wrong(f"route {taken!r} was taken; {found.get('instead')}")
            result, reason = "ok", found.get("note", "")
        except Wrong as fault:
            result, reason = "FAILED", str(fault)
        except Exception as fault:
            result, reason = "FAILED", f"{fault}" or type(fault).__name__
            if crew := self._crews.pop(case.crew, None):
                crew.close()
        reason = re.sub(r"\[/\S+\] ", "", reason)  # where gloo was built
        return Row(case.name, case.asked, taken, result, reason, time.monotonic() - begun)

    def close(self) -> None:
        for crew in self._crews.values():
            crew.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.routes", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=TOTAL, help="then the rest is not run")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--tiny", type=int, default=3000, help="how many tiny tensors")
    options = parser.parse_args()
    begun = time.monotonic()
    no_gpu = options.device == "cuda" and not torch.cuda.is_available()
    device = "cpu" if no_gpu else options.device
    cases = every_case(device, options.tiny)
    chosen = [case for case in cases if options.only in case.name]
    rows: list[Row] = []
    if device == "cpu":
        named = {(case.name, case.asked) for case in cases}
        why = "no GPU here" if no_gpu else "needs a GPU"
        rows += [
            Row(case.name, case.asked, "", "skipped", why)
            for case in every_case("cuda", options.tiny)
            if (case.name, case.asked) not in named and options.only in case.name
        ]
    stage = Stage(chosen, device)
    try:
        for case in chosen:
            if time.monotonic() - begun > options.seconds:
                rows.append(Row(case.name, case.asked, "", "not run", "the time was over"))
            else:
                rows.append(stage.play(case))
            _show(rows[-1])
    finally:
        stage.close()
    count = {kind: sum(row.result == kind for row in rows) for kind in {r.result for r in rows}}
    print(", ".join(f"{n} {kind}" for kind, n in sorted(count.items())), flush=True)
    result = {
        "benchmark": "gpu routes",
        "machine": {**machine(), **({} if device == "cpu" else _gpu())},
        "device": device,
        "seconds": round(time.monotonic() - begun, 1),
        "count": count,
        "rows": [{**row._asdict(), "seconds": round(row.seconds, 2)} for row in rows],
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(set(count) - {"ok", "skipped"} != set())


def _gpu() -> dict[str, Any]:
    return {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _show(row: Row) -> None:
    reason = row.reason if row.result != "ok" else row.reason.replace("\n", " ")[:110]
    print(
        f"{row.case:62s} {row.asked or '-':9s}{row.taken or '-':9s}{row.result:8s}"
        f"{row.seconds:6.2f} s  {reason}".rstrip(),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
