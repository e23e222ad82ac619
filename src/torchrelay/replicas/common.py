"""The tensors that this rank holds in common with others, and their digests.

A training loop compares the same state again and again. So what follows from its structure alone is
kept for the next call: which leaves are replicas, their paths and teams. No tensor is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import compress, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from torchrelay.arguments import matches
from torchrelay.coordination.groups import members_of
from torchrelay.describing.at_rest import describe
from torchrelay.describing.plain import find_plain
from torchrelay.pause import gc_paused
from torchrelay.record import manifest as m
from torchrelay.shares.replicas import Replica, TeamDigests
from torchrelay.shares.values import value_digests
from torchrelay.state import tensors as t
from torchrelay.state.backing import with_memory
from torchrelay.state.objects import Objects, flatten_objects
from torchrelay.state.paths import Path, dotted, naming, slots
from torchrelay.state.replicas import DeclaredReplicas, ReplicaKind, ranks_with_copies

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_layout_of = attrgetter("layout")
_encode = msgspec.msgpack.Encoder().encode


class ReplicaSelection(NamedTuple):
    """Which tensors a call compares: patterns of those that the caller names as replicas and of
    those that it leaves out, and the ranks that take part."""

    replicated: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    members: Collection[int] | None = None


class _Common(NamedTuple):
    """A tensor that is held in common: its number among the leaves, and the ranks that have it."""

    leaf: int
    path: str
    kind: ReplicaKind
    team: bytes


class _AllCommon(NamedTuple):
    """All of them, in the order of teams and paths. `teams`: of each the first one, the end, and a
    digest of its paths."""

    rows: list[_Common]
    teams: list[tuple[bytes, int, int, bytes]]

    @classmethod
    def of(cls, found: Iterable[_Common]) -> _AllCommon:
        rows = sorted(found, key=lambda one: (one.team, one.path))
        teams, first = [], 0
        for team, several in groupby(rows, key=lambda one: one.team):
            paths = [one.path for one in several]
            teams.append((team, first, first + len(paths), xxhash.xxh3_128_digest(_encode(paths))))
            first += len(paths)
        return cls(rows, teams)


class _Leaves(NamedTuple):
    """The leaves of a state, with the paths at which they are, in the order of `tree`."""

    tree: m.Node | None
    leaves: Sequence[Any]
    objects: Objects
    paths: list[Path] | None = None


class CommonTensors:
    """The replicas in one state, in the order of their teams and paths."""

    def __init__(self, common: _AllCommon, leaves: Sequence[Any]) -> None:
        self._common = common
        rows = common.rows
        self.tensors: list[torch.Tensor] = [leaves[one.leaf] for one in rows]
        if not _PLAIN.issuperset(map(type, self.tensors)):
            self.tensors = [*map(_local, self.tensors)]
        # Before an address is used, the memory is known to be there.
        self._plain = find_plain(self.tensors, sent=False)
        others = np.ones(len(rows), bool)
        others[self._plain.leaves] = False
        for number in np.flatnonzero(others).tolist():
            with naming(rows[number].path):
                self.tensors[number] = with_memory(self.tensors[number])
        self._values: list[bytes] = []

    @classmethod
    def none(cls) -> CommonTensors:
        return cls(_AllCommon([], []), [])

    @property
    def nbytes(self) -> int:
        others = set(range(len(self.tensors))).difference(self._plain.leaves.tolist())
        return int(self._plain.nbytes.sum()) + sum(self.tensors[n].nbytes for n in others)

    def digests(self) -> TeamDigests:
        """One digest for each team. All bytes are hashed, once."""
        self._values = value_digests(self.tensors, self._plain)
        return {
            team: xxhash.xxh3_128_digest(paths + b"".join(self._values[first:stop]))
            for team, first, stop, paths in self._common.teams
        }

    def replicas(self, teams: Collection[bytes]) -> list[Replica]:
        """The tensors of some teams, after `digests`."""
        columns = self._common.rows, self._values, self.tensors
        return [
            Replica(one.team, one.path, one.kind, value, _layout(tensor))
            for one, value, tensor in zip(*columns, strict=True)
            if one.team in teams
        ]

    def find(self, path: str) -> torch.Tensor:
        """A tensor that is held in common, by its path."""
        number = next(n for n, one in enumerate(self._common.rows) if one.path == path)
        return self.tensors[number]


class _Known(NamedTuple):
    """What follows from the structure of a state, and everything that it follows from."""

    selection: ReplicaSelection
    tree: m.Node
    types: list[type]
    specs: list[Any]
    objects: dict[Path, weakref.ref[Any]]
    common: _AllCommon


_last: _Known | None = None  # of the last call of this process


def common_tensors(state: object, selection: ReplicaSelection) -> CommonTensors:
    """The tensors of a state that this rank holds in common with others."""
    global _last
    with gc_paused():
        flat, objects = flatten_objects(state)
        found = _Leaves(flat.tree, flat.leaves, objects)
        types = [*map(type, found.leaves)]
        if _is_composite(found.leaves, types):
            # Leaves that are made of several tensors: the general way takes them apart.
            described = describe(state)
            found = _Leaves(None, described.tensors, described.objects, described.paths)
            return CommonTensors(_find_common(found, selection), found.leaves)
        sharded = (n for n, kind in enumerate(types) if kind not in _PLAIN)
        leaves = [found.leaves[n] for n in sharded]
        specs = [t.dtensor_parts(one)[1] for one in leaves if t.is_dtensor(one)]
        kept = {
            path: weakref.ref(one.object)
            for path, one in objects.items()
            if isinstance(one.object, (torch.nn.Module, torch.optim.Optimizer))
        }
        known, key = _last, (selection, flat.tree, types, specs, kept)
        if known is None or known[:5] != key:
            known = _last = _Known(*key, _find_common(found, selection))
        return CommonTensors(known.common, found.leaves)


def _find_common(found: _Leaves, selection: ReplicaSelection) -> _AllCommon:
    declared = DeclaredReplicas(found.objects, selection.replicated, members_of)
    by_spec: dict[Any, bytes | None] = {}
    common: list[_Common] = []
    seen: set[int] = set()
    for path, leaf in _places(found):
        tensor = found.leaves[leaf]
        if leaf in seen or not isinstance(tensor, torch.Tensor):
            continue
        seen.add(leaf)
        name = dotted(path)
        if selection.exclude and matches(name, selection.exclude):
            continue
        kind: ReplicaKind = "DTensor"
        team: bytes | None = None
        if t.is_dtensor(tensor):
            local, spec = t.dtensor_parts(tensor)
            if spec not in by_spec:
                by_spec[spec] = _team_of(spec, selection.members) if local.numel() else None
            team = by_spec[spec]
        elif type(tensor) in _PLAIN and tensor.layout is torch.strided:
            replicas = declared.of(path)
            if replicas is not None:
                kind, team = replicas.kind, _digest(list(replicas.ranks))
        if team is not None:
            common.append(_Common(leaf, name, kind, team))
    return _AllCommon.of(common)


def _places(found: _Leaves) -> list[tuple[Path, int]]:
    if found.paths is not None:
        return [(path, leaf) for leaf, path in enumerate(found.paths)]
    return [] if found.tree is None else [*slots(found.tree)]


def _team_of(spec: Any, members: Collection[int] | None) -> bytes | None:
    """The ranks that have the elements that this rank has of a DTensor; None if it is alone."""
    copies = [dim for dim, one in enumerate(spec.placements) if one.is_replicate()]
    if not copies or spec.mesh.get_coordinate() is None:
        return None
    team = sorted(ranks_with_copies(spec.mesh, copies, members))
    return _digest(team) if len(team) > 1 else None


def _is_composite(leaves: Sequence[Any], types: Sequence[type]) -> bool:
    """Whether some leaf is a tensor with several parts, and not a DTensor."""
    examples = dict(zip(types, leaves, strict=True))
    plain = compress(leaves, map(_PLAIN.__contains__, types))
    return not {*map(_layout_of, plain)} <= {torch.strided} or any(
        isinstance(one, torch.Tensor) and kind not in _PLAIN and not t.is_dtensor(one)
        for kind, one in examples.items()
    )


def _local(tensor: Any) -> torch.Tensor:
    if t.is_dtensor(tensor):
        local: torch.Tensor = t.dtensor_parts(tensor)[0]
        return local
    plain: torch.Tensor = tensor
    return plain


def _layout(tensor: torch.Tensor) -> str:
    return f"{t.NAMES[tensor.dtype]} {list(tensor.shape)}"


def _digest(ranks: list[int]) -> bytes:
    return xxhash.xxh3_128_digest(_encode(ranks))
