"""Which leaves several ranks hold in common, because the state says so.

Ranks may have other values under the same path: random states, positions in the data, accumulators,
shards that are plain tensors. So nothing counts as a replica because it looks like one:

| in the state                                            | the ranks that must agree              |
|---------------------------------------------------------|----------------------------------------|
| a DTensor with a `Replicate` dimension                  | of its mesh, along these dimensions    |
| parameters and buffers of a `DistributedDataParallel`   | of its process group                   |
| the states that an `Optimizer` has for these parameters | the same                               |
| the `step` that an `Optimizer` counts for a DTensor     | of its mesh                            |
| plain tensors that the caller names                     | all that take part                     |

Not parameters and buffers that DistributedDataParallel ignores, nor `running_mean` and
`running_var`, which each rank computes from its own batches, but for those of a `SyncBatchNorm`.

    {"model": DistributedDataParallel(net), "ema": {"w": t}, "rng": r}    replicas: all of "model"
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from torchrelay.arguments import matches
from torchrelay.state import tensors as t
from torchrelay.state.objects import Objects, StatefulObject
from torchrelay.state.paths import Path, dotted
from torchrelay.state.torch_private import compiled_modules

ReplicaKind = Literal["parameter", "buffer", "optimizer state", "DTensor", "named"]
Team = Collection[int]
_OWN_STATISTICS = frozenset(("running_mean", "running_var"))


class Replicas(NamedTuple):
    """The kind of a leaf, and the ranks that hold it in common, as the default group counts them;
    none stands for all that take part."""

    kind: ReplicaKind
    ranks: tuple[int, ...]


class DeclaredReplicas:
    """The plain tensors of one state that are replicas. `named`: patterns of the caller.
    `members_of`: the ranks of a process group; None where that is not known."""

    def __init__(
        self, objects: Objects, named: Sequence[str], members_of: Callable[[Any], Team | None]
    ) -> None:
        self._objects, self._named, self._members_of = objects, named, members_of
        self._parameters: dict[Path, list[torch.Tensor]] = {}  # of each optimizer, by number
        self._wrapped: dict[int, DistributedDataParallel] | None = None  # by id of a parameter
        self._ranks: dict[int, Team | None] = {}  # of each process group, by its id

    def of(self, path: Path) -> Replicas | None:
        """The replicas of a plain tensor; None if ranks may have different ones at this path."""
        if self._named and matches(dotted(path), self._named):
            return Replicas("named", ())
        for depth in range(len(path)):
            found = self._objects.get(path[:depth])
            if found is None:
                continue
            if isinstance(found.object, torch.nn.Module):
                return self._in_module(found, str(path[depth]).split("."))
            if isinstance(found.object, torch.optim.Optimizer):
                return self._in_optimizer(path[:depth], found.object, path[depth:])
        return None

    def _in_module(self, found: StatefulObject, names: list[str]) -> Replicas | None:
        """A name in the state dict of a module, without the parts of wrappers if they were left
        out of it."""
        module, inside = found.object, 0
        wrapper: DistributedDataParallel | None = None
        for number, name in enumerate(names):
            while True:
                if isinstance(module, DistributedDataParallel):
                    wrapper, inside = module, number + (found.wrapped is None)
                if found.wrapped is None or (inner := _unwrapped(module)) is None:
                    break
                module = inner
            inner = getattr(module, name, None)
            if isinstance(inner, torch.nn.Module):
                module = inner
                continue
            if isinstance(inner, torch.nn.Parameter):
                kind: ReplicaKind = "parameter"
                wrapper = wrapper or self._wrapper_of(inner)
            elif wrapper is None or _has_own_statistics(module, name):
                return None
            else:
                kind = "buffer"
            if wrapper is None or ".".join(names[inside:]) in wrapper.parameters_to_ignore:
                return None
            return self._replicas(kind, wrapper)
        return None

    def _in_optimizer(
        self, at: Path, optimizer: torch.optim.Optimizer, below: Path
    ) -> Replicas | None:
        if len(below) < 3 or below[0] != "state" or type(below[1]) is not int:
            return None
        if at not in self._parameters:
            groups = optimizer.param_groups
            self._parameters[at] = [one for group in groups for one in group["params"]]
        if not 0 <= below[1] < len(parameters := self._parameters[at]):
            return None
        parameter: Any = parameters[below[1]]
        if t.is_dtensor(parameter):
            mesh = parameter.device_mesh.mesh.flatten().tolist()
            return Replicas("optimizer state", tuple(mesh)) if below[2] == "step" else None
        wrapper = self._wrapper_of(parameter)
        return None if wrapper is None else self._replicas("optimizer state", wrapper)

    def _wrapper_of(self, parameter: torch.Tensor) -> DistributedDataParallel | None:
        """The one in the state that has a parameter."""
        if self._wrapped is None:
            self._wrapped = {
                id(one): module
                for kept in self._objects.values()
                if isinstance(kept.object, torch.nn.Module)
                for module in kept.object.modules()
                if isinstance(module, DistributedDataParallel)
                for name, one in module.module.named_parameters()
                if name not in module.parameters_to_ignore
            }
        return self._wrapped.get(id(parameter))

    def _replicas(self, kind: ReplicaKind, wrapper: DistributedDataParallel) -> Replicas | None:
        group = wrapper.process_group
        if id(group) not in self._ranks:
            self._ranks[id(group)] = self._members_of(group)
        ranks = self._ranks[id(group)]
        return None if ranks is None else Replicas(kind, tuple(sorted(ranks)))


def _unwrapped(module: Any) -> Any:
    """The module in a wrapper; None if it is not a wrapper."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return module.module
    compiled: Any = isinstance(module, compiled_modules())
    return module.get_submodule("_orig_mod") if compiled else None


def _has_own_statistics(module: torch.nn.Module, name: str) -> bool:
    return name in _OWN_STATISTICS and not isinstance(module, torch.nn.SyncBatchNorm)


def ranks_with_copies(
    mesh: torch.distributed.device_mesh.DeviceMesh,
    copies: Collection[int],
    members: Collection[int] | None,
) -> list[int]:
    """The ranks that take part and have the elements that this rank of the mesh has: those that
    differ from it in the dimensions `copies` alone."""
    here: Any = mesh.get_coordinate()
    along = tuple([slice(None) if dim in copies else at for dim, at in enumerate(here)])
    alike = mesh.mesh[along].flatten().tolist()
    return [rank for rank in alike if members is None or rank in members]
