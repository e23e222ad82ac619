"""Tensors with the attributes of torch's CheckpointableTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Numbers = tuple[int, ...]
SHAPE = (6, 4)


def marked(
    tensor: torch.Tensor,
    shape: Sequence[int],
    offsets: Sequence[Sequence[int]],
    starts: Sequence[Sequence[int]] | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
) -> Any:
    """The tensor itself, which says that it has these boxes: by default one, which is all of it."""
    one: Any = tensor
    one.global_shape, one.global_offsets = tuple(shape), tuple(map(tuple, offsets))
    one.local_offsets = tuple(map(tuple, [(0,) * tensor.dim()] if starts is None else starts))
    one.local_sizes = tuple(map(tuple, [tensor.shape] if sizes is None else sizes))
    return one


def whole(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(24, dtype=dtype).reshape(SHAPE)


def rows(first: int, end: int, values: torch.Tensor | None = None) -> Any:
    """Some rows of `whole`, in memory of their own."""
    values = whole() if values is None else values
    return marked(values[first:end].clone(), SHAPE, [(first, 0)])


def corners(filled: bool = True) -> Any:
    """Two boxes of `whole` side by side in a wider tensor, with padding around them: the upper left
    and the lower right quarter. The others are in `other_corners`."""
    return _pair(((3, 2), (0, 0)), filled)


def other_corners(filled: bool = True) -> Any:
    return _pair(((0, 2), (3, 0)), filled)


def _pair(offsets: tuple[tuple[int, int], ...], filled: bool) -> Any:
    memory, starts = torch.full((4, 7), -1.0), ((0, 0), (1, 3))
    for (row, column), (at, start) in zip(offsets, starts, strict=True):
        if filled:
            memory[at : at + 3, start : start + 2] = whole()[row : row + 3, column : column + 2]
    return marked(memory, SHAPE, offsets, starts, [(3, 2), (3, 2)])


def boxes_of(tensor: Any) -> list[torch.Tensor]:
    """The boxes that a tensor says it has, in order of their offsets."""
    found = zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True)
    return [
        tensor[tuple(slice(low, low + size) for low, size in zip(start, sizes, strict=True))]
        for _, start, sizes in sorted(found)
    ]


def has_its_boxes(tensor: Any, values: torch.Tensor | None = None) -> bool:
    """Whether the boxes of a tensor have the elements of `whole` that they name."""
    values = whole() if values is None else values
    offsets = sorted(tensor.global_offsets)
    return all(
        torch.equal(box, values[tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))])
        for at, box in zip(offsets, boxes_of(tensor), strict=True)
    )
