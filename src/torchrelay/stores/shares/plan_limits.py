"""What another rank's plan may be, before a planner of torch's works on it.

Such a planner hashes offsets and compares the boxes of a tensor one with another. Those of a rank
that is damaged or hostile could be chosen so that this takes hours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import TypeVar

import msgspec

from torchrelay.errors import CheckpointError, ManifestError
from torchrelay.geometry.boxes import Box, Comparisons
from torchrelay.record.manifest import MAX_STREAM_BYTES
from torchrelay.stores.shares.plans import Item

MAX_PAIRS = 1 << 18  # boxes of one tensor, each with each, of all tensors of a rank

Word = TypeVar("Word")


def read(decoder: msgspec.msgpack.Decoder[Word], data: bytes, rank: int) -> Word:
    """What a rank said."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        raise CheckpointError(
            f"what rank {rank} said of its share of the step cannot be read: {fault}. Look "
            "whether all ranks run the same version of torchrelay",
            rank=rank,
            phase="plan",
        ) from None


def check_items(items: Sequence[Item], rank: int) -> None:
    """Raise `CheckpointError` unless these are boxes inside of tensors, none over another."""
    try:
        for item in items:
            _check_item(item)
        names = [item.name for item in items]
        if len(set(names)) < len(names):
            _check_apart(items)
    except ManifestError as fault:
        raise CheckpointError(
            f"the plan of rank {rank} is not one: {fault.message}",
            rank=rank,
            phase="plan",
            path=fault.path,
        ) from None


def _check_item(item: Item) -> None:
    if item.box is None:
        if item.offset is not None:
            raise ManifestError("an object with an offset", path=item.name[:80])
        return
    offsets, sizes = item.box
    shape = item.shape
    # So few places there are in a tensor of this size that not many can have one hash.
    if prod(shape) > MAX_STREAM_BYTES or (0 in shape and max(shape) > MAX_STREAM_BYTES):
        raise ManifestError(f"a tensor of shape {shape[:8]}", path=item.name[:80])
    if item.offset not in (None, offsets) or not len(offsets) == len(sizes) == len(shape):
        raise ManifestError("a box of other dimensions than its tensor", path=item.name[:80])
    if sizes != shape or any(offsets):
        for offset, size, length in zip(offsets, sizes, shape, strict=True):
            if offset + size > length:
                raise ManifestError("a box that reaches out of its tensor", path=item.name[:80])


def _check_apart(items: Sequence[Item]) -> None:
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    for item in items:
        if item.box is not None:
            boxes[item.name].append(item.box)
    comparisons, pairs = Comparisons(), 0
    for name, several in boxes.items():
        pairs += len(several) * (len(several) - 1) // 2
        if pairs > MAX_PAIRS:
            raise ManifestError(f"{len(several)} boxes of one tensor", path=name[:80])
        if len(several) > 1 and comparisons.overlap(several):
            raise ManifestError("boxes of one tensor that overlap", path=name[:80])
