"""Planning a save: what this rank writes of its state, and to which files.

A rule says which rank writes a tensor that several ranks have (`ownership`). The ranks compare what
they have in one round, and only where they differ they send details in a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

from torchrelay.coordination.call import Call
from torchrelay.coordination.groups import members_of
from torchrelay.coordination.messages import decoded
from torchrelay.deadlines import Deadline
from torchrelay.describing.at_rest import Described, describe
from torchrelay.errors import ManifestError, UnsupportedLeafError
from torchrelay.pause import gc_paused
from torchrelay.planning.stored import Names
from torchrelay.record.encoding import decode, encode
from torchrelay.record.manifest import ValueLeaf
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record, ReplicaMark
from torchrelay.results import Differing
from torchrelay.shares import comparison, ownership
from torchrelay.shares.casting import StandIns
from torchrelay.shares.commit_record import refused
from torchrelay.shares.comparison import (
    Assignment,
    Details,
    DetailsRequest,
    RankTensor,
    StateDigests,
)
from torchrelay.shares.layout import Entry, ShareLayout, arrange
from torchrelay.shares.outlines import image_bytes, merge, shape_of
from torchrelay.shares.rank_tensors import RankTensors, row_of
from torchrelay.shares.replicas import digests_of_teams, disagreements, splits
from torchrelay.shares.share import Share
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.local_parts import LocalBoxes, local_parts
from torchrelay.state.paths import empty_tensors, naming
from torchrelay.state.replicas import DeclaredReplicas

_encode = msgspec.msgpack.Encoder().encode
_digests = msgspec.msgpack.Decoder(StateDigests)
_details = msgspec.msgpack.Decoder(Details)
_answer = msgspec.msgpack.Decoder(DetailsRequest | Assignment)


class PlannedShare(NamedTuple):
    """The share of this rank; on the coordinator, also a record with the outlines of all ranks, and
    the names of its images where they are known."""

    share: Share
    outlined: Record | None
    names: Sequence[str] | None = None
    differing: tuple[Differing, ...] = ()  # replicas that should be equal, the first of them
    differ: int = 0  # the number of all of these
    mark: ReplicaMark | None = None  # of the step, if that is decided


@dataclass
class SharePlanner:
    """Plans the shares of one rank. It keeps the last plan, which the next save of such a state
    uses again, and no tensor.

    `members`: the ranks that take part as meshes count them, where that is known. Replicas of other
    ranks do not count. `dtype`: that floating tensors are cast to. `replicated`: patterns of plain
    tensors that should be the same on all ranks, besides those that the state says are.
    """

    rank: int
    world: int
    file_bytes: int | None
    members: Collection[int] | None = None
    dtype: torch.dtype | None = None
    replicated: Sequence[str] = ()
    known: _KnownPlan | None = None

    def plan(
        self,
        state: object,
        call: Call,
        deadline: Deadline,
        check_space: Callable[[int], None] = lambda nbytes: None,
    ) -> PlannedShare:
        """All ranks call it together. Every rank raises what any of them raises: a leaf that
        cannot be saved, ranks that contradict each other. The coordinator calls `check_space` with
        the bytes of the step."""
        with gc_paused():
            plan = SavePlan(self, state, check_space)
            answer = decoded(
                _answer, call.round("plan", plan.digests, plan.compare, deadline), rank=0
            )
            if isinstance(answer, DetailsRequest):
                data = call.round("plan", partial(plan.details, answer), plan.assign, deadline)
                answer = decoded(_answer, data, rank=0)
            assert isinstance(answer, Assignment)
            share = plan.share(answer)
            return PlannedShare(share, plan.outlined, plan.names, answer.differing, answer.differ)


class _KnownPlan(NamedTuple):
    """All that follows from a state but for its memory."""

    signature: bytes
    assignment: Assignment
    parts: list[tuple[int, int]]  # for each entry with bytes, the tensor and which of its parts
    layout: ShareLayout


class SavePlan:
    """One save that is being planned, on this rank."""

    def __init__(
        self,
        planner: SharePlanner,
        state: object,
        check_space: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._planner, self._state, self._check_space = planner, state, check_space
        self._tensors: list[RankTensor] = []
        self._received: list[StateDigests] = []
        self._stand_ins = None if planner.dtype is None else StandIns(planner.dtype)
        self.outlined: Record | None = None  # the coordinator's: of all ranks
        self.names: Sequence[str] | None = None
        self.nbytes = 0  # the coordinator's: of all ranks

    # On every rank.

    def digests(self) -> bytes:
        """The first message of this rank: digests of its state."""
        planner = self._planner
        change = None if self._stand_ins is None else self._stand_ins.replace
        self._described: Described = describe(self._state, change)
        self._signature = _signature(self._described)
        tensors = list(zip(self._described.names, self._described.tensors, strict=True))
        if planner.world == 1:
            boxes = LocalBoxes()
            for name, tensor in tensors:
                _check_whole(name, tensor, boxes)
            return b""
        here = RankTensors(planner.rank, planner.world, planner.members, self._source)
        self._tensors = here.of(tensors)
        return _encode(
            StateDigests(
                shape_of(self._described.record),
                comparison.digests_of_leaves(LeafRows(self._described.record, at_rest=True)),
                comparison.digests_of_tensors(self._tensors),
                digests_of_teams(comparison.replicas_of(self._tensors)),
            )
        )

    def details(self, request: DetailsRequest) -> bytes:
        """The second message of this rank, where ranks differ."""
        buckets = set(request.tensors)
        declared = DeclaredReplicas(self._described.objects, self._planner.replicated, members_of)
        rows = []
        known = self._described.tensors, self._described.paths
        for one, tensor, path in zip(self._tensors, *known, strict=True):
            if comparison.bucket_of(one.name) in buckets:
                replicas = declared.of(path) if type(tensor) is torch.Tensor else None
                rows.append(row_of(one, tensor, self._source, replicas))
        common = comparison.replicas_of(self._tensors) if request.teams else []
        leaves = LeafRows(self._described.record, at_rest=True)
        requested = np.isin(comparison.buckets_of_leaves(leaves), request.leaves)
        return _encode(
            Details(
                rows,
                [(index, leaves[index]) for index in np.flatnonzero(requested).tolist()],
                encode(self._described.record) if request.outline else None,
                [one for one in common if one.team in request.teams],
            )
        )

    def share(self, assignment: Assignment) -> Share:
        """The boxes that this rank writes, and their files."""
        known = self._planner.known
        if known is None or (known.signature, known.assignment) != (self._signature, assignment):
            known = self._made(assignment)
        tensors, boxes = self._described.tensors, LocalBoxes()
        found = [
            self._source(tensors[image])  # which is the outline's own
            if type(tensors[image]) is torch.Tensor
            else local_parts(tensors[image], boxes, self._source)[number].tensor
            for image, number in known.parts
        ]
        self._planner.known = known
        return Share(known.layout, found, self._stand_ins)

    def _source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that has the elements: a stand-in has none."""
        return tensor if self._stand_ins is None else self._stand_ins.source(tensor)

    def _made(self, assignment: Assignment) -> _KnownPlan:
        planner = self._planner
        mine = None if planner.world == 1 else self._mine(assignment)
        entries, parts = [], []
        record, names, tensors, paths, _ = self._described
        kinds = [(one.dtype, one.shape, (0,) * len(one.shape)) for one in record.image_kinds]
        kind_of = record.image_kind.tolist()
        boxes = LocalBoxes()
        for image, (name, tensor, path) in enumerate(zip(names, tensors, paths, strict=True)):
            if mine is not None and name not in mine:
                continue
            top = str(path[0]) if len(path) > 1 else None  # the key of the root that it is under
            dtype, shape, origin = kinds[kind_of[image]]
            called = assignment.renamed.get(name, name)
            if type(tensor) is torch.Tensor:  # as nearly all are: one box
                entries.append(Entry(called, dtype, shape, origin, shape, top))
                parts.append((image, 0))
                continue
            others = assignment.boxes_of_others.get(name, ())
            for number, part in enumerate(local_parts(tensor, boxes)):
                if part.tensor.numel() and number not in others:
                    entries.append(Entry(called, dtype, shape, *part.box, top))
                    parts.append((image, number))
        # Tensors without elements are in the headers of the first rank's files, and nowhere else.
        empty = _empty(self._described) if planner.rank == 0 else []
        layout = arrange([*entries, *empty], planner.rank, planner.world, planner.file_bytes)
        return _KnownPlan(self._signature, assignment, parts, layout)

    def _mine(self, assignment: Assignment) -> set[str]:
        """The names of tensors that this rank writes."""
        buckets, of_others = set(assignment.buckets), set(assignment.of_others)
        different = [one for one in self._tensors if comparison.bucket_of(one.name) in buckets]
        mine = {
            one.name
            for one in different
            if one.name not in of_others and (not one.mesh or ownership.written_by_name(one))
        }
        names = {one.name for one in different}
        by_rule = ownership.written_by_rule(one for one in self._tensors if one.name not in names)
        return (mine | by_rule | set(assignment.also)) - of_others

    # On the coordinator.

    def compare(self, sent: list[bytes]) -> list[bytes]:
        """A request for details to each rank where they differ; otherwise an assignment without
        exceptions."""
        if self._planner.world > 1:
            self._received = [decoded(_digests, data, rank) for rank, data in enumerate(sent)]
            requests = comparison.detail_requests(self._received)
            if requests is not None:
                return [_encode(request) for request in requests]
        self._end(msgspec.structs.replace(self._described.record, ranks=(0,) * len(sent)))
        self.names = self._described.names
        return [_encode(Assignment())] * len(sent)

    def assign(self, sent: list[bytes]) -> list[bytes]:
        """The assignment of each rank."""
        details = [decoded(_details, data, rank) for rank, data in enumerate(sent)]
        buckets = comparison.differing([one.tensors for one in self._received])
        outlines: list[tuple[Record, Sequence[str]] | None] = [self._described[:2]]
        outlines += [_outline(one, rank) for rank, one in enumerate(details[1:], 1)]
        taken = [name for one in outlines if one is not None for name in one[1]]
        split = splits([one.teams for one in self._received])
        distributed = disagreements(split, [one.replicas for one in details])
        assigned = ownership.assignments(details, buckets, taken, distributed)
        self._end(merge([one.shape for one in self._received], outlines, details, assigned))
        return [_encode(one) for one in assigned]

    def _end(self, outlined: Record) -> None:
        self.nbytes = image_bytes(outlined)
        self._check_space(self.nbytes)
        self.outlined = outlined


def _outline(details: Details, rank: int) -> tuple[Record, Sequence[str]] | None:
    """The outline that another rank has sent, and the names of its images."""
    if details.outline is None:
        return None
    with refused("an outline that another rank sent", "plan", rank):
        record = decode(details.outline, "part")
        if len(record.outlines) != 1 or record.boxes:
            raise ManifestError("not the outline of one rank")
        return record, Names(record).all()


def _empty(described: Described) -> list[Entry]:
    rows, names = LeafRows(described.record), set(described.names)
    return [
        Entry(name, dtype, shape, (0,) * len(shape), shape, str(path[0]) if path[1:] else None)
        for name, dtype, shape, path in empty_tensors(rows.tree, rows.others)
        if name not in names
    ]


def _check_whole(name: str, tensor: torch.Tensor, boxes: LocalBoxes) -> None:
    """`UnsupportedLeafError` if a process without a group has only a part of a tensor."""
    if type(tensor) is torch.Tensor:
        return
    with naming(name):
        here = sum(part.tensor.numel() for part in local_parts(tensor, boxes))
    if here < prod(tensor.size()):
        raise UnsupportedLeafError(
            f"this process has {here} of the {prod(tensor.size())} elements of a tensor that is "
            "sharded over ranks: call it on all of them, with their group",
            path=name,
        )


def _signature(described: Described) -> bytes:
    """A digest of what a plan depends on: names, dtypes, shapes and how tensors are distributed.
    Plain values may be others at each save."""
    record = described.record
    (outline,) = record.outlines
    others = tuple([leaf for leaf in outline.others if not isinstance(leaf, ValueLeaf)])
    bare = msgspec.structs.replace(outline, others=others)
    boxes = [one.boxes for one in described.tensors if isinstance(one, BoxedTensor)]
    plan = encode(msgspec.structs.replace(record, outlines=(bare,)))
    return xxhash.xxh3_128_digest(plan + (_encode(boxes) if boxes else b""))
