"""What a live rank has of a state: the outline and the boxes of its tensors, as one record.

It is the record of a rank's share of a checkpoint, before anything is written: several of them
make up the commit record of a step that lies in the memory of live ranks.
"""

from __future__ import annotations

from math import prod

import msgspec

from torchrelay.errors import ManifestError
from torchrelay.record.checkpoint import Outline
from torchrelay.record.manifest import MAX_DIMS, MAX_STREAM_BYTES
from torchrelay.record.pause import gc_paused
from torchrelay.record.validation import check_step


class RankBox(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A box of a named tensor that a rank has; `shape` is that of the whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of a state. `plain` has what tells its plain tensors from those of the same
    name on another rank, by name; distributed ones are the same everywhere."""

    step: int | None
    outline: Outline
    boxes: tuple[RankBox, ...]
    plain: dict[str, bytes]


_record = msgspec.msgpack.Decoder(RankRecord)


def encode(record: RankRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes) -> RankRecord:
    """The record of another rank. Its outline is checked where it is put together with others."""
    with gc_paused():
        try:
            record = _record.decode(data)
        except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
            raise ManifestError(f"not a rank's record: {fault}") from None
    check_step(record.step)
    for box in record.boxes:
        check_box(box)
    return record


def check_box(box: RankBox) -> None:
    if not len(box.shape) == len(box.offsets) == len(box.sizes) <= MAX_DIMS:
        raise ManifestError(f"a box of other dimensions than its tensor {box.name[:80]!r}")
    for offset, size, whole in zip(box.offsets, box.sizes, box.shape, strict=True):
        if offset < 0 or size < 1 or whole >= 1 << 62 or offset + size > whole:
            raise ManifestError(f"a box reaches out of its tensor {box.name[:80]!r}")
    # Boxes are looked up by their offsets: of so few places not many can have one hash.
    if prod(box.shape) > MAX_STREAM_BYTES:
        raise ManifestError(f"a tensor of shape {box.shape[:8]}: {box.name[:80]!r}")
