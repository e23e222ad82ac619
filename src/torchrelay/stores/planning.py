"""Planning a save with torch's planners: which rank writes which box of which tensor.

Most saves of a job repeat the plan of the one before, with other values. So each rank tells the
coordinator whether its tensors are as they were, and hears whether its plan is; then nothing is
planned anew, which for a job of many tensors is most of the time that a save holds it up.
"""

from __future__ import annotations

import dataclasses

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from torchrelay.geometry.chunks import ALIGN
from torchrelay.landing.packed import pack
from torchrelay.plan.outline import Named
from torchrelay.plan.region import Region
from torchrelay.record.digest import digest
from torchrelay.state import tensors as t
from torchrelay.stores import plans
from torchrelay.stores.layout import Entry, FileLayout, arrange
from torchrelay.stores.plans import Drafted, FinalPlan, LocalPlan, Told
from torchrelay.stores.writer.ranges import host_view

SMALL_BYTES = 64 << 10  # of plain tensors that is compared between ranks
SAMPLES = 4

Signature = list[tuple[object, ...]]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A plan that a rank has in full: a later save of such a state repeats it."""

    signature: Signature
    planner: SavePlanner
    final: FinalPlan
    items: list[WriteItem]
    entries: list[Entry]
    layouts: list[FileLayout]


@dataclasses.dataclass(frozen=True)
class _Decision:
    """The coordinator's: what every rank said, and what it heard."""

    locals: list[LocalPlan]
    finals: list[FinalPlan]


class Planning:
    """Plans the saves of one rank. A planner of the user's own is asked for each save anew.

    A plan is remembered once all of it is there. A planning that breaks off midway, at whatever
    line, leaves nothing to repeat: this rank sends its next plan in full. The coordinator has
    noted its decision before any rank hears of it, so a rank that repeats a plan repeats the one
    that is noted there.
    """

    def __init__(
        self, planner: SavePlanner | None, rank: int, world: int, file_bytes: int | None
    ) -> None:
        self._given = planner
        self._rank = rank
        self._world = world
        self._file_bytes = file_bytes
        self._decision = _Decision([], [])
        self.forget()

    def forget(self) -> None:
        """Plan this rank's next save anew, and hold on to nothing until then."""
        self._last: _Plan | None = None
        self._repeated: _Plan | None = None  # the last plan, while it is being planned again
        self._planner: SavePlanner | None = None
        self._signature: Signature = []

    def local(self, named: Named) -> LocalPlan:
        """This rank's part before the ranks meet."""
        last = self._last
        self.forget()
        replicas = replicas_of(named) if self._world > 1 else {}
        self._signature = _signature(named) if self._given is None else []
        if last is not None and last.signature == self._signature:
            self._planner, self._repeated = last.planner, last
            return LocalPlan(Told.of(named.outline), [], b"", True, replicas, same=True)
        planner = self._planner = self._given or DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(named.tensors), None, self._rank == 0)
        plan = planner.create_local_plan()
        data = pack(plan.planner_data)
        items = plans.items_of(plan)
        return LocalPlan(Told.of(named.outline), items, data, plan.usable, replicas)

    @property
    def nbytes(self) -> int:
        """The coordinator's: bytes of the tensors that all ranks are to write."""
        return sum(map(plans.item_bytes, self._decision.finals))

    def decide(self, said: list[LocalPlan]) -> list[FinalPlan]:
        """The coordinator's part: every rank's final plan."""
        renamed = plans.renames(said)
        before = self._decision
        if all(local.same for local in said) and renamed == plans.renames(before.locals):
            return [FinalPlan([], b"", same=True) for _ in said]
        locals_ = [
            _as_before(local, before.locals[rank]) if local.same else local
            for rank, local in enumerate(said)
        ]
        assert self._planner is not None
        whole = [
            _renamed(plans.plan_of(local.items, local.data, local.usable), names)
            for local, names in zip(locals_, renamed, strict=True)
        ]
        final, _ = self._planner.create_global_plan(whole)
        finals = [
            FinalPlan(
                plans.items_of(plan),
                pack(plan.planner_data),
                plan.usable,
                {new: old for old, new in names.items()},
            )
            for plan, names in zip(final, renamed, strict=True)
        ]
        self._decision = _Decision(locals_, finals)
        return [
            FinalPlan([], b"", same=True) if local.same and plan == before.finals[rank] else plan
            for rank, (local, plan) in enumerate(zip(said, finals, strict=True))
        ]

    def resolve(self, heard: FinalPlan, named: Named) -> tuple[Drafted, list[FileLayout]]:
        """What this rank writes, and the files it goes to."""
        if heard.same:
            last = self._repeated
            assert last is not None
            drafted = Drafted(last.entries, self._tensors(last, named), {})
            self._last = last
            return drafted, last.layouts
        planner = self._planner
        assert planner is not None
        if self._given is None:  # what it holds may be the tensors of a save before
            planner.set_up_planner(dict(named.tensors), None, self._rank == 0)
        plan = plans.plan_of(heard.items, heard.data, heard.usable)
        items = planner.finish_plan(plan).items
        drafted = plans.resolve_items(items, planner, named.tops, heard.renamed)
        if self._given is None:
            planner.set_up_planner({}, None, self._rank == 0)  # holds on to no tensor
        else:
            drafted = _with_changes(drafted, named)
        layouts = arrange(plans.with_objects(drafted), self._rank, self._world, self._file_bytes)
        if self._given is None and not drafted.objects:  # objects are asked for each time
            entries = drafted.entries
            self._last = _Plan(self._signature, planner, heard, items, entries, layouts)
        return drafted, layouts

    def _tensors(self, last: _Plan, named: Named) -> list[torch.Tensor]:
        """The tensors of the remembered plan, out of a state of the same shape."""
        renamed = last.final.renamed
        found = []
        parts: dict[str, Drafted] = {}
        for entry in last.entries:
            name = renamed.get(entry.name, entry.name)
            tensor = named.tensors[name]
            if type(tensor) is torch.Tensor:
                found.append(tensor)
                continue
            if not parts:
                parts = self._distributed(last, named)
            part = parts[entry.name]
            at = next(i for i, e in enumerate(part.entries) if e.offsets == entry.offsets)
            found.append(part.tensors[at])
        return found

    def _distributed(self, last: _Plan, named: Named) -> dict[str, Drafted]:
        """Local parts of distributed tensors, by name: only a planner knows where they are."""
        last.planner.set_up_planner(dict(named.tensors), None, self._rank == 0)
        renamed = last.final.renamed
        found: dict[str, list[WriteItem]] = {}
        for item in last.items:
            name = item.index.fqn
            if type(named.tensors.get(renamed.get(name, name))) is not torch.Tensor:
                found.setdefault(name, []).append(item)
        parts = {
            name: plans.resolve_items(items, last.planner, named.tops, renamed)
            for name, items in found.items()
        }
        last.planner.set_up_planner({}, None, self._rank == 0)  # holds on to no tensor
        return parts


def _as_before(said: LocalPlan, before: LocalPlan) -> LocalPlan:
    """What a rank said last time, with what is new this time."""
    return LocalPlan(said.outline, before.items, before.data, before.usable, said.replicas)


def _renamed(plan: SavePlan, names: dict[str, str]) -> SavePlan:
    if not names:
        return plan
    items = [
        dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=names[item.index.fqn]))
        if item.index.fqn in names
        else item
        for item in plan.items
    ]
    return dataclasses.replace(plan, items=items)


def _signature(named: Named) -> Signature:
    """What a plan depends on: names, dtypes, shapes and how tensors are distributed."""
    found: Signature = []
    for name, tensor in named.tensors.items():
        if type(tensor) is torch.Tensor:
            found.append((name, tensor.dtype, tensor.shape, named.tops[name]))
        elif isinstance(tensor, t.DTensor):
            _, spec = t.dtensor_parts(tensor)
            found.append((name, tensor.dtype, tensor.shape, spec.mesh, spec.placements))
        else:
            _, boxes, all_boxes, properties = t.sharded_parts(tensor)  # type: ignore[arg-type]
            found.append((name, properties.dtype, tensor.size(), boxes, all_boxes))
    return found


def _with_changes(drafted: Drafted, named: Named) -> Drafted:
    """What a planner of the user's own made of the state's tensors: other names, other dtypes."""
    at = {_memory(tensor): name for name, tensor in named.tensors.items()}
    origins, dtypes = [], []
    for entry, tensor in zip(drafted.entries, drafted.tensors, strict=True):
        name = entry.name
        if name not in named.tensors and _memory(tensor) in at:
            origins.append((name, at[_memory(tensor)]))
        elif name in named.tensors and t.NAMES[named.tensors[name].dtype] != entry.dtype:
            dtypes.append((name, entry.dtype))
    return drafted._replace(origins=tuple(origins), dtypes=tuple(dtypes))


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor, t.DTensor):
        tensor = t.dtensor_parts(tensor)[0]
    if isinstance(tensor, t.ShardedTensor):
        tensor = next(iter(t.sharded_parts(tensor)[0]), torch.empty(0, device="cpu"))
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def replicas_of(named: Named) -> dict[str, bytes]:
    """Of plain tensors, what ranks that hold the same have in common: the bytes, if few, else
    samples of them. Different samples show different tensors; equal ones make a replica likely."""
    found = {}
    for name, tensor in named.tensors.items():
        if type(tensor) is torch.Tensor:
            facts = f"{t.NAMES[tensor.dtype]} {list(tensor.shape)} ".encode()
            found[name] = facts + _fingerprint(Region.row_major(tensor))
    return found


def _fingerprint(region: Region) -> bytes:
    if region.nbytes <= SMALL_BYTES:
        if region.address:
            return xxhash.xxh3_128_digest(host_view(region.address, region.nbytes))
        spots = [(0, region.nbytes)]
    else:
        piece = SMALL_BYTES // SAMPLES
        last = (region.nbytes - piece) // ALIGN
        starts = [last * number // (SAMPLES - 1) * ALIGN for number in range(SAMPLES)]
        spots = [(at, at + piece) for at in starts]
    sample = torch.empty(sum(stop - at for at, stop in spots), dtype=torch.uint8, device="cpu")
    done = 0
    for at, stop in spots:
        region.read(at, stop, sample[done:])
        done += stop - at
    return digest(sample)
