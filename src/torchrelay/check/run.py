"""The check from its first row to its last: every rank runs this, and rank 0 has the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.check import bucket, folder, links, machine, routes, survival
from torchrelay.check.ranks import Ranks
from torchrelay.check.report import Finding
from torchrelay.transports.routes.choice import ALWAYS

PHASE_SECONDS = 45.0
SLOW_LINK_SECONDS = 2.0  # that one state may take on a link; a slow link gets a smaller state


@dataclass(frozen=True)
class CheckPlan:
    """What to check: a folder that all ranks share, and a bucket; both may be left out."""

    folder: str | None = None
    bucket: str | None = None


def check(ranks: Ranks, plan: CheckPlan) -> list[Finding]:
    """All rows, on rank 0; the rows of other ranks are not complete."""
    facts = ranks.gather("facts", machine.facts(ranks.local), PHASE_SECONDS)
    ranks.gather("ready", True, PHASE_SECONDS)  # so that all look at their clocks at once
    clocks = ranks.gather("clocks", time.time(), PHASE_SECONDS)
    rows = machine.judge(facts, clocks)
    if None in facts:
        return rows  # every later exchange would wait for these ranks
    hosts = [one["machine"] for one in facts]
    names = [one["host"] for one in facts]
    with links.listening() as listener:
        rows += _links(ranks, listener, hosts, names)
    rows += _routes(ranks, facts, hosts, names)
    if plan.folder is not None:
        rows += folder.probe(ranks, Path(plan.folder).expanduser())
    for name, act in _alone(plan):
        done = ranks.gather(name, [vars(row) for row in act()] if ranks.rank == 0 else [], 90.0)
        rows += [Finding(**row) for row in done[0] or []]
    return rows


def _alone(plan: CheckPlan) -> Iterator[tuple[str, Callable[[], list[Finding]]]]:
    """What rank 0 does for all."""
    if plan.bucket is not None:
        yield "bucket", partial(bucket.probe, plan.bucket)
    for place in filter(None, (plan.folder, plan.bucket)):
        yield f"survival/{place}", partial(survival.probe, place)


def _links(
    ranks: Ranks, listener: links.Greeter, hosts: Sequence[str], names: Sequence[str]
) -> list[Finding]:
    addresses = ranks.gather("addresses", [listener.host, listener.port], PHASE_SECONDS)
    others = {
        rank: (str(address[0]), int(address[1]))
        for rank, address in enumerate(addresses)
        if address is not None and rank != ranks.rank
    }
    reached = ranks.gather("reached", links.connections(others), PHASE_SECONDS)
    rows = links.judge_connections(names, addresses, reached)
    nics = ranks.gather("interfaces", links.interfaces(), PHASE_SECONDS)
    for turn, pairs in enumerate(neighbours(hosts)):
        mine = next((there for here, there in pairs if here == ranks.rank), None)
        speed = None
        if mine is not None and not (reached[ranks.rank] or {}).get(str(mine)):
            speed = links.speed(others[mine])
        speeds = ranks.gather(f"speed/{turn}", speed, PHASE_SECONDS)
        for here, there in pairs:
            if speeds[here] is not None:
                found = links.judge_speed(names[here], names[there], speeds[here], nics[here] or {})
                rows.append(found)
    return rows


def neighbours(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Pairs of ranks on neighbouring hosts, in turns in which no host is in two pairs.

    With hosts a, b and c in this order: first a to b, then b to c.
    """
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    ranks = list(first.values())
    pairs = list(pairwise(ranks))
    return [turn for turn in (pairs[0::2], pairs[1::2]) if turn]


def same_host(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """The first two ranks of each host that has two."""
    by: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by.setdefault(host, []).append(rank)
    return [(ranks[0], ranks[1]) for ranks in by.values() if len(ranks) > 1]


def _routes(
    ranks: Ranks, facts: Sequence[dict[str, Any]], hosts: Sequence[str], names: Sequence[str]
) -> list[Finding]:
    rows = []
    devices = ["cpu"]
    if all(one["gpus"] for one in facts):
        devices.append(f"cuda:{ranks.local % torch.cuda.device_count()}")
    turns = [("same host", same_host(hosts)), *(("other host", p) for p in neighbours(hosts))]
    for number, (kind, pairs) in enumerate(turns):
        if not pairs:
            continue
        mine = next((pair for pair in pairs if ranks.rank in pair), None)
        if kind == "same host":
            # The gathers below need every rank, so ranks without a pair take part with none.
            why = routes.reads_memory(ranks, f"turn/{number}", mine or (-1, -1))
            for pair, found in zip(pairs, _of(ranks, f"reads/{number}", why, pairs), strict=True):
                if found is not None:
                    subject = f"ranks {pair[0]} and {pair[1]} on {names[pair[0]]}"
                    rows.append(routes.judge_memory(subject, found))
        for device in devices:
            begun: dict[str, Any] = {}
            limits: dict[str, float] = {}
            if mine is not None:
                group = ranks.pair(f"{number}/{device[:4]}", *mine)
                begun, limits = _transfers(group, device, kind == "same host")
            every = _of(ranks, f"routes/{number}/{device[:4]}", [begun, limits], pairs)
            for pair, one in zip(pairs, every, strict=True):
                shown = "CPU" if device == "cpu" else "GPU"
                subject = f"{kind}, {shown}, rank {pair[0]} to {pair[1]}"
                if one is not None:
                    rows += routes.judge(subject, *one)
    if len(devices) > 1:
        rows += _backend(ranks, facts, hosts, devices[1])
    return rows


def _of(ranks: Ranks, name: str, mine: object, pairs: Sequence[tuple[int, int]]) -> list[Any]:
    """The facts that the second rank of each pair found."""
    found = ranks.gather(name, mine, 3 * PHASE_SECONDS)
    return [found[second] for _, second in pairs]


def _transfers(group: Any, device: str, one_host: bool) -> tuple[dict[str, Any], dict[str, float]]:
    """Every route between the two ranks of a pair, and the limits of those of one machine."""
    nbytes = routes.NBYTES
    if not one_host:
        # A first small state says what the link carries.
        begin = time.perf_counter()
        probed = routes.transfer(group, ALWAYS.name, "cpu", routes.NBYTES // 64)
        carried = routes.NBYTES // 32 / (time.perf_counter() - begin)
        if carried * SLOW_LINK_SECONDS < nbytes:
            nbytes = routes.NBYTES // 16
        if "why" in probed:
            return {ALWAYS.name: probed}, {}
    found = {}
    for route in routes.routes_here(device):
        if one_host or route == ALWAYS.name:
            found[route] = routes.transfer(group, route, device, nbytes)
    limits = {}
    if one_host and group.rank() == 1:
        copy = routes.copy_speed(nbytes, device)
        limits = {"memory": copy} if device == "cpu" else {"cuda_ipc": copy}
    return found, limits


def _backend(
    ranks: Ranks, facts: Sequence[dict[str, Any]], hosts: Sequence[str], device: str
) -> list[Finding]:
    """nccl between all ranks, on a group of its own, and torchrelay's route through it."""
    used = [(host, one["local"] % one["gpus"]) for host, one in zip(hosts, facts, strict=True)]
    if len(used) < 2:
        return []
    if len(set(used)) < len(used):
        why = "not tried: several ranks share a GPU, which nccl refuses"
        return [Finding(routes.AREA, "nccl", "ok", why)]
    begun: dict[str, Any] = {}
    try:
        torch.cuda.set_device(device)
        if ranks.rank < 2:
            begun = _through_nccl(ranks, device)
    except Exception as fault:  # of nccl, and of its sockets
        begun = {"why": str(fault).splitlines()[0]}
    found = ranks.gather("nccl", begun, 3 * PHASE_SECONDS)
    if found[1] is None or "why" in found[1]:
        why = found[1]["why"] if found[1] else "no answer"
        remedy = "run nccl's own tests with NCCL_DEBUG=INFO"
        return [Finding(routes.AREA, "nccl", "slow", f"does not work: {why}", remedy)]
    limit = {"group": found[1]["broadcast"]}
    return routes.judge("nccl, GPU, rank 0 to 1", {"group": found[1]["group"]}, limit)


def _through_nccl(ranks: Ranks, device: str) -> dict[str, Any]:
    from datetime import timedelta

    group = ranks.pair("nccl", 0, 1)
    limit = timedelta(seconds=PHASE_SECONDS)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=group.store, rank=ranks.rank, world_size=2, timeout=limit
    )
    try:
        world: Any = dist.group.WORLD
        broadcast = routes.broadcast_speed(world, routes.NBYTES, device)
        moved = routes.transfer(world, "group", device, routes.NBYTES)
        return {"broadcast": broadcast, "group": moved}
    finally:
        dist.destroy_process_group()
