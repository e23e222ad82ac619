"""The next decision of a job's keepers, from what each of them has. Pure.

A host that is lost takes along its own part of every step, and its copies of another's. So a step
survives any host if every host has its own part of it and another host has a copy of that part. All
keepers copy the same step, and keep the last one that all have copied until the next one is copied
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchrelay.errors import UsageError
from torchrelay.keeper.server.messages import HeldStep, KeeperDecision, KeeperReport

TRIES = 2  # copies that may go wrong in a row before steps are staged without them


class KeeperRing(NamedTuple):
    """The keepers of a job in their order, and which of them this one is."""

    urls: list[str]
    own: str

    def sources(self, copies: int) -> list[str]:
        """The keepers that this one copies from: those before it."""
        if self.own not in self.urls:
            return []
        at, count = self.urls.index(self.own), len(self.urls)
        return [self.urls[(at - back) % count] for back in range(1, min(copies, count - 1) + 1)]


def choose(
    reports: Sequence[KeeperReport], step: int, *, copies: bool
) -> tuple[KeeperDecision, str]:
    """The decision for all keepers when a step is staged; why that step is skipped, if it is.
    `copies`: whether there are keepers to copy from."""
    busy = {one.copying for one in reports} - {""}
    found: dict[str, list[HeldStep]] = {}
    age: dict[str, int] = {}  # places in the order in which keepers got their steps
    for one in reports:
        for place, held in enumerate(one.steps):
            found.setdefault(held.snapshot, []).append(held)
            age[held.snapshot] = max(age.get(held.snapshot, 0), place)
    complete = [snapshot for snapshot, parts in found.items() if _is_complete(parts)]
    complete.sort(key=age.__getitem__)
    # The step ends what is newer than it: the job has gone back to one that is older.
    older = [snapshot for snapshot in complete if found[snapshot][0].step < step]
    keep = set((older or complete)[-1:]) | busy
    if copies and all(one.failed < TRIES for one in reports):
        everywhere = [
            snapshot
            for snapshot in complete
            if len(found[snapshot]) == len(reports) and all(one.copied for one in found[snapshot])
        ]
        keep |= set(everywhere[-1:])
    why = next((one.full for one in reports if one.full), "") if busy else ""
    return KeeperDecision(sorted(keep), copies and not busy, sorted(found)), why


def _is_complete(parts: Sequence[HeldStep]) -> bool:
    """Whether keepers have all volumes of a step together."""
    here = 0
    for part in parts:
        here |= int.from_bytes(part.here, "little")
    volumes = max(part.volumes for part in parts)
    return volumes > 0 and here == (1 << volumes) - 1


def check_budget(
    parts: Sequence[int], urls: Sequence[str], budgets: Sequence[int | None], copies: int
) -> None:
    """`UsageError` where two steps of a host and two copies do not fit into its keeper's memory.

    For each rank: the bytes of its part of a step, its keeper, and the keeper's budget, if any.
    """
    own: dict[str, int] = {}
    for nbytes, url in zip(parts, urls, strict=True):
        own[url] = own.get(url, 0) + nbytes
    ring = sorted(own)
    for url, memory in zip(urls, budgets, strict=True):
        copied = sum(own[source] for source in KeeperRing(ring, url).sources(copies))
        if memory and memory < 2 * (own[url] + copied):
            raise UsageError(
                f"memory={memory} is too little for the keeper at {url}: two steps of its host "
                f"take {2 * own[url]} bytes, and two copies of other hosts' parts {2 * copied}"
            )
