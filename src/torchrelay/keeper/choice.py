"""The next decision of a job's keepers, from what each of them has. Pure.

A host that is lost takes along its own part of every step, and its copies of another's. So a step
survives any host if every host has its own part of it and another host has a copy of that part. All
keepers copy the same step, and keep the last one that all have copied until the next one is copied
everywhere. The rules of a decision, when a step is staged:

1. Of the steps that keepers have whole together, the newest below the staged one is kept. If none
   is below, the job has gone back further than any of them: the newest is kept.
2. A step that a keeper is copying is kept.
3. With copies, the newest step that all keepers have copied is kept, each its part, unless copies
   go wrong again and again.
4. Nothing else is kept, and nothing is decided about a step that no keeper has reported.
5. While a keeper copies, no other copy begins, and the staged step may be skipped; it never is at
   another time.

Example, of two keepers that copy from each other, when step 9 is staged:

    step  first keeper       second keeper      kept
    6     whole, copied      whole, copied      yes, by rule 3
    7     own part, copied   own part           no: 8 is newer
    8     own part           own part           yes, by rule 1: the parts are the whole together
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torchrelay.errors import UsageError
from torchrelay.keeper.server.messages import KeeperDecision, KeeperReport, RetainedStep

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


class ReportedStep(NamedTuple):
    """A step that keepers have something of. `parts`: what each of them has."""

    snapshot: str
    parts: list[RetainedStep]
    age: int  # how late keepers got it

    @property
    def number(self) -> int:
        return self.parts[0].step

    @property
    def is_complete(self) -> bool:
        """Whether keepers have all volumes together."""
        here = 0
        for part in self.parts:
            here |= int.from_bytes(part.here, "little")
        volumes = max(part.volumes for part in self.parts)
        return volumes > 0 and here == (1 << volumes) - 1

    def is_copied(self, keepers: int) -> bool:
        """Whether each keeper has all that it copies of it."""
        return len(self.parts) == keepers and all(part.copied for part in self.parts)


def choose(
    reports: Sequence[KeeperReport], step: int, *, copies: bool
) -> tuple[KeeperDecision, str]:
    """The decision for all keepers when a step is staged; why that step is skipped, if it is.
    `copies`: whether there are keepers to copy from."""
    known = _reported(reports)
    complete = sorted((one for one in known if one.is_complete), key=lambda one: one.age)
    below = [one for one in complete if one.number < step]
    copied = [one for one in complete if one.is_copied(len(reports))]
    busy = {one.copying for one in reports} - {""}
    keep = {one.snapshot for one in (below or complete)[-1:]} | busy  # rules 1 and 2
    if copies and all(one.failed < TRIES for one in reports):
        keep |= {one.snapshot for one in copied[-1:]}  # rule 3
    why = next((one.full for one in reports if one.full), "") if busy else ""
    names = sorted(one.snapshot for one in known)
    decision = KeeperDecision(sorted(keep), copies and not busy, names)
    assert not complete or keep.intersection(one.snapshot for one in complete), "all would be lost"
    assert keep <= busy.union(names), "kept, and not known"
    return decision, why


def _reported(reports: Sequence[KeeperReport]) -> list[ReportedStep]:
    parts: dict[str, list[RetainedStep]] = {}
    age: dict[str, int] = {}
    for one in reports:
        for order, kept in enumerate(one.steps):
            parts.setdefault(kept.snapshot, []).append(kept)
            age[kept.snapshot] = max(age.get(kept.snapshot, 0), order)
    return [ReportedStep(snapshot, some, age[snapshot]) for snapshot, some in parts.items()]


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
