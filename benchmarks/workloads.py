"""The states that are moved. Deterministic: every rank can make the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.rows import Bar, Case, Kind
from benchmarks.versus import AS_IT_COMES, DIRECT, IN_PLACE, NEW, Mode, Setup
from torchrelay.demo.job import leaves

MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    """A state, to how many receivers it goes, and what is measured with it."""

    name: str
    title: str
    make: Callable[[], Any]
    cases: list[Case]
    receivers: int = 1
    repeats: int = 5
    memory: int = 0  # bytes that have to be free: it must not push others out
    cold_samples: int = 0  # of new tensors in cold memory


def clear(state: object) -> None:
    """Zero every tensor, so that a transfer into it has something to prove."""
    with torch.no_grad():
        for _, leaf in leaves(state):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()


def ramp(numel: int, start: int) -> torch.Tensor:
    """Float32 bit patterns that differ at every position: a misplaced run of bytes is seen."""
    return torch.arange(start, start + numel, dtype=torch.int32).view(torch.float32)


def many_small(count: int) -> dict[str, torch.Tensor]:
    """Tensors of 4 KB, each with a storage of its own."""
    return {f"t{index}": ramp(1024, 1024 * index) for index in range(count)}


def views(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    """Views that together cover one flat buffer, as flattened parameters do."""
    flat = ramp(nbytes // 4, 0)
    size = flat.numel() // count
    return {f"v{index}": flat[index * size : (index + 1) * size] for index in range(count)}


def large(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    numel = nbytes // 4 // count
    return {f"w{index}": ramp(numel, numel * index) for index in range(count)}


def transformer(width: int, hidden: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """A Llama-like decoder's weights and its AdamW state, laid out as state dicts are."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed.weight", (vocabulary, width))]
    for layer in range(layers):
        for name, rows, columns in (
            ("attention.q", width, width),
            ("attention.k", width // 4, width),  # a key and value for four queries each
            ("attention.v", width // 4, width),
            ("attention.o", width, width),
            ("mlp.gate", hidden, width),
            ("mlp.up", hidden, width),
            ("mlp.down", width, hidden),
        ):
            shapes.append((f"layers.{layer}.{name}.weight", (rows, columns)))
        for norm in ("norm1", "norm2"):
            shapes.append((f"layers.{layer}.{norm}.weight", (width,)))
    shapes += [("norm.weight", (width,)), ("head.weight", (vocabulary, width))]
    place = 0

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        nonlocal place
        numel = torch.Size(shape).numel()
        place += numel
        return ramp(numel, place - numel).view(shape)

    model = {name: tensor(shape) for name, shape in shapes}
    state = {
        index: {"step": torch.tensor(7.0), "exp_avg": tensor(shape), "exp_avg_sq": tensor(shape)}
        for index, (_, shape) in enumerate(shapes)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(len(shapes)))}
    return {"model": model, "optimizer": {"state": state, "param_groups": [group]}}


def size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes < 1024 * MIB else f"{nbytes // MIB // 1024} GiB"


def suite(small: bool) -> list[Workload]:
    """Every workload; `small` has the same shape at a hundredth of the size."""
    count = 500 if small else 20_000
    whole = 16 * MIB if small else 1024 * MIB
    fanned = 8 * MIB if small else 1024 * MIB
    llama = (64, 176, 4, 512) if small else (1024, 2880, 24, 32_000)
    repeats = 1 if small else 5
    tcp, checked = Setup(route="tcp"), Setup(verify="all")
    unpooled = Setup(pool=0)  # new memory for new tensors in each lap, as the others have it

    def case(mode: Mode, speed: float | None, setup: Setup = AS_IT_COMES, **bytes_: float) -> Case:
        """Beside torch's class. Seconds mean nothing at small sizes; bytes do."""
        bar = Bar(speed=None if small else speed, **bytes_)
        theirs = Kind("torch", NEW if mode == NEW else IN_PLACE)
        return Case(Kind("torchrelay", mode, setup), theirs, None if bar == Bar() else bar)

    def three(direct: float, atomic: float, new: float) -> list[Case]:
        return [case(DIRECT, direct), case(IN_PLACE, atomic), case(NEW, new)]

    http = Case(Kind("torchrelay", NEW), Kind("torchft", NEW))
    copy = Case(
        Kind("torchrelay", DIRECT), Kind("copy_", DIRECT), None if small else Bar(speed=0.6)
    )
    return [
        Workload(
            "small-tensors",
            f"{count:,} tensors of 4 KB",
            lambda: many_small(count),
            [*three(28, 24, 22), case(DIRECT, 12, tcp), http],
            repeats=repeats,
        ),
        Workload(
            "views",
            "100 views of one 4 MB buffer",
            lambda: views(100, 4_000_000),
            [case(mode, None, fewer_bytes=50) for mode in (DIRECT, IN_PLACE, NEW)],
            repeats=repeats,
        ),
        Workload(
            "large",
            f"{size(whole)} in 16 tensors",
            lambda: large(16, whole),
            [
                *three(2.2, 1.2, 3),
                case(DIRECT, None, checked),
                case(DIRECT, 0.9, tcp),
                case(DIRECT, None, Setup(route="tcp", verify=False)),
                case(IN_PLACE, None, tcp),
                case(NEW, None, tcp),
                copy,
                case(NEW, None, unpooled),
                http,
            ],
            repeats=repeats,
            cold_samples=1 if small else 2,
        ),
        Workload(
            "fan-out",
            f"{size(fanned)} to 3 receivers",
            lambda: large(16, fanned),
            [
                *three(2, 1.2, 2.5),
                # A chain: what leaves the sender leaves it once.
                case(DIRECT, None, tcp, sent_per_state=1.1),
                case(NEW, None, tcp, sent_per_state=1.1),
            ],
            receivers=3,
            repeats=repeats,
        ),
        Workload(
            "transformer",
            "Llama-like model with AdamW" + ("" if small else ", 4.1 GB"),
            lambda: transformer(*llama),
            [*three(2, 1.1, 3), case(NEW, None, unpooled), http],
            repeats=min(repeats, 3),
            memory=0 if small else 23_000_000_000,  # four and a staged one, processes, some room
            cold_samples=0 if small else 2,
        ),
    ]
