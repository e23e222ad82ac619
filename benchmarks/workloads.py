"""The states that are moved. Deterministic: every rank can make the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.demo.versus import DIRECT, IN_PLACE, NEW, Mode

MIB = 1 << 20


@dataclass(frozen=True)
class Bar:
    """What a row has to reach. `speed`: torch's seconds over ours."""

    speed: float | None = None
    fewer_bytes: float | None = None  # torch's bytes over ours
    sent_per_state: float | None = None  # bytes the sender sends over bytes of the state

    def __str__(self) -> str:
        parts = []
        if self.speed is not None:
            parts.append(f"speed >= {self.speed:g}x")
        if self.fewer_bytes is not None:
            parts.append(f"bytes >= {self.fewer_bytes:g}x fewer")
        if self.sent_per_state is not None:
            parts.append(f"sent <= {self.sent_per_state:g}x state")
        return ", ".join(parts)


@dataclass(frozen=True)
class Workload:
    """A state, to how many receivers it goes, in which modes, and what each has to reach."""

    name: str
    title: str
    make: Callable[[], Any]
    modes: dict[Mode, Bar | None]
    receivers: int = 1
    repeats: int = 5


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


def transformer(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    """A decoder's weights and its AdamW state, laid out as state dicts are."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed.weight", (vocabulary, width))]
    for layer in range(layers):
        for name, rows, columns in (
            ("attention.qkv", 3 * width, width),
            ("attention.out", width, width),
            ("mlp.up", 4 * width, width),
            ("mlp.down", width, 4 * width),
        ):
            shapes.append((f"layers.{layer}.{name}.weight", (rows, columns)))
            shapes.append((f"layers.{layer}.{name}.bias", (rows,)))
        for norm in ("norm1", "norm2"):
            shapes.append((f"layers.{layer}.{norm}.weight", (width,)))
            shapes.append((f"layers.{layer}.{norm}.bias", (width,)))
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


def suite(small: bool) -> list[Workload]:
    """Every workload; `small` has the same shape at a hundredth of the size."""
    count = 500 if small else 20_000
    whole = 16 * MIB if small else 1024 * MIB
    fanned = 8 * MIB if small else 1024 * MIB
    gpt = (64, 4, 512) if small else (512, 24, 16_384)
    repeats = 1 if small else 5
    # Seconds mean nothing at small sizes; bytes do.
    tenfold, near = (None, None) if small else (Bar(speed=10), Bar(speed=0.8))
    once = Bar(speed=None if small else 0.8, sent_per_state=1.1)
    fewer = Bar(fewer_bytes=50)
    return [
        Workload(
            "small-tensors",
            f"{count:,} tensors of 4 KB",
            lambda: many_small(count),
            {NEW: tenfold, IN_PLACE: tenfold, DIRECT: tenfold},
            repeats=min(repeats, 3),  # torch takes seconds for each
        ),
        Workload(
            "views",
            "100 views of one 4 MB buffer",
            lambda: views(100, 4_000_000),
            {NEW: fewer, IN_PLACE: fewer},
            repeats=repeats,
        ),
        Workload(
            "large",
            f"{whole // MIB} MiB in 16 tensors",
            lambda: large(16, whole),
            {NEW: None, IN_PLACE: None, DIRECT: near},
            repeats=repeats,
        ),
        Workload(
            "fan-out",
            f"{fanned // MIB} MiB to 3 receivers",
            lambda: large(16, fanned),
            {NEW: once, DIRECT: once},
            receivers=3,
            repeats=repeats,
        ),
        Workload(
            "transformer",
            "transformer with AdamW",
            lambda: transformer(*gpt),
            {NEW: None, IN_PLACE: None, DIRECT: None},
            repeats=repeats,
        ),
    ]
