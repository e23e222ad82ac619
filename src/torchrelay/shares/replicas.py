"""How ranks find out whether the tensors that they hold in common are equal. Pure.

A team is the ranks that hold the same elements. Each rank sends one digest for each of its teams:
of the digests of all tensors that the team has. Only where these differ, one rank of each digest
sends its tensors. Three ranks of a team, and the digest of its tensors `a` and `b`:

    rank        0     1     2           ranks 0 and 1 send theirs: a differs, on rank 1
    of the team D     E     D           the values of rank 0 stand for those of rank 2
    a, b        p q   r q   p q
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from torchrelay.results import Differing
from torchrelay.state.replicas import ReplicaKind

LISTED = 256  # differing tensors that are listed by path; more are counted

_encode = msgspec.msgpack.Encoder().encode


class Replica(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor that this rank has in common with its team, and the digest of its bytes here.
    `layout`: its dtype and shape, where ranks may have others."""

    team: bytes
    path: str
    kind: ReplicaKind
    value: bytes
    layout: str = ""


TeamDigests = dict[bytes, bytes]


class Split(NamedTuple):
    """The ranks of a team by the digest that they sent, and for each digest the lowest of them."""

    groups: list[list[int]]

    @property
    def speakers(self) -> list[int]:
        return [group[0] for group in self.groups]


class Disagreement(NamedTuple):
    """The replicas of one tensor that differ: the ranks by value, those in `right` first, which are
    the most; of several that are as many, those with the lowest rank."""

    path: str
    kind: ReplicaKind
    groups: list[list[int]]

    @property
    def right(self) -> list[int]:
        return self.groups[0]

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for group in self.groups for rank in group)

    def differing(self) -> Differing:
        """With the ranks in the minority; with all where no value has the most."""
        right = () if len(self.groups[1]) == len(self.right) else self.right
        named = tuple([rank for rank in self.ranks if rank not in right])
        return Differing(self.path, self.kind, named)


def digests_of_teams(replicas: Iterable[Replica]) -> TeamDigests:
    """The digest of each team's tensors."""
    teams: defaultdict[bytes, list[tuple[str, bytes]]] = defaultdict(list)
    for one in replicas:
        teams[one.team].append((one.path, one.value))
    return {team: xxhash.xxh3_128_digest(_encode(sorted(found))) for team, found in teams.items()}


def splits(sent: Sequence[TeamDigests]) -> dict[bytes, Split]:
    """The teams whose ranks sent different digests."""
    teams: defaultdict[bytes, defaultdict[bytes, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, digests in enumerate(sent):
        for team, digest in digests.items():
            teams[team][digest].append(rank)
    return {team: Split([*by.values()]) for team, by in teams.items() if len(by) > 1}


def requested(split: Mapping[bytes, Split], rank: int) -> tuple[bytes, ...]:
    """The teams whose tensors a rank sends."""
    return tuple([team for team, one in split.items() if rank in one.speakers])


def disagreements(
    split: Mapping[bytes, Split], sent: Sequence[Iterable[Replica]]
) -> list[Disagreement]:
    """The tensors whose replicas differ, in the order of their paths. `sent`: by rank, what it was
    requested to send. Ranks compare what all of the team have, in one layout."""
    found = []
    for team, one in split.items():
        values: defaultdict[tuple[str, ReplicaKind, str], dict[int, bytes]] = defaultdict(dict)
        for rank in one.speakers:
            for replica in sent[rank]:
                if replica.team == team:
                    values[replica.path, replica.kind, replica.layout][rank] = replica.value
        for (path, kind, _), by_rank in values.items():
            if len(by_rank) == len(one.groups) and len(set(by_rank.values())) > 1:
                every = {rank: by_rank[group[0]] for group in one.groups for rank in group}
                found.append(disagreement(path, kind, every))
    return sorted(found)


def disagreement(path: str, kind: ReplicaKind, values: Mapping[int, bytes]) -> Disagreement:
    """The ranks of a tensor, by the value that each has."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        groups[value].append(rank)
    return Disagreement(
        path, kind, sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    )


def listed(found: Iterable[Disagreement]) -> tuple[tuple[Differing, ...], int]:
    """The first of the tensors that differ, and their number. Buffers come last."""
    several = [one.differing() for one in found]
    several.sort(key=lambda one: (one.kind == "buffer", one.path, one.ranks))
    return tuple(several[:LISTED]), len(several)
