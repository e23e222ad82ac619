"""The tensors of a state of which several ranks have told their boxes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.geometry.boxes import Numbers
from torchrelay.record.checkpoint.stored import Tensors, Tiling

_encode = msgspec.msgpack.Encoder().encode


class _Tilings:
    """Tilings by number, each once."""

    def __init__(self) -> None:
        self.known: list[Tiling] = []
        self._numbers: dict[bytes, int] = {}  # by their encoding: others' numbers may hash alike

    def number(self, tiling: Tiling) -> int:
        number = self._numbers.setdefault(_encode(tiling), len(self.known))
        if number == len(self.known):
            self.known.append(tiling)
        return number


def joined(parts: Sequence[Tensors], files: Sequence[int]) -> Tensors:
    """All boxes of the parts. `files`: the number from which those of each part count.

    The parts are valid. `ManifestError` where they do not agree on the dtype and shape of a tensor.
    """
    if len(parts) == 1 and not files[0]:
        return parts[0]
    names: dict[str, int] = {}
    pieces = _Tilings()  # how a part cuts its boxes of a tensor
    named, cut = [_none], [_none]
    for part in parts:
        named.append(np.array([names.setdefault(n, len(names)) for n in part.names], np.int64))
        cut.append(np.array([pieces.number(one) for one in part.tilings], np.int64)[part.which])
    tensors, which = np.concatenate(named), np.concatenate(cut)
    counts = np.array([tiling.count for tiling in pieces.known], np.int64)[which]
    begins = np.cumsum(counts) - counts
    order = np.argsort(tensors, kind="stable")
    ends = np.cumsum(np.bincount(tensors, minlength=len(names))).tolist()

    wholes = _Tilings()
    made: dict[bytes, tuple[int, Numbers]] = {}  # by the pieces, in order
    numbers, boxes, at = [], [_none], 0
    for name, end in zip(names, ends, strict=True):
        rows = order[at:end]
        key = which[rows].tobytes()
        if key not in made:
            several = [pieces.known[number] for number in which[rows].tolist()]
            tiling, places = _together(several, name)
            made[key] = wholes.number(tiling), places
        number, places = made[key]
        numbers.append(number)
        boxes.append(_boxes(begins[rows], counts[rows])[places])
        at = end
    found = np.concatenate(boxes)
    moved = [part.box_files + first for part, first in zip(parts, files, strict=True)]
    return Tensors.in_columns(
        wholes.known,
        names,
        np.array(numbers, np.int64),
        np.concatenate([_none, *moved])[found],
        np.concatenate([_none, *(part.box_starts for part in parts)])[found],
    )


_none: Numbers = np.zeros(0, np.int64)


def _boxes(begins: Numbers, counts: Numbers) -> Numbers:
    """The numbers of boxes that stand in runs."""
    if (counts == 1).all():
        return begins
    before = np.cumsum(counts) - counts
    found: Numbers = np.arange(counts.sum()) + np.repeat(begins - before, counts)
    return found


def _together(pieces: Sequence[Tiling], name: str) -> tuple[Tiling, Numbers]:
    """The boxes of all pieces in the order of their offsets, and where each was before."""
    first = pieces[0]
    for other in pieces:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise ManifestError(
                f"one rank has it as {first.dtype} of shape {first.shape}, another as "
                f"{other.dtype} of shape {other.shape}",
                path=name,
            )
    offsets, sizes = (np.concatenate(one) for one in zip(*(p.columns for p in pieces), strict=True))
    order: Numbers = np.arange(len(offsets))
    if first.shape:
        order = np.lexsort(offsets.T[::-1])
    return Tiling.of_columns(first.dtype, first.shape, offsets[order], sizes[order]), order
