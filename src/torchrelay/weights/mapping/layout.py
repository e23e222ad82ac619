"""Boxes of a publisher's tensors, and the boxes of a parameter that they go to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box
from torchrelay.weights.mapping.rules import ParameterRule, SourcePart

Shape = tuple[int, ...]
RankOf = tuple[int, int]  # a rank, and the number of ranks


class SourceBox(NamedTuple):
    """A box of the publisher's tensor for a `part` of a rule, whose shape is `shape`; and the box
    of a parameter that takes it, with the dimensions in the other order if the rule transposes."""

    part: int
    shape: Shape
    box: Box
    place: Box


class ParameterLayout(NamedTuple):
    """The boxes that fill a parameter, and the box that is padding, if any is."""

    boxes: tuple[SourceBox, ...]
    padding: Box | None = None


@lru_cache(1024)  # layers are alike
def layout_of(rule: ParameterRule, shape: Shape, shard: RankOf = (0, 1)) -> ParameterLayout:
    """The layout of a parameter of this shape at one rank. `MismatchError` says why the shape does
    not fit the rule."""
    _check_dims(rule, shape)
    if not shape:
        return ParameterLayout((SourceBox(0, (), ((), ()), ((), ())),))
    dim, split = rule.dim, rule.split
    cut_here = split == dim
    cuts = [_cuts(rule, part, shard) for part in rule.parts]
    if rule.padded:
        return _padded(rule, shape, shard if cut_here else (0, 1))
    lengths = _lengths(rule, cuts if cut_here else [1] * len(cuts), shape[dim])
    wholes = [length * (cut if cut_here else 1) for length, cut in zip(lengths, cuts, strict=True)]
    names = rule.sources(rule.parameter)
    assert names is not None
    ends: dict[str, int] = {}  # parts may be of one tensor
    for name, part, whole in zip(names, rule.parts, wholes, strict=True):
        ends[name] = max(ends.get(name, 0), part.start + whole)
    found = []
    at = 0
    for number, (part, cut, length) in enumerate(zip(rule.parts, cuts, lengths, strict=True)):
        piece = shard[0] * cut // shard[1]
        source_shape, sizes = list(shape), list(shape)
        offsets, place = [0] * len(shape), [0] * len(shape)
        if split is not None:
            offsets[split] = piece * (length if cut_here else shape[split])
            source_shape[split] *= 1 if cut_here else cut
        source_shape[dim], sizes[dim] = ends[names[number]], length
        offsets[dim] += part.start
        place[dim] = at
        at += length
        found.append(_source_box(rule, number, source_shape, (offsets, sizes), place))
    return ParameterLayout(tuple(found))


def _check_dims(rule: ParameterRule, shape: Shape) -> None:
    dims = len(shape)
    if rule.transpose and dims != 2:
        raise MismatchError(f"has {dims} dimensions, and only matrices are transposed")
    single = len(rule.parts) == 1 and rule.parts[0] == SourcePart(rule.parts[0].name)
    if not dims and (not single or rule.split is not None):
        raise MismatchError("is a scalar, and cannot be made of parts")
    for what, dim in (("dim", rule.dim), ("split", rule.split)):
        if dim is not None and dim >= max(dims, 1):
            raise MismatchError(f"has {dims} dimensions, and the rule says {what}={dim}")


def _cuts(rule: ParameterRule, part: SourcePart, shard: RankOf) -> int:
    """How many pieces a part is cut into."""
    ranks = shard[1] if rule.split is not None else 1
    cuts = min(ranks, part.pieces or ranks)
    if ranks % cuts or (part.pieces or 0) % cuts:
        raise MismatchError(
            f"{ranks} ranks cannot share {part.pieces} pieces of {part.name} evenly"
        )
    return cuts


def _lengths(rule: ParameterRule, cuts: Sequence[int], total: int) -> list[int]:
    """The length of each part in the parameter."""
    known: list[int | None] = []
    for part, cut in zip(rule.parts, cuts, strict=True):
        if part.size is not None and part.size % cut:
            raise MismatchError(f"{part.size} of {part.name} cannot be cut into {cut} pieces")
        known.append(None if part.size is None else part.size // cut)
    used, open_ = sum(length or 0 for length in known), known.count(None)
    left = total - used
    if left < 0 or (left if not open_ else left % open_):
        shares = f" and {open_} equal parts" if open_ else ""
        raise MismatchError(
            f"has {total} along dimension {rule.dim}, and the rule makes {used}{shares} of it"
        )
    return [left // open_ if length is None else length for length in known]


def _padded(rule: ParameterRule, shape: Shape, shard: RankOf) -> ParameterLayout:
    """A parameter whose last rows, on the last ranks, may be padding."""
    dim, part = rule.dim, rule.parts[0]
    whole, (rank, ranks) = part.size, shard
    assert whole is not None  # by the rule's own check
    rows = shape[dim]
    if rows * ranks < whole:
        raise MismatchError(
            f"has {rows} along dimension {dim} on each of {ranks} ranks, and {whole} are needed"
        )
    here = max(min(whole - rank * rows, rows), 0)
    source_shape, sizes, offsets = list(shape), list(shape), [0] * len(shape)
    source_shape[dim], sizes[dim] = part.start + whole, here
    offsets[dim] = part.start + min(rank * rows, whole)
    box = _source_box(rule, 0, source_shape, (offsets, sizes), [0] * len(shape))
    rest, after = list(shape), [0] * len(shape)
    rest[dim], after[dim] = rows - here, here
    return ParameterLayout((box,), (tuple(after), tuple(rest)) if here < rows else None)


def _source_box(
    rule: ParameterRule,
    part: int,
    shape: Sequence[int],
    box: tuple[Sequence[int], Sequence[int]],
    place: Sequence[int],
) -> SourceBox:
    offsets, sizes = (tuple(one) for one in box)
    there = (shape[::-1], offsets[::-1], sizes[::-1]) if rule.transpose else (shape, offsets, sizes)
    return SourceBox(part, tuple(there[0]), (there[1], there[2]), (tuple(place), sizes))
