"""Planning a save with torch's planners: which rank writes which box of which tensor.

Most saves of a job repeat the plan of the one before, with other values. So each rank tells the
coordinator whether its tensors are as they were, and hears whether its plan is; then nothing is
planned anew, which for a job of many tensors is most of the time that a save holds it up.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from torchrelay.state import tensors as t
from torchrelay.state.digest import digest
from torchrelay.state.manifest import ALIGN
from torchrelay.state.memory import Region
from torchrelay.state.outline import Named
from torchrelay.state.parcel import pack
from torchrelay.stores import plans
from torchrelay.stores.layout import Entry, FileLayout, arrange
from torchrelay.stores.plans import Drafted, FinalPlan, LocalPlan

SMALL_BYTES = 64 << 10  # of plain tensors that is compared between ranks
SAMPLES = 4

Signature = list[tuple[object, ...]]


class Planning:
    """Plans the saves of one rank. A planner of the user's own is asked for each save anew."""

    def __init__(
        self, planner: SavePlanner | None, rank: int, world: int, file_bytes: int | None
    ) -> None:
        self._given = planner
        self._rank = rank
        self._world = world
        self._file_bytes = file_bytes
        self.forget()

    def forget(self) -> None:
        """Plan the next save anew: the last one may not have reached every rank."""
        self._planner: SavePlanner | None = None
        self._signature: Signature | None = None
        self._items: list[WriteItem] | None = None
        self._final: FinalPlan | None = None
        self._entries: list[Entry] = []
        self._layouts: list[FileLayout] = []
        # The coordinator's: what every rank said and heard last.
        self._locals: list[LocalPlan] = []
        self._finals: list[FinalPlan] = []

    def local(self, named: Named) -> LocalPlan:
        """This rank's part before the ranks meet."""
        signature = _signature(named) if self._given is None else None
        replicas = _replicas(named) if self._world > 1 else {}
        if signature is not None and signature == self._signature and self._final is not None:
            return LocalPlan(named.outline, [], b"", True, replicas, same=True)
        self._signature = signature
        self._items = self._final = None
        planner = self._planner = self._given or DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(named.tensors), None, self._rank == 0)
        plan = planner.create_local_plan()
        data = pack(plan.planner_data)
        return LocalPlan(named.outline, plans.items_of(plan), data, plan.usable, replicas)

    @property
    def nbytes(self) -> int:
        """The coordinator's: bytes of the tensors that all ranks are to write."""
        return sum(map(plans.item_bytes, self._finals))

    def decide(self, said: list[LocalPlan]) -> list[FinalPlan]:
        """The coordinator's part: every rank's final plan."""
        renamed = plans.renames(said)
        before = self._finals
        if all(local.same for local in said) and renamed == plans.renames(self._locals):
            return [FinalPlan([], b"", same=True) for _ in said]
        self._locals = [
            _as_before(local, self._locals[rank]) if local.same else local
            for rank, local in enumerate(said)
        ]
        assert self._planner is not None
        whole = [
            _renamed(plans.plan_of(local.items, local.data, local.usable), names)
            for local, names in zip(self._locals, renamed, strict=True)
        ]
        final, _ = self._planner.create_global_plan(whole)
        self._finals = [
            FinalPlan(
                plans.items_of(plan),
                pack(plan.planner_data),
                plan.usable,
                {new: old for old, new in names.items()},
            )
            for plan, names in zip(final, renamed, strict=True)
        ]
        return [
            FinalPlan([], b"", same=True) if local.same and plan == before[rank] else plan
            for rank, (local, plan) in enumerate(zip(said, self._finals, strict=True))
        ]

    def resolve(self, heard: FinalPlan, named: Named) -> tuple[Drafted, list[FileLayout]]:
        """What this rank writes, and the files it goes to."""
        if heard.same:
            assert self._final is not None
            return Drafted(self._entries, self._tensors(named), {}), self._layouts
        assert self._planner is not None
        if self._given is None:  # what it holds may be the tensors of a save before
            self._planner.set_up_planner(dict(named.tensors), None, self._rank == 0)
        plan = plans.plan_of(heard.items, heard.data, heard.usable)
        self._items = self._planner.finish_plan(plan).items
        self._final = heard
        drafted = plans.resolve_items(self._items, self._planner, named.tops, heard.renamed)
        if self._given is None:
            self._planner.set_up_planner({}, None, self._rank == 0)  # holds on to no tensor
        else:
            drafted = _with_changes(drafted, named)
        layouts = arrange(plans.with_objects(drafted), self._rank, self._world, self._file_bytes)
        self._entries, self._layouts = drafted.entries, layouts
        if drafted.objects:
            self._final = None  # objects are asked for each time
        return drafted, layouts

    def _tensors(self, named: Named) -> list[torch.Tensor]:
        """The tensors of the remembered plan, out of a state of the same shape."""
        assert self._final is not None and self._items is not None
        renamed = self._final.renamed
        found = []
        parts: dict[str, Drafted] = {}
        for entry in self._entries:
            name = renamed.get(entry.name, entry.name)
            tensor = named.tensors[name]
            if type(tensor) is torch.Tensor:
                found.append(tensor)
                continue
            if not parts:
                parts = self._distributed(named)
            part = parts[entry.name]
            at = next(i for i, e in enumerate(part.entries) if e.offsets == entry.offsets)
            found.append(part.tensors[at])
        return found

    def _distributed(self, named: Named) -> dict[str, Drafted]:
        """Local parts of distributed tensors, by name: only a planner knows where they are."""
        assert self._planner is not None and self._items is not None and self._final is not None
        self._planner.set_up_planner(dict(named.tensors), None, self._rank == 0)
        renamed = self._final.renamed
        found: dict[str, list[WriteItem]] = {}
        for item in self._items:
            name = item.index.fqn
            if type(named.tensors.get(renamed.get(name, name))) is not torch.Tensor:
                found.setdefault(name, []).append(item)
        parts = {
            name: plans.resolve_items(items, self._planner, named.tops, renamed)
            for name, items in found.items()
        }
        self._planner.set_up_planner({}, None, self._rank == 0)  # holds on to no tensor
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
        tensor = next(iter(t.sharded_parts(tensor)[0]), torch.empty(0))
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _replicas(named: Named) -> dict[str, bytes]:
    """Of plain tensors, what ranks that hold the same have in common: the bytes, if few, else
    samples of them. Different samples show different tensors; equal ones make a replica likely."""
    found = {}
    for name, tensor in named.tensors.items():
        if type(tensor) is torch.Tensor:
            region = Region.row_major(tensor)
            sample = torch.empty(min(region.nbytes, SMALL_BYTES), dtype=torch.uint8)
            if region.nbytes <= SMALL_BYTES:
                region.read(0, region.nbytes, sample)
            else:
                piece = SMALL_BYTES // SAMPLES
                last = (region.nbytes - piece) // ALIGN
                for number in range(SAMPLES):
                    at = last * number // (SAMPLES - 1) * ALIGN
                    region.read(at, at + piece, sample[number * piece :])
            facts = f"{t.NAMES[tensor.dtype]} {list(tensor.shape)} ".encode()
            found[name] = facts + digest(sample)
    return found
