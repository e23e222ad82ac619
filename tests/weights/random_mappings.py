"""Random mappings: what is published, the rules, and what each rank must have in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch

from torchrelay.weights.mapping import ParameterRule, SourcePart, WeightMapping

LAYERS = 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@dataclass
class Case:
    """`published` by name; `wanted` by rank and parameter; `nbytes` that each rank needs."""

    mapping: WeightMapping
    ranks: int
    published: dict[str, torch.Tensor] = field(default_factory=dict)
    wanted: list[dict[str, torch.Tensor]] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    draw: Callable[..., torch.Tensor] = torch.randn
    dtypes: list[torch.dtype] = field(default_factory=lambda: DTYPES)  # that are published


def random_case(
    seed: int,
    ranks: int | None = None,
    draw: Callable[..., torch.Tensor] = torch.randn,
    dtypes: list[torch.dtype] | None = None,
) -> Case:
    """`draw` makes the values of each tensor from its shape: with others, the case is the same and
    its values are others."""
    random = Random(seed)
    torch.manual_seed(seed)
    drawn = random.choice([1, 2, 3, 4])
    ranks = drawn if ranks is None else ranks
    case = Case(WeightMapping(()), ranks, draw=draw, dtypes=dtypes or DTYPES)
    case.wanted = [{} for _ in range(ranks)]
    case.nbytes = [0] * ranks
    rules = [_parameter(random, case, number) for number in range(random.randint(1, 5))]
    case.mapping = WeightMapping(tuple(rules), ignored=("more.**",))
    names = [*case.published, *(f"more.{n}.x" for n in range(random.randint(0, 2)))]
    random.shuffle(names)
    case.published = {name: case.published.get(name, torch.zeros(3)) for name in names}
    return case


def _parameter(random: Random, case: Case, number: int) -> ParameterRule:
    """One kind of parameter in each layer, with everything that it is made of."""
    ranks, dims = case.ranks, random.randint(1, 3)
    dim = random.randrange(dims)
    split = random.choice([None, dim, random.randrange(dims)])
    padded = split in (None, dim) and random.random() < 0.2
    transpose = dims == 2 and random.random() < 0.4
    there = random.choice(case.dtypes)
    here = random.choice(DTYPES) if random.random() < 0.3 else there
    shape = [random.randint(1, 4) for _ in range(dims)]
    pieces = None
    if split is not None and not padded:
        if random.random() < 0.4:
            pieces = random.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        if split != dim:
            shape[split] *= pieces or ranks
    cut = (pieces or ranks) if split is not None else 1
    sizes = [
        random.randint(1, 3) * (cut if split == dim else 1) for _ in range(random.randint(1, 3))
    ]
    if padded:
        sizes = [random.randint(1, 9)]
    one_tensor = len(sizes) > 1 and random.random() < 0.4
    parts, at = [], 0
    for place, size in enumerate(sizes):
        name = f"pub.{{1}}.n{number}" + ("" if one_tensor else f".{place}")
        parts.append(SourcePart(name, size, at if one_tensor else 0, pieces))
        at += size
    rule = ParameterRule(
        f"layers.*.p{number}",
        tuple(parts),
        dim,
        split,
        padded,
        transpose,
        None if here is there else str(there).removeprefix("torch."),
    )
    rows = -(-sizes[0] // cut) + random.randint(0, 2)  # on each rank, if padded
    for layer in range(LAYERS):
        shapes = [(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
        wholes = [case.draw(*one).to(there) for one in shapes]
        _publish(case, [part.name for part in parts], layer, wholes, dim, transpose=transpose)
        for rank in range(ranks):
            locals_ = [_local(one, rule, rank, ranks, cut, rows) for one in wholes]
            found = torch.cat(locals_, dim)
            if padded:
                case.nbytes[rank] += found.numel() * found.element_size()
                more = [*found.shape]
                more[dim] = rows - more[dim]
                found = torch.cat([found, found.new_zeros(more)], dim)
            else:
                case.nbytes[rank] += found.numel() * found.element_size()
            case.wanted[rank][f"layers.{layer}.p{number}"] = found.to(here)
    return rule


def _publish(
    case: Case,
    names: list[str],
    layer: int,
    wholes: list[torch.Tensor],
    dim: int,
    *,
    transpose: bool,
) -> None:
    names = [name.replace("{1}", str(layer)) for name in names]
    if len(set(names)) < len(names):
        names, wholes = names[:1], [torch.cat(wholes, dim)]
    for name, whole in zip(names, wholes, strict=True):
        case.published[name] = whole.t().contiguous() if transpose else whole


def _local(
    whole: torch.Tensor, rule: ParameterRule, rank: int, ranks: int, cut: int, rows: int
) -> torch.Tensor:
    """The piece of a part that a rank has, by slices of the whole part."""
    if rule.padded:
        first = rank * rows if rule.split is not None else 0
        rows = rows if rule.split is not None else whole.shape[rule.dim]
        low, high = (min(n, whole.shape[rule.dim]) for n in (first, first + rows))
        return whole.narrow(rule.dim, low, high - low)
    return whole if rule.split is None else whole.chunk(cut, rule.split)[rank * cut // ranks]
