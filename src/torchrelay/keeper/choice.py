"""What the keepers of a job do next, from what each of them has. Pure.

A host that is lost takes its own part of every step along, and the copies that it had of another's.
So a step outlives any host if every host has its own part of it, and another host a copy of that.
All keepers therefore copy the same step, and keep the last one that all had copied until the next
one is copied everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrelay.errors import UsageError
from torchrelay.keeper.server.copying import KeeperRing
from torchrelay.keeper.server.messages import CopiesTold, CopyNext, HeldStep

TRIES = 2  # copies that may go wrong in a row before steps are staged without them


def choose(told: Sequence[CopiesTold], several: bool, others: bool) -> tuple[CopyNext, str]:
    """What all keepers are told before a step is staged; why the step is skipped, if it is.

    `several`: there are keepers to copy from. `others`: they are not those of the step before, so
    that what one heard of another no longer counts.
    """
    idle = all(one.idle for one in told)
    copied = {one.copied for one in told}
    whole, void = completed((step for one in told for step in one.steps), heard=not others)
    word = CopyNext(
        safe=copied.pop() if len(copied) == 1 and not others else "",
        begin=several and idle,
        alone=any(one.failed >= TRIES for one in told),
        whole=whole,
        void=void,
    )
    why = "" if idle or others else next((one.full for one in told if one.full), "")
    return word, why


def completed(steps: Iterable[HeldStep], heard: bool) -> tuple[list[str], list[str]]:
    """Steps of which the keepers have all parts together, and those of which they do not.

    `heard`: what a keeper heard of all ranks holds for these keepers.
    """
    whole: set[str] = set()
    here: dict[str, int] = {}
    for step in steps:
        found = here.get(step.snapshot, 0) | int.from_bytes(step.here, "little")
        here[step.snapshot] = found
        if (heard and step.whole) or (step.volumes and found == (1 << step.volumes) - 1):
            whole.add(step.snapshot)
    return sorted(whole), sorted(here.keys() - whole)


def check_budget(
    parts: Sequence[int], urls: Sequence[str], budgets: Sequence[int], copies: int
) -> None:
    """`UsageError` where two steps of a host and two copies do not fit into its keeper's memory.

    Of each rank: the bytes of its part of a step, its keeper, and that one's budget, 0 for none.
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
