"""Planning a save with a planner of the user's own: torch's `SavePlanner`, asked for each save.

The planner of the coordinator makes the plan of all ranks, as in torch's own saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torchrelay.landing.packed import pack
from torchrelay.plan.outline import Named
from torchrelay.state import tensors as t
from torchrelay.stores.shares import plan_limits, planner_items, plans
from torchrelay.stores.shares.layout import FileLayout, arrange
from torchrelay.stores.shares.planning import Decision
from torchrelay.stores.shares.plans import Drafted, FinalPlan, LocalPlan, Outlines
from torchrelay.stores.shares.replicas import replicas_of

_local = msgspec.msgpack.Decoder(LocalPlan)
_final = msgspec.msgpack.Decoder(FinalPlan)
_encode = msgspec.msgpack.Encoder().encode


class PlannerPlanning:
    """A `Planning` by a `SavePlanner`."""

    def __init__(self, planner: SavePlanner, rank: int, world: int, file_bytes: int | None) -> None:
        self._planner = planner
        self._rank, self._world, self._file_bytes = rank, world, file_bytes
        self._named: Named | None = None
        self.outlines = Outlines((), (), ())
        self.nbytes = 0

    def forget(self) -> None:
        self._named = None

    def begin(self, named: Named) -> bytes:
        self._named = named
        self._planner.set_up_planner(dict(named.tensors), None, self._rank == 0)
        plan = self._planner.create_local_plan()
        return _encode(
            LocalPlan(
                named.outline,
                planner_items.items_of(plan),
                pack(plan.planner_data),
                plan.usable,
                replicas_of(named) if self._world > 1 else {},
            )
        )

    def decide(self, said: Sequence[bytes]) -> Decision:
        locals_ = [local_plan(data, rank) for rank, data in enumerate(said)]
        renamed = plans.renames(locals_)
        whole = [
            _renamed(planner_items.plan_of(local.items, local.data, local.usable), names)
            for local, names in zip(locals_, renamed, strict=True)
        ]
        final, _ = self._planner.create_global_plan(whole)
        finals = [
            FinalPlan(
                planner_items.items_of(plan),
                pack(plan.planner_data),
                plan.usable,
                {new: old for old, new in names.items()},
            )
            for plan, names in zip(final, renamed, strict=True)
        ]
        self.nbytes = sum(map(plans.item_bytes, finals))
        self.outlines = plans.merge_outlines(locals_, renamed)
        return Decision([_encode(plan) for plan in finals], final=True)

    def reply(self, heard: bytes) -> bytes:
        raise NotImplementedError("a planner's first answer is final")

    def resolve(self, heard: bytes) -> tuple[Drafted, list[FileLayout]]:
        named, self._named = self._named, None
        assert named is not None
        final = plan_limits.read(_final, heard, 0)
        plan_limits.check_items(final.items, 0)
        plan = planner_items.plan_of(final.items, final.data, final.usable)
        items = self._planner.finish_plan(plan).items
        drafted = planner_items.resolve_items(items, self._planner, named.tops, final.renamed)
        drafted = _with_changes(drafted, named)
        layouts = arrange(plans.with_objects(drafted), self._rank, self._world, self._file_bytes)
        return drafted, layouts


def local_plan(data: bytes, rank: int) -> LocalPlan:
    """What a rank said. `CheckpointError` where no planner should see it."""
    found = plan_limits.read(_local, data, rank)
    plan_limits.check_items(found.items, rank)
    return found


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
    if t.is_dtensor(tensor):
        tensor = t.dtensor_parts(tensor)[0]
    if isinstance(tensor, t.ShardedTensor):
        tensor = next(iter(t.sharded_parts(tensor)[0]), torch.empty(0, device="cpu"))
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
