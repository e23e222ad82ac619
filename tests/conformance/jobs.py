"""Small training jobs, each with a state of another kind, on any number of ranks.

A job is built on the ranks of a `Place` and can be trained. `objects()` is its state as the relay
and the checkpointer take it, modules and optimizers as they are. `plain()` is its state as torch's
own calls take it: dicts and lists of tensors and values; `adopt` takes such a state back. The
losses of a job depend on all of its state.
"""

from __future__ import annotations

import copy
import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass(frozen=True)
class Place:
    """The ranks that a job runs on: one of several replicas of the same number of ranks."""

    row: DeviceMesh  # the ranks in a row
    tall: DeviceMesh  # the same ranks as copies of shards ("copies", "shards")
    wide: DeviceMesh  # the same ranks as shards of tensor parallel groups ("shards", "tp")


def makes(world: int, replicas: int, ranks: int, first: int = 0) -> Place | None:
    """The place of this process among `replicas` jobs of `ranks` ranks each, from rank `first` on;
    None: it has none.

    All ranks of the world call it together: making a mesh makes groups.
    """
    square = (2, 2) if ranks == 4 else (1, ranks)
    tall = square if ranks == 4 else (ranks, 1)
    cut = torch.arange(first, first + replicas * ranks)

    def mesh(*shape: int, names: tuple[str, ...]) -> DeviceMesh:
        return DeviceMesh("cpu", cut.view(replicas, *shape), mesh_dim_names=("replicas", *names))

    row = mesh(ranks, names=("ranks",))
    copies = mesh(*tall, names=("copies", "shards"))
    wide = mesh(*square, names=("shards", "tp"))
    if not first <= dist.get_rank() < first + replicas * ranks:
        return None
    return Place(row["ranks"], copies["copies", "shards"], wide["shards", "tp"])


class Network(nn.Module):
    """Two layers. The sizes divide by 1, 2, 3 and 4, unless others are asked for."""

    def __init__(self, inner: int = 12, outer: int = 12, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, inner)
        self.norm = nn.LayerNorm(inner)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(inner, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.norm(self.first(x)))))


class Job:
    """A model and its optimizer in one process, the same on all ranks; the base of all jobs."""

    model_key = "model"
    of_each_rank = False  # whether ranks have values that differ

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.step = 0
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model: nn.Module = self.make_model()
        self.optim: Any = self.make_optimizer()

    def make_model(self) -> nn.Module:
        return Network()

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    # The state.

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim, "step": self.step}

    def taken(self, state: dict[str, Any]) -> None:
        """Take plain values out of a state whose objects have got theirs."""
        self.step = state["step"]

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = _plain(self.objects())
        return found

    def adopt(self, plain: dict[str, Any]) -> None:
        _adopt(self.objects(), plain)
        self.taken(plain)

    # Training.

    @property
    def part(self) -> int:
        """Which part of the data is this rank's. Jobs that exchange no gradients share one."""
        return 0

    def batch(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.step + self.part)
        return torch.randn(4, 6, generator=generator)

    def loss(self) -> torch.Tensor:
        out = self.model(self.batch())
        return (out.full_tensor() if isinstance(out, DTensor) else out).square().mean()

    def train(self, steps: int) -> list[str]:
        """Losses of this rank, bit for bit as text."""
        losses = []
        for _ in range(steps):
            loss = self.loss()
            loss.backward()
            self.update()
            losses.append(float(loss.detach()).hex())
            self.step += 1
        return losses

    def update(self) -> None:
        self.optim.step()
        self.optim.zero_grad()


class Nested(Job):
    """Dicts in dicts and lists, tensors and values at every level; no module, no optimizer."""

    model_key = "x"

    def make_model(self) -> nn.Module:
        self.tree: dict[str, Any] = {
            "x": {"a": torch.randn(6, 5), "b": torch.randn(5)},
            "y": torch.randn(3),
            "z": {"deep": {"er": [torch.randn(2), {"last": torch.randn(5)}]}, "rate": 0.5},
            "count": 0,
            "names": ["a", "b"],
        }
        return nn.Identity()

    def make_optimizer(self) -> Any:
        return None

    def objects(self) -> dict[str, Any]:
        return {**self.tree, "step": self.step}

    def taken(self, state: dict[str, Any]) -> None:
        super().taken(state)
        self.tree = {key: value for key, value in state.items() if key != "step"}

    def adopt(self, plain: dict[str, Any]) -> None:
        self.taken(plain)

    def loss(self) -> torch.Tensor:
        tree = self.tree
        out = self.batch() @ tree["x"]["a"] + tree["x"]["b"] + tree["z"]["deep"]["er"][1]["last"]
        return (out * tree["z"]["rate"]).square().mean() + tree["y"].sum() * tree["count"]

    def train(self, steps: int) -> list[str]:
        losses = []
        for _ in range(steps):
            losses.append(float(self.loss()).hex())
            self.tree["x"]["a"] *= 0.9
            self.tree["x"]["b"] += 0.1
            self.tree["y"] -= 0.3
            self.tree["z"]["deep"]["er"][1]["last"] *= 1.1
            self.tree["z"]["rate"] *= 0.75
            self.tree["count"] += 1
            self.step += 1
        return losses


def in_order(group, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
    """Means in the order of the ranks. gloo's own sums depend on where in its bucket a gradient
    lies, and a wrapper that has made a step has another order than a new one."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(group.size())]
    dist.all_gather(parts, bucket.buffer(), group=group)
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(sum(parts) / len(parts))
    return done


class Replicated(Job):
    """DistributedDataParallel."""

    def make_model(self) -> nn.Module:
        self.module = Network()
        group = self.place.row.get_group()
        model = DistributedDataParallel(self.module, process_group=group)
        model.register_comm_hook(group, in_order)
        return model

    @property
    def part(self) -> int:
        return int(self.place.row.get_local_rank())


class Compiled(Job):
    """torch.compile around the model, and around a layer of it; parameters have names."""

    def make_model(self) -> nn.Module:
        model = Network()
        model.second = torch.compile(model.second, backend="eager")
        return torch.compile(model, backend="eager")  # type: ignore[no-any-return]

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.named_parameters(), lr=0.01)


class Sharded(Job):
    """FSDP2, with the state dicts that model and optimizer give."""

    def make_model(self) -> nn.Module:
        return self.shard(Network(), self.place.row)

    @property
    def part(self) -> int:
        return int(self.place.row.get_local_rank())

    @staticmethod
    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


class ShardedByName(Sharded):
    """FSDP2, with torch's `get_state_dict` and `set_state_dict`."""

    def plain(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "step": self.step}

    def adopt(self, plain: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optim,
            model_state_dict=plain["model"],
            optim_state_dict=plain["optim"],
        )
        self.taken(plain)

    def objects(self) -> dict[str, Any]:
        return self.plain()

    def taken(self, state: dict[str, Any]) -> None:
        if "model" in state and state["model"] is not self.model:
            set_state_dict(
                self.model,
                self.optim,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )
        self.step = state["step"]


class Hybrid(Sharded):
    """HSDP: copies of shards."""

    def make_model(self) -> nn.Module:
        return self.shard(Network(), self.place.tall)


class TwoDim(Sharded):
    """FSDP2 around tensor parallel layers."""

    def make_model(self) -> nn.Module:
        model = Network()
        model.norm = nn.Identity()  # its input is cut by columns
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, self.place.wide["tp"], plan)
        return self.shard(model, self.place.wide["shards"])

    @property
    def part(self) -> int:
        return int(self.place.wide["shards"].get_local_rank())


class Uneven(Sharded):
    """FSDP2 with sizes that no number of ranks divides; some ranks have nothing of a tensor."""

    def make_model(self) -> nn.Module:
        return self.shard(Network(7, 1), self.place.row)


class TiedNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.abs().mul(97).long() % 11
        return self.head(torch.tanh(self.mix(self.embed(rows))))


class Tied(Job):
    """One weight under two names, in the model and in its optimizer once."""

    def make_model(self) -> nn.Module:
        return TiedNetwork()

    def update(self) -> None:
        assert self.model.head.weight is self.model.embed.weight
        super().update()


class TiedShards(Tied, Sharded):
    """The same under FSDP2."""

    def make_model(self) -> nn.Module:
        model = TiedNetwork()
        fully_shard(model, mesh=self.place.row)
        return model


class EmptyNetwork(Network):
    """Parameters and buffers without elements before, between and after others."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.Parameter(torch.zeros(0, 6))
        self.register_buffer("history", torch.zeros(0, 3))
        self.register_buffer("zeros", torch.zeros(2, 0, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.adapters.sum() + self.history.sum()


class Empty(Job):
    """Tensors without elements."""

    def make_model(self) -> nn.Module:
        return EmptyNetwork()


class Scheduled(Job):
    """Learning rates of two chained schedulers and momentum."""

    def make_optimizer(self) -> Any:
        optim = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        warm = torch.optim.lr_scheduler.LinearLR(optim, 0.2, total_iters=3)
        cold = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 5)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(optim, [warm, cold], [3])
        return optim

    def objects(self) -> dict[str, Any]:
        return {**super().objects(), "schedule": self.schedule}

    def update(self) -> None:
        super().update()
        self.schedule.step()


class Several(Job):
    """Optimizers in a list, each for a part of the model."""

    def make_optimizer(self) -> Any:
        first, *rest = self.model.children()
        others = [p for layer in rest for p in layer.parameters()]
        return [
            torch.optim.AdamW(first.parameters(), lr=0.01),
            torch.optim.SGD(others, lr=0.1, momentum=0.5),
        ]

    def update(self) -> None:
        for optim in self.optim:
            optim.step()
            optim.zero_grad()


class Averaged(Job):
    """A moving average of the weights, and buffers that are no parameters."""

    def make_model(self) -> nn.Module:
        model = Network()
        model.norm = nn.BatchNorm1d(12)
        self.average = AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True
        )
        return model

    def objects(self) -> dict[str, Any]:
        return {**super().objects(), "ema": self.average}

    def loss(self) -> torch.Tensor:
        with torch.no_grad():
            drift = self.average(self.batch()).mean()
        return super().loss() + drift

    def update(self) -> None:
        super().update()
        self.average.update_parameters(self.model)


class RandomNumbers:
    """The generators of torch, of Python and of numpy, as an object with a state."""

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        python = {"version": version, "numbers": list(numbers), "gauss": gauss}
        return {
            "torch": torch.get_rng_state(),
            "python": python,
            "numpy": np.random.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        python = state["python"]
        random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
        np.random.set_state(state["numpy"])


class Random(Job):
    """Dropout and data augmentation: the losses follow the random numbers."""

    def __init__(self, place: Place, seed: int) -> None:
        super().__init__(place, seed)
        self.generators = RandomNumbers()
        self.kept = self.generators.state_dict()

    def make_model(self) -> nn.Module:
        return Network(dropout=0.5)

    def objects(self) -> dict[str, Any]:
        self.generators.load_state_dict(self.kept)
        return {**super().objects(), "random": self.generators}

    def taken(self, state: dict[str, Any]) -> None:
        super().taken(state)
        self.kept = self.generators.state_dict()

    def loss(self) -> torch.Tensor:
        return super().loss() * random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)

    def train(self, steps: int) -> list[str]:
        self.generators.load_state_dict(self.kept)  # other jobs of this process use them too
        losses = super().train(steps)
        self.kept = self.generators.state_dict()
        return losses


class Reader:
    """Reads an endless shuffled data set; its position is a dict with plain values and a tensor."""

    def __init__(self) -> None:
        self.epoch, self.index = 0, 0
        self.order = torch.arange(5)

    def __next__(self) -> int:
        if self.index == len(self.order):
            self.epoch, self.index = self.epoch + 1, 0
            generator = torch.Generator().manual_seed(self.epoch)
            self.order = torch.randperm(5, generator=generator)
        self.index += 1
        return int(self.order[self.index - 1])

    def state_dict(self) -> dict[str, Any]:
        position = {"epoch": self.epoch, "index": self.index}
        return {"position": position, "order": self.order, "files": ["a", "b"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.index = state["position"]["epoch"], state["position"]["index"]
        self.order = state["order"]


class Positioned(Job):
    """A data reader in the middle of its second pass."""

    def __init__(self, place: Place, seed: int) -> None:
        super().__init__(place, seed)
        self.reader = Reader()

    def objects(self) -> dict[str, Any]:
        return {**super().objects(), "reader": self.reader}

    def batch(self) -> torch.Tensor:
        next(self.reader)
        generator = torch.Generator().manual_seed(100 * next(self.reader) + self.part)
        return torch.randn(4, 6, generator=generator)


class RankValues(Random):
    """Random numbers, a data position and a scalar of numpy that are others on each rank."""

    of_each_rank = True

    def __init__(self, place: Place, seed: int) -> None:
        super().__init__(place, seed)
        rank = int(place.row.get_local_rank())
        torch.manual_seed(100 * seed + rank)
        random.seed(100 * seed + rank)
        np.random.seed(100 * seed + rank)
        self.kept = self.generators.state_dict()
        self.position = {"file": f"part-{rank}", "line": 7 * rank, "weight": np.float64(rank + 1)}

    def objects(self) -> dict[str, Any]:
        return {**super().objects(), "position": self.position}

    def taken(self, state: dict[str, Any]) -> None:
        super().taken(state)
        self.position = state["position"]

    def loss(self) -> torch.Tensor:
        assert type(self.position["weight"]) is np.float64
        self.position["line"] += 1
        known = self.position["line"] * self.position["weight"] + len(self.position["file"])
        return super().loss() + float(known)


class Logged(Job):
    """A buffer of bytes that grows, and is read back to its end."""

    def __init__(self, place: Place, seed: int) -> None:
        super().__init__(place, seed)
        self.log = io.BytesIO()

    def objects(self) -> dict[str, Any]:
        return {**super().objects(), "log": self.log}

    def taken(self, state: dict[str, Any]) -> None:
        super().taken(state)
        self.log = state["log"]

    def loss(self) -> torch.Tensor:
        loss = super().loss()
        self.log.write(f"{self.step} {float(loss.detach())}\n".encode())
        return loss * (1 + self.log.tell()) + len(self.log.getvalue())


JOBS: dict[str, type[Job]] = {
    "nested dicts": Nested,
    "DDP + AdamW": Replicated,
    "FSDP2 + AdamW": Sharded,
    "FSDP2, get_state_dict": ShardedByName,
    "HSDP + AdamW": Hybrid,
    "TP + FSDP2": TwoDim,
    "uneven shards": Uneven,
    "tied weights": Tied,
    "FSDP2, tied weights": TiedShards,
    "zero-element tensors": Empty,
    "compiled": Compiled,
    "LR scheduler": Scheduled,
    "optimizers in a list": Several,
    "EMA and buffers": Averaged,
    "RNG": Random,
    "data position": Positioned,
    "values of each rank": RankValues,
    "BytesIO": Logged,
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return value.state_dict() if hasattr(value, "load_state_dict") else value


def _adopt(objects: Any, plain: Any) -> None:
    if isinstance(objects, dict):
        for key, part in objects.items():
            _adopt(part, plain[key])
    elif isinstance(objects, list):
        for part, state in zip(objects, plain, strict=True):
            _adopt(part, state)
    elif hasattr(objects, "load_state_dict"):
        objects.load_state_dict(plain)


# Whole values, by torch's own means: what the doors are compared with.


def portrait(value: Any) -> Any:
    """A plain state with whole tensors in place of distributed ones, in memory of its own."""
    if isinstance(value, dict):
        return {key: portrait(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(portrait(part) for part in value)
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    return copy.deepcopy(value.detach() if isinstance(value, torch.Tensor) else value)


def painted(value: Any, picture: Any) -> Any:
    """A plain state with the values of a portrait, distributed as `value` is."""
    if isinstance(value, dict):
        return {key: painted(value.get(key), picture[key]) for key in picture}
    if isinstance(value, (list, tuple)) and len(value) == len(picture):
        return type(value)(painted(*pair) for pair in zip(value, picture, strict=True))
    if isinstance(value, DTensor):
        whole = DTensor.from_local(picture, value.device_mesh)
        return whole.redistribute(value.device_mesh, value.placements)
    return copy.deepcopy(picture)
