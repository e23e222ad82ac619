"""Records of format 1: a list for each box, and dicts by number. They are read, never written."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from torchrelay.record.checkpoint.schema import Blob, Checkpoint, DataFile, Outline, Own, pairs
from torchrelay.record.checkpoint.stored import StoredTensor, Tensors
from torchrelay.record.keys import check_keys
from torchrelay.record.manifest import Leaf, Node

MAJOR = 1


class _FirstPart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Fields by their order."""


class _FirstOutline(_FirstPart, frozen=True):
    tree: Node
    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]
    strides: dict[int, tuple[int, ...]] = {}


class _FirstOwn(_FirstPart, frozen=True):
    leaves: dict[int, Leaf]
    names: dict[int, str]


class _FirstRecord(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    time: str
    torch: str
    torchrelay: str
    outlines: tuple[_FirstOutline, ...]
    ranks: tuple[int, ...]
    own: dict[int, _FirstOwn] = {}
    tensors: tuple[StoredTensor, ...]
    files: tuple[DataFile, ...]
    blobs: tuple[Blob, ...] = ()
    save_id: str | None = None


class _OutlineNumbers(_FirstPart, frozen=True):
    tree: msgspec.Raw
    leaves: msgspec.Raw
    names: msgspec.Raw
    strides: dict[str, msgspec.Raw] = {}


class _OwnNumbers(_FirstPart, frozen=True):
    leaves: dict[str, msgspec.Raw]
    names: dict[str, msgspec.Raw]


class _Numbers(msgspec.Struct):
    """The numbers by which parts of a record are keyed, as text, which has a secret hash."""

    outlines: tuple[_OutlineNumbers, ...]
    own: dict[str, _OwnNumbers] = {}


_numbers = msgspec.json.Decoder(_Numbers)
_record = msgspec.json.Decoder(_FirstRecord)


def decode(body: bytes) -> Checkpoint:
    """The record as one of today's format, not validated."""
    _check_numbers(body)
    found = _record.decode(body)
    return Checkpoint(
        step=found.step,
        time=found.time,
        torch=found.torch,
        torchrelay=found.torchrelay,
        outlines=tuple(
            Outline(one.tree, one.leaves, one.names, pairs(one.strides)) for one in found.outlines
        ),
        ranks=found.ranks,
        own=tuple(
            Own(rank, pairs(own.leaves), pairs(own.names))
            for rank, own in sorted(found.own.items(), key=lambda item: item[0])
        ),
        tensors=Tensors.of(found.tensors),
        files=found.files,
        blobs=found.blobs,
        save_id=found.save_id,
    )


def _check_numbers(body: bytes) -> None:
    """The decoder puts what is keyed by numbers into dicts: those have to be dicts that work."""
    found = _numbers.decode(body)
    tables: list[Mapping[str, object]] = [
        *(outline.strides for outline in found.outlines),
        found.own,
        *(table for own in found.own.values() for table in (own.leaves, own.names)),
    ]
    for table in tables:
        check_keys(tuple(map(int, table)))
