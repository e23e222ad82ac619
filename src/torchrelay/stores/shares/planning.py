"""Planning a save: what this rank writes of its state, and to which files.

Who writes a tensor that several ranks have follows from a rule (`ownership`): the ranks compare
what they have, and tell the coordinator of what is not the same everywhere, which is little. With a
planner of the user's own, that planner says who writes what (`given_planner`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch
import xxhash

from torchrelay.errors import UnsupportedLeafError
from torchrelay.plan.outline import Named
from torchrelay.record.checkpoint.schema import Outline
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import local_parts
from torchrelay.state.meshes import mesh_record
from torchrelay.stores.shares import ownership, plan_limits, plans
from torchrelay.stores.shares.layout import Entry, FileLayout, arrange
from torchrelay.stores.shares.ownership import Details, HeldTensor, Question, Row, Ruling, Statement
from torchrelay.stores.shares.plans import Drafted, Outlines, RankOutline
from torchrelay.stores.shares.replicas import facts_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Signature = list[tuple[object, ...]]

_encode = msgspec.msgpack.Encoder().encode
_statement = msgspec.msgpack.Decoder(Statement)
_question = msgspec.msgpack.Decoder(Question)
_details = msgspec.msgpack.Decoder(Details)
_ruling = msgspec.msgpack.Decoder(Ruling)


class Decision(NamedTuple):
    """What the coordinator says to each rank; `final` if no rank is asked for more."""

    answers: Sequence[bytes]
    final: bool


class Planning(Protocol):
    """Plans the saves of one rank, with the others: each says what it has, and hears an answer,
    until one is final."""

    def begin(self, named: Named) -> bytes:
        """What this rank says first."""

    def decide(self, said: Sequence[bytes]) -> Decision:
        """The coordinator's part. `CheckpointError` where no plan can be made."""

    @property
    def outlines(self) -> Outlines:
        """The coordinator's, after its final decision: those of all ranks."""

    @property
    def nbytes(self) -> int:
        """The coordinator's, after its final decision: bytes that all ranks write."""

    def reply(self, heard: bytes) -> bytes:
        """What this rank says to an answer that is not final."""

    def resolve(self, heard: bytes) -> tuple[Drafted, list[FileLayout]]:
        """What this rank writes by the final answer, and the files it goes to."""

    def forget(self) -> None:
        """A plan broke off: hold on to nothing of it."""


class _KnownPlan(NamedTuple):
    """A plan that this rank has in full. A later save of such a state has the same."""

    signature: Signature
    ruling: Ruling
    entries: list[Entry]
    parts: list[tuple[str, int]]  # for each entry, the tensor and which of its parts
    layouts: list[FileLayout]


class _Current(NamedTuple):
    """The save that is being planned."""

    named: Named
    signature: Signature
    held: list[HeldTensor]


class _Teams:
    """Which ranks that take part have the same elements as this one, for each kind of tensor."""

    def __init__(self, members: Collection[int] | None) -> None:
        self._members = members
        self._places: dict[tuple[DeviceMesh, tuple[int, ...]], tuple[int, int]] = {}

    def place(self, mesh: DeviceMesh, copies: tuple[int, ...]) -> tuple[int, int]:
        """This rank's number among those that it has replicas on along `copies`, and how many they
        are."""
        found = self._places.get((mesh, copies))
        if found is None:
            here: Any = mesh.get_coordinate()
            along = tuple(slice(None) if dim in copies else at for dim, at in enumerate(here))
            alike = mesh.mesh[along].flatten().tolist()
            team = [rank for rank in alike if self._members is None or rank in self._members]
            found = team.index(int(mesh.mesh[tuple(here)])), len(team)
            self._places[mesh, copies] = found
        return found


class RulePlanning:
    """Plans saves by the rule. Holds on to no tensor after `resolve`.

    A plan is remembered once all of it is there, so one that breaks off midway, at whatever line,
    leaves nothing to repeat.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        file_bytes: int | None,
        members: Collection[int] | None = None,
    ) -> None:
        """`members`: the ranks that take part as meshes count them, where that is known. Replicas
        that other ranks have do not count."""
        self._rank, self._world, self._file_bytes = rank, world, file_bytes
        self._members = members
        self._known: _KnownPlan | None = None
        self._current: _Current | None = None
        self._said: list[Statement] = []
        self.outlines = Outlines((), (), ())
        self.nbytes = 0

    def forget(self) -> None:
        self._current = self._known = None
        self._said = []

    @property
    def _now(self) -> _Current:
        assert self._current is not None
        return self._current

    def begin(self, named: Named) -> bytes:
        signature = _signature(named)
        self._said = []
        if self._world == 1:
            for name, tensor in named.tensors.items():
                _check_whole(name, tensor)
            self._current = _Current(named, signature, [])
            return b""
        teams = _Teams(self._members)
        held = [self._held(name, tensor, teams) for name, tensor in named.tensors.items()]
        self._current = _Current(named, signature, held)
        statement = Statement(
            plans.shape_of(named.outline),
            ownership.digests_of_leaves(named.outline.leaves),
            ownership.digests_of_tensors(held),
            _bytes_by_rule(held),
        )
        return _encode(statement)

    def _held(self, name: str, tensor: torch.Tensor, teams: _Teams) -> HeldTensor:
        if type(tensor) is torch.Tensor:
            return HeldTensor(name, facts_of(tensor), tensor.nbytes, self._rank, self._world, b"")
        if t.is_dtensor(tensor):
            return _held_dtensor(name, tensor, teams)
        locals_, _, all_boxes, _ = t.sharded_parts(tensor)  # type: ignore[arg-type]
        nbytes = sum(local.nbytes for local in locals_)
        boxes = [(box.offsets, box.sizes) for box in all_boxes]
        fact = _digest((t.NAMES[tensor.dtype], tuple(tensor.size()), boxes))
        where = _digest([box.placement for box in all_boxes])
        return HeldTensor(name, fact, nbytes, 0, 1, b"", where)

    def decide(self, said: Sequence[bytes]) -> Decision:
        outline = self._now.named.outline
        if self._world == 1:
            self.outlines = Outlines((outline,), (0,), ())
            self.nbytes = _bytes_of_all(self._now.named.tensors.values())
            return Decision([_encode(Ruling())], final=True)
        if not self._said:
            return self._compare(said, outline)
        return self._rule(said, outline)

    def _compare(self, said: Sequence[bytes], outline: Outline) -> Decision:
        statements = [plan_limits.read(_statement, data, rank) for rank, data in enumerate(said)]
        asked = ownership.questions(statements)
        if asked is not None:
            self._said = statements
            return Decision([_encode(question) for question in asked], final=False)
        self.outlines = Outlines((outline,), (0,) * len(said), ())
        self.nbytes = sum(statement.nbytes for statement in statements)
        ownership.check_all_there(self.nbytes, _bytes_of_all(self._now.named.tensors.values()))
        return Decision([_encode(Ruling())] * len(said), final=True)

    def _rule(self, said: Sequence[bytes], outline: Outline) -> Decision:
        details = [plan_limits.read(_details, data, rank) for rank, data in enumerate(said)]
        statements, self._said = self._said, []
        asked = ownership.differing([one.tensors for one in statements])
        tensors = self._now.named.tensors
        ruled = ownership.rulings(details, asked, tensors)
        same = [one for name, one in tensors.items() if ownership.bucket_of(name) not in asked]
        ownership.check_all_there(sum(one.nbytes for one in details), _bytes_of_all(same))
        told = [outline, *(one.outline for one in details[1:])]
        self.outlines = plans.merge(
            RankOutline(statement.shape, mine, one.leaves, ruling.renamed)
            for statement, mine, one, ruling in zip(statements, told, details, ruled, strict=True)
        )
        self.nbytes = ownership.bytes_ruled(details, ruled)
        return Decision([_encode(ruling) for ruling in ruled], final=True)

    def reply(self, heard: bytes) -> bytes:
        question = plan_limits.read(_question, heard, 0)
        now, buckets = self._now, set(question.tensors)
        rows, same = [], []
        for one in now.held:
            if ownership.bucket_of(one.name) in buckets:
                rows.append(_row(one, now.named.tensors[one.name]))
            else:
                same.append(one)
        leaves = now.named.outline.leaves
        places = ownership.buckets_of_leaves(leaves) if question.leaves else []
        details = Details(
            rows,
            [(index, leaves[index]) for bucket in question.leaves for index in places[bucket]],
            now.named.outline if question.outline else None,
            _bytes_by_rule(same),
        )
        return _encode(details)

    def resolve(self, heard: bytes) -> tuple[Drafted, list[FileLayout]]:
        ruling = plan_limits.read(_ruling, heard, 0)
        now, known = self._now, self._known
        self._current = None
        if known is None or (known.signature, known.ruling) != (now.signature, ruling):
            known = self._plan(now, ruling)
        tensors = now.named.tensors
        found = [_part(tensors[name], number) for name, number in known.parts]
        self._known = known
        return Drafted(known.entries, found, {}), known.layouts

    def _plan(self, now: _Current, ruling: Ruling) -> _KnownPlan:
        mine = self._mine(now, ruling)
        entries, parts = [], []
        for name, tensor in now.named.tensors.items():
            if mine is not None and name not in mine:
                continue
            dtype, shape = t.NAMES[tensor.dtype], tuple(tensor.size())
            called, top = ruling.renamed.get(name, name), now.named.tops[name]
            for number, part in enumerate(local_parts(tensor)):
                if part.tensor.numel():
                    entries.append(Entry(called, dtype, shape, *part.box, top))
                    parts.append((name, number))
        layouts = arrange(entries, self._rank, self._world, self._file_bytes)
        return _KnownPlan(now.signature, ruling, entries, parts, layouts)

    def _mine(self, now: _Current, ruling: Ruling) -> set[str] | None:
        """The names of tensors that this rank writes; None for all."""
        if self._world == 1:
            return None
        buckets, left = set(ruling.buckets), set(ruling.left)
        ruled = [one for one in now.held if ownership.bucket_of(one.name) in buckets]
        mine = {
            one.name
            for one in ruled
            if one.name not in left and (not one.mesh or ownership.written_by_name(one))
        }
        names = {one.name for one in ruled}
        return mine | ownership.written_by_rule(one for one in now.held if one.name not in names)


def _check_whole(name: str, tensor: torch.Tensor) -> None:
    """`UnsupportedLeafError` for a tensor of which a process on its own has a part alone."""
    if type(tensor) is torch.Tensor:
        return
    if t.is_dtensor(tensor):
        here = t.dtensor_parts(tensor)[0].numel()
    else:
        here = sum(local.numel() for local in t.sharded_parts(tensor)[0])  # type: ignore[arg-type, misc]
    if here < prod(tensor.size()):
        raise UnsupportedLeafError(
            f"this process is on its own and has {here} of the {prod(tensor.size())} elements of a "
            "tensor that is cut over ranks: do it on all of these, with their group",
            path=name,
        )


def _bytes_of_all(wholes: Iterable[torch.Tensor]) -> int:
    return sum(prod(whole.size()) * whole.dtype.itemsize for whole in wholes)


def _bytes_by_rule(held: Sequence[HeldTensor]) -> int:
    mine = ownership.written_by_rule(held)
    return sum(one.nbytes for one in held if one.name in mine)


def _held_dtensor(name: str, tensor: t.DTensor, teams: _Teams) -> HeldTensor:
    local, spec = t.dtensor_parts(tensor)
    mesh = mesh_record(spec.mesh)
    placements = tuple(t.placement_record(placement) for placement in spec.placements)
    copies = tuple(dim for dim, one in enumerate(placements) if one.kind == "replicate")
    nbytes, replica, replicas = 0, 0, 1
    if spec.mesh.get_coordinate() is not None:
        nbytes = local.nbytes
        replica, replicas = teams.place(spec.mesh, copies)
    where = _digest(mesh)
    fact = _digest((t.NAMES[tensor.dtype], tuple(tensor.shape), placements, mesh.shape))
    return HeldTensor(name, fact, nbytes, replica, replicas, _digest((where, copies)), where)


def _row(one: HeldTensor, tensor: torch.Tensor) -> Row:
    if not one.mesh:
        return Row(one.name, one.fact, one.nbytes)
    parts = [part for part in local_parts(tensor) if part.tensor.numel()]
    boxes = _digest([part.box for part in parts])
    values = _digest([facts_of(part.tensor) for part in parts])
    nbytes = one.nbytes if ownership.written_by_name(one) else 0
    part = (boxes, values) if parts else (b"", b"")
    return Row(one.name, one.fact, nbytes, one.mesh, part, _bytes_of_all([tensor]))


def _part(tensor: torch.Tensor, number: int) -> torch.Tensor:
    if type(tensor) is torch.Tensor:
        return tensor  # which is the outline's own
    if t.is_dtensor(tensor):
        return t.dtensor_parts(tensor)[0].detach()
    return t.sharded_parts(tensor)[0][number].detach()  # type: ignore[arg-type]


def _digest(value: object) -> bytes:
    return xxhash.xxh3_128_digest(_encode(value))


def _signature(named: Named) -> Signature:
    """What a plan depends on: names, dtypes, shapes and how tensors are distributed."""
    found: Signature = []
    for name, tensor in named.tensors.items():
        if type(tensor) is torch.Tensor:
            found.append((name, tensor.dtype, tensor.shape, named.tops[name]))
        elif t.is_dtensor(tensor):
            _, spec = t.dtensor_parts(tensor)
            found.append((name, tensor.dtype, tensor.shape, spec.mesh, spec.placements))
        else:
            _, boxes, all_boxes, properties = t.sharded_parts(tensor)  # type: ignore[arg-type]
            found.append((name, properties.dtype, tensor.size(), boxes, all_boxes))
    return found
