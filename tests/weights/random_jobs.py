"""Random jobs: trainer ranks that publish versions, and workers of other meshes that follow them.

A job is drawn from a seed, the same in every process. Values of any version can be computed
anywhere, so each rank computes what it must have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import torchrelay as tr
from tests.support.states import bits
from tests.weights.random_mappings import Case, random_case
from torchrelay.endpoint.encoding import Encoding
from torchrelay.weights import MappedDestination

TIMEOUT = 60.0
RANKS = 4

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
OTHERS = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64]
CASTS = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
CHANGES = ["all", "all", "few", "few", "few", "nothing", "one tensor", "layout"]
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "rows": ((-1,), (Shard(0),)),
    "columns": ((-1,), (Shard(1),)),
    "copies": ((-1,), (Replicate(),)),
    "copies of rows": ((2, -1), (Replicate(), Shard(0))),
    "grid": ((2, -1), (Shard(0), Shard(1))),
    "rows of columns": ((2, -1), (Shard(1), Shard(0))),
}


@dataclass(frozen=True)
class Change:
    """How a version came to be: which elements are others than before, and the trainer's mesh."""

    kind: str
    layout: str


@dataclass(frozen=True)
class Worker:
    """Ranks that follow together. `updates`: the versions at which they do; the first of them are
    missing where the worker is late. `returns`: the version at which it starts again."""

    ranks: tuple[int, ...]
    same_host: bool
    updates: tuple[int, ...]
    returns: int


@dataclass(frozen=True)
class Job:
    """`changes` has the versions one after the other, from version 0. `cuts`: along which dimension
    the ranks of a worker split each tensor; -1: they do not."""

    seed: int
    trainers: int
    encoding: Encoding
    changes: tuple[Change, ...]
    workers: tuple[Worker, ...]
    mapped: bool
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    counted: bool = False  # whether the state has the number of its version

    def same_state(self, held: int | None, version: int) -> bool:
        """Whether the same was published, in the same layout, as a version that a worker has."""
        if held is None or self.counted:
            return False
        since = self.changes[held + 1 : version + 1]
        return all(one.kind == "nothing" for one in since)

    def __str__(self) -> str:
        kinds = " ".join(f"{one.kind}@{one.layout}" for one in self.changes)
        workers = " ".join(
            f"{one.ranks}{'m' if one.same_host else 't'}{one.updates}" for one in self.workers
        )
        what = "mapping" if self.mapped else str(list(self.shapes.values()))
        return (
            f"job {self.seed}: {self.trainers} trainers, {self.encoding}, {kinds}; {workers}; "
            f"{what}"
        )


def random_job(seed: int) -> Job:
    random = Random(seed)
    trainers = random.choice([1, 2, 3, 4, 4])
    mapped = random.random() < 0.35
    layouts = [name for name, (shape, _) in LAYOUTS.items() if trainers % 2 == 0 or len(shape) == 1]
    cast = None if random.random() < 0.5 else random.choice(CASTS[:3] if mapped else CASTS)
    encoding = Encoding(dtype=cast, history=random.choice([0, 1, 2, 4, 4]))
    layout, changes = random.choice(layouts), []
    for number in range(random.randint(4, 7)):
        kind = random.choice(CHANGES) if number else "all"
        if kind == "layout":
            layout = random.choice(layouts)
        changes.append(Change(kind, layout))
    job = Job(
        seed,
        trainers,
        encoding,
        tuple(changes),
        tuple(_workers(random, len(changes), mapped)),
        mapped,
        counted=random.random() < 0.3,
    )
    for number in range(random.randint(1, 5)):
        dims = random.randint(1, 3)
        shape = tuple(random.choice([1, 2, 3, 5, 8, 17, 40]) for _ in range(dims))
        job.shapes[f"t{number}"] = shape, random.choice(FLOATS + OTHERS)
        job.cuts[f"t{number}"] = random.randrange(-1, dims)
    return job


def _workers(random: Random, versions: int, mapped: bool) -> list[Worker]:
    """One or two; those of a mapping have the same number of ranks."""
    size = random.choice([1, 2])
    found = []
    for number in range(random.choice([1, 2])):
        size = size if mapped else random.choice([1, 2])
        first = 2 * (1 - number)
        ranks = tuple(range(first, first + size))  # the last ranks first: they may be no trainers
        late = random.randrange(versions)
        updates = [version for version in range(late, versions) if random.random() < 0.6]
        updates = sorted({*updates, late, versions - 1})
        returns = random.choice([0, 0, random.randrange(1, versions)])
        found.append(Worker(ranks, random.random() < 0.35, tuple(updates), returns))
    return found


# Values of a version.


def _drawn(random: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, but for dtypes that do not have all of them."""
    if dtype is torch.bool:
        return torch.rand(shape, generator=random) < 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    last = (*shape[:-1], shape[-1] * size)
    found = torch.randint(0, 256, last, generator=random, dtype=torch.uint8)
    return found.view(dtype)


def _float(random: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of all sizes. Another dtype does not have some of them."""
    found = torch.randn(shape, generator=random)
    found *= 10.0 ** torch.randint(-9, 9, shape, generator=random)
    rare = torch.rand(shape, generator=random)
    found[rare < 0.03] = float("inf")
    found[(rare > 0.03) & (rare < 0.06)] = 0.0
    return found


def _value(
    job: Job,
    version: int,
    index: int,
    draw: Callable[[torch.Generator], torch.Tensor],
) -> torch.Tensor:
    """Tensor number `index` of a version: the first one, and every change since then."""
    random = torch.Generator().manual_seed(1000 * job.seed + index)
    value = draw(random)
    for number, change in enumerate(job.changes[1 : version + 1], 1):
        other = draw(random)
        share = torch.rand(value.shape, generator=random)
        if change.kind == "all":
            value = other
        elif change.kind == "few" or (change.kind == "one tensor" and number % 3 == index % 3):
            value = torch.where(share < 0.04, _raw(other), _raw(value)).view(value.dtype)
    return value


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of elements: torch cannot choose among float8."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def published(job: Job, version: int) -> dict[str, torch.Tensor]:
    """The whole tensors that the trainer has, by name."""
    if job.mapped:
        found = _mapped_case(job, version, len(job.workers[0].ranks)).published
        if job.encoding.dtype is not None:  # masters, which the cast gives back exactly
            found = {name: one.double() for name, one in found.items()}
        return found
    return {
        name: _value(job, version, index, lambda random, s=shape, d=dtype: _any(job, random, s, d))
        for index, (name, (shape, dtype)) in enumerate(job.shapes.items())
    }


def _any(
    job: Job, random: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    if dtype.is_floating_point and job.encoding.dtype is not None:
        return _float(random, shape).to(dtype)
    return _drawn(random, shape, dtype)


def _mapped_case(job: Job, version: int, ranks: int) -> Case:
    index = 0

    def draw(*shape: int) -> torch.Tensor:
        nonlocal index
        index += 1
        return _value(job, version, index, lambda random: torch.randn(shape, generator=random))

    dtypes = None if job.encoding.dtype is None else [job.encoding.dtype]
    return random_case(job.seed, ranks, draw, dtypes)


def as_sent(job: Job, tensor: torch.Tensor) -> torch.Tensor:
    cast = job.encoding.dtype
    return tensor.to(cast) if cast is not None and tensor.is_floating_point() else tensor


# The trainer's side.


@cache
def _mesh(ranks: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))


@cache
def _group(ranks: tuple[int, ...]) -> Any:
    return dist.new_group(list(ranks))


def make_groups(job: Job) -> None:
    """Called on every rank: groups are made together."""
    trainers = tuple(range(job.trainers))
    _group(trainers)
    for change in job.changes:
        _mesh(trainers, LAYOUTS[change.layout][0])
    for worker in job.workers:
        _group(worker.ranks)
        _mesh(worker.ranks, (-1,))


def trained(job: Job, version: int) -> dict[str, Any]:
    """The part of a version that a trainer rank has."""
    shape, places = LAYOUTS[job.changes[version].layout]
    mesh = _mesh(tuple(range(job.trainers)), shape)
    return {
        "model": {
            name: _spread(whole, mesh, places) for name, whole in published(job, version).items()
        },
        "note": version if job.counted else "the same",
    }


def _spread(tensor: torch.Tensor, mesh: DeviceMesh, places: tuple[Placement, ...]) -> torch.Tensor:
    fitting = [
        Shard(tensor.ndim - 1) if isinstance(one, Shard) and one.dim >= tensor.ndim else one
        for one in places
    ]
    return distribute_tensor(tensor, mesh, fitting, src_data_rank=None)


def serve(job: Job) -> tr.Endpoint:
    group = _group(tuple(range(job.trainers)))
    return tr.serve(trained(job, 0), step=0, group=group, timeout=TIMEOUT, encoding=job.encoding)


# The workers' side.


class Follower:
    """This rank of a worker, with a destination that is full of other values."""

    def __init__(self, job: Job, worker: Worker, urls: list[str]) -> None:
        self._job, self._worker = job, worker
        self._rank = worker.ranks.index(dist.get_rank())
        self.parts = {
            name: torch.zeros_like(one) for name, one in self._wanted(0, distributed=True).items()
        }
        model: Any = self.parts
        if job.mapped:
            case = _mapped_case(job, 0, len(worker.ranks))
            shard = (self._rank, len(worker.ranks))
            model = MappedDestination(self.parts, case.mapping, shard=shard)
        self.into = {"model": model, "note": "none"}
        self.subscription = tr.subscribe(
            urls,
            into=self.into,
            group=_group(worker.ranks),
            same_host=worker.same_host,
            timeout=TIMEOUT,
        )

    def _wanted(self, version: int, *, distributed: bool = False) -> dict[str, torch.Tensor]:
        """This rank's part of each tensor."""
        job, ranks = self._job, self._worker.ranks
        if job.mapped:
            return _mapped_case(job, version, len(ranks)).wanted[self._rank]
        found = {}
        for name, whole in published(job, version).items():
            place = Replicate() if job.cuts[name] < 0 else Shard(job.cuts[name])
            sent = as_sent(job, whole)
            found[name] = _spread(sent, _mesh(ranks, (-1,)), (place,))
        return found if distributed else {name: _local(one) for name, one in found.items()}

    def wrong(self, version: int) -> list[str]:
        """The names of tensors that do not have the bits of a version."""
        wanted = self._wanted(version)
        found = [
            name for name, one in wanted.items() if bits(_local(self.parts[name])) != bits(one)
        ]
        if self.into["note"] != (version if self._job.counted else "the same"):
            found.append("note")
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return _plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()
