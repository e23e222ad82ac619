"""What a live rank tells of its part of a state.

The part is a record, as a checkpoint has one, of the one rank: its memory is the only volume, laid
out as a file would be, and no digest of it is known yet. Several of them make up the record of a
state that lies in the memory of live ranks.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import msgspec

from torchrelay.errors import ManifestError
from torchrelay.record.checkpoint.commit import decode_part, encode_part
from torchrelay.record.checkpoint.schema import Checkpoint
from torchrelay.record.manifest import MAX_STREAM_BYTES
from torchrelay.record.validation import check_step


class LiveRank(NamedTuple):
    """A rank's part of a state, at this step if at any. `replicas` has what tells its plain tensors
    from those of the same name on another rank, by name; distributed ones are the same everywhere.
    """

    step: int | None
    part: Checkpoint
    replicas: dict[str, bytes]


class _Spoken(msgspec.Struct, array_like=True, frozen=True):
    step: int | None
    part: bytes
    replicas: dict[str, bytes]


_spoken = msgspec.msgpack.Decoder(_Spoken)


def encode(rank: LiveRank) -> bytes:
    return msgspec.msgpack.encode(_Spoken(rank.step, encode_part(rank.part), rank.replicas))


def decode(data: bytes) -> LiveRank:
    """What another rank has told, checked whole, or `ManifestError`."""
    try:
        said = _spoken.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        raise ManifestError(f"not a rank's record: {fault}") from None
    check_step(said.step)
    part = decode_part(said.part)
    if part.world != 1 or part.own or part.blobs:
        raise ManifestError("a record that is not of one live rank")
    for tiling in part.tensors.tilings:
        # Boxes are looked up by their offsets: of so few places not many can have one hash.
        if prod(tiling.shape) > MAX_STREAM_BYTES:
            raise ManifestError(f"a tensor of shape {tiling.shape[:8]}")
    return LiveRank(said.step, part, said.replicas)
