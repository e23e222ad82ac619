"""A tensor that is in this process in boxes, with no mesh and no process group behind it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from torchrelay.geometry.boxes import Box
from torchrelay.geometry.shards import ShardPiece
from torchrelay.record import manifest as m


class Properties(NamedTuple):
    """Properties of the whole tensor, under the names that a ShardedTensor has for them."""

    dtype: torch.dtype
    requires_grad: bool = False
    pin_memory: bool = False


class BoxedTensor(torch.Tensor):
    """It has the dtype and the shape of the whole, and no memory: `locals_` are the tensors that
    have the elements of its `boxes`.

    `own` is the caller's tensor that it stands for in a state, if there is one. The library makes
    such tensors for its own use, and never hands one to a caller.
    """

    boxes: tuple[m.Box, ...]
    own: torch.Tensor | None
    _starts: tuple[tuple[int, ...], ...]
    _memory: tuple[torch.Tensor, ...]

    @classmethod
    def of_parts(
        cls, parts: Sequence[tuple[Box, torch.Tensor]], shape: Sequence[int]
    ) -> BoxedTensor:
        """By the memory of each box, in this order. There is at least one."""
        made = cls._bare(shape, parts[0][1].dtype, [box for box, _ in parts])
        made._memory = tuple([memory.detach() for _, memory in parts])
        return made

    @classmethod
    def of_pieces(
        cls, own: torch.Tensor, shape: Sequence[int], pieces: Sequence[ShardPiece]
    ) -> BoxedTensor:
        """By the tensor that has all boxes in it: in order of their offsets, without empty ones."""
        found = sorted(piece for piece in pieces if 0 not in piece.box[1])
        made = cls._bare(shape, own.dtype, [piece.box for piece in found])
        made._starts, made.own = tuple([piece.at for piece in found]), own
        return made

    @classmethod
    def _bare(cls, shape: Sequence[int], dtype: torch.dtype, boxes: Sequence[Box]) -> BoxedTensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="meta").as_subclass(cls)
        made.boxes = tuple([m.Box(*box, None) for box in boxes])
        made.own, made._starts, made._memory = None, (), ()
        return made

    @property
    def locals_(self) -> list[torch.Tensor]:
        """The memory of each box, where it lies now."""
        if self.own is None or not self._starts:
            return list(self._memory)
        local = self.own.detach()
        pairs = zip(self._starts, self.boxes, strict=True)
        return [_inside(local, at, box.sizes) for at, box in pairs]

    def with_memory(self, locals_: Sequence[torch.Tensor], dtype: torch.dtype) -> BoxedTensor:
        """The same boxes in other memory, of this dtype."""
        made = self._bare(self.shape, dtype, [(box.offsets, box.sizes) for box in self.boxes])
        made._memory, made.own = tuple(locals_), self.own
        return made

    @property
    def all_boxes(self) -> tuple[m.Box, ...]:
        """The boxes that are known: none of other processes is. Of a tensor that this process has
        nothing of, the whole."""
        shape = tuple(self.shape)
        return self.boxes or (m.Box((0,) * len(shape), shape, None),)

    @property
    def is_whole(self) -> bool:
        """Whether this process has all of it."""
        return sum(prod(box.sizes) for box in self.boxes) == self.numel()

    def joined(self) -> torch.Tensor:
        """The whole tensor, of a process that has all of it."""
        parts = self.locals_
        if len(parts) == 1:
            return parts[0]
        device = parts[0].device if parts else "cpu"
        found = torch.empty(self.shape, dtype=self.dtype, device=device)
        for box, part in zip(self.boxes, parts, strict=True):
            _inside(found, box.offsets, box.sizes).copy_(part)
        return found

    @property
    def properties(self) -> Properties:
        return Properties(self.dtype, self.own is not None and self.own.requires_grad)


def _inside(tensor: torch.Tensor, at: Sequence[int], sizes: tuple[int, ...]) -> torch.Tensor:
    if sizes == tensor.shape:
        return tensor
    return tensor[tuple([slice(low, low + size) for low, size in zip(at, sizes, strict=True)])]
