"""Runs of memory that bytes of a stream come from or go to, in columns.

A tensor of 16 bytes in host memory at 0x7000, and one of 8 bytes in memory of GPU 0 at 0x9000, are
images 0 and 1 of a stream. As pieces:

    at   address   nbytes   device   image   keep
    0    0x7000    16       HOST     0       0     memory[0] is the first tensor
    16   0x9000    8        0        1       1     memory[1] is the second
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Column, Runs
from torchrelay.record.rows import Marks
from torchrelay.state import tensors as t

HOST = -1


def device_number(device: torch.device) -> int:
    """The number of a device in pieces."""
    return HOST if device.type == "cpu" else device.index or 0


def device_of(number: int) -> torch.device:
    """The GPU with a number in pieces, or the host."""
    return torch.device("cpu") if number == HOST else torch.device("cuda", number)


# Position, address, bytes, device, image, and the number of the tensor to keep.
PieceRow = tuple[int, int, int, int, int, int]


class Pieces(NamedTuple):
    """Runs of memory, in columns and in the order of a stream.

    `at`: where the bytes begin there; `device`: the number of the device that has them, or HOST;
    `image`: the image that they are of; `keep`: the number in `memory` of the tensor that they are
    part of. Some bytes may go to several pieces.
    """

    at: Column
    address: Column
    nbytes: Column
    device: Numbers
    image: Numbers
    keep: Numbers
    memory: Sequence[Any] = ()

    @classmethod
    def of(cls, rows: Sequence[PieceRow], memory: Sequence[Any]) -> Pieces:
        """Pieces from rows, each with a value for every column."""
        at, address, nbytes = np.array([row[:3] for row in rows], np.uint64).reshape(-1, 3).T
        device, image, keep = np.array([row[3:] for row in rows], np.int64).reshape(-1, 3).T
        return cls(at, address, nbytes, device, image, keep, memory)

    def __len__(self) -> int:
        return len(self.at)

    @property
    def on_host(self) -> Marks:
        """Whether each lies in host memory."""
        marks: Marks = self.device == HOST
        return marks

    @property
    def runs(self) -> Runs:
        """Where the bytes of pieces lie that do not overlap in the stream."""
        return Runs(self.at, self.address, self.nbytes)

    def some(self, rows: Any) -> Pieces:
        """The pieces in some rows, by mark or number."""
        if rows.dtype == bool and rows.all():  # mostly
            return self
        return Pieces(
            at=self.at[rows],
            address=self.address[rows],
            nbytes=self.nbytes[rows],
            device=self.device[rows],
            image=self.image[rows],
            keep=self.keep[rows],
            memory=self.memory,
        )

    def in_order(self) -> Pieces:
        """In the order of the stream."""
        if not (self.at[1:] < self.at[:-1]).any():
            return self
        return self.some(np.argsort(self.at, kind="stable"))

    def joined(self, more: Pieces) -> Pieces:
        """With more pieces, whose memory is joined to that of these."""
        if not len(more):
            return self
        return Pieces(
            at=np.append(self.at, more.at),
            address=np.append(self.address, more.address),
            nbytes=np.append(self.nbytes, more.nbytes),
            device=np.append(self.device, more.device),
            image=np.append(self.image, more.image),
            keep=np.append(self.keep, more.keep + len(self.memory)),
            memory=[*self.memory, *more.memory],
        ).in_order()

    def once(self) -> Pieces:
        """Each piece once: what goes to one address twice does so once."""
        _, first = np.unique(np.stack(self[:3], axis=1), axis=0, return_index=True)
        return self if len(first) == len(self) else self.some(np.sort(first))

    @property
    def overlapping(self) -> Numbers:
        """The images with bytes that go to several pieces."""
        ends = np.maximum.accumulate(self.at + self.nbytes)
        found: Numbers = self.image[1:][self.at[1:] < ends[:-1]]
        return found

    def bytes_of(self, row: int) -> torch.Tensor:
        """The bytes of one piece, as a tensor."""
        tensor: torch.Tensor = self.memory[int(self.keep[row])]
        skip = int(self.address[row]) - tensor.data_ptr()
        offset = t.byte_offset(tensor) + skip
        return t.flat_bytes(tensor.untyped_storage(), offset, int(self.nbytes[row]))

    def tensors(self) -> list[tuple[int, torch.Tensor]]:
        """The bytes of all pieces, with their positions in the stream."""
        return [(at, self.bytes_of(row)) for row, at in enumerate(self.at.tolist())]


NO_PIECES = Pieces.of([], ())
