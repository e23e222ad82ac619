"""A manifest in columns, as bytes: what a live transfer sends.

The same manifest as in `codec`'s records, at a fraction of the time on both sides where there are
many tensors. Numbers are little-endian; a column that is left out (empty) has the value said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import msgspec
import numpy as np

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m
from torchrelay.record.columns import (
    Kind,
    Leaves,
    Numbers,
    Storages,
    Table,
    others_of,
    sizes_of,
    table_of,
)
from torchrelay.record.numbers import pack, unpack

FORM: Literal["columns"] = "columns"  # stands where a manifest in records has its tree

_NUMBER, _LONG, _SIGNED = "<u4", "<u8", "<i4"


class _Compact(msgspec.Struct, array_like=True, frozen=True):
    version: tuple[int, int]
    step: int | None
    form: Literal["columns"]
    tree: msgspec.Raw
    others: tuple[m.Leaf, ...]  # leaves that stand in no row, in order
    rows: bytes  # leaves that are tensors, in order; empty: all, or none
    kinds: tuple[Kind, ...]
    numbers: bytes  # of each tensor, its kind; empty: the first
    storages: bytes  # of each tensor, -1 where it has none
    offsets: bytes  # of each tensor; empty: 0
    sizes: bytes  # of each storage
    devices: tuple[str, ...]
    on: bytes  # of each storage, its device; empty: the first
    chunks: tuple[int, ...]


_compact = msgspec.msgpack.Decoder(_Compact)
_tree = msgspec.msgpack.Decoder(m.Node)
_encode = msgspec.msgpack.Encoder().encode


class KnownTree(NamedTuple):
    """A tree that is at hand: its encoding, and the number of its leaves."""

    encoded: bytes
    tree: m.Node
    leaves: int


def encode(manifest: m.Manifest, tree: bytes | None = None) -> bytes:
    """`tree`: that of the manifest, encoded, where it is known."""
    table, others = table_of(manifest.leaves), others_of(manifest.leaves)
    devices, on = _devices(manifest.storages)
    return _encode(
        _Compact(
            manifest.version,
            manifest.step,
            FORM,
            msgspec.Raw(_encode(manifest.tree) if tree is None else tree),
            tuple([others[index] for index in sorted(others)]),
            pack(table.rows, _NUMBER) if others else b"",
            tuple(table.kinds),
            pack(table.numbers, _NUMBER) if len(table.kinds) > 1 else b"",
            pack(table.storages, _SIGNED),
            pack(table.offsets, _LONG) if table.offsets.any() else b"",
            pack(sizes_of(manifest.storages), _LONG),
            devices,
            b"" if on is None else pack(on, _NUMBER),
            manifest.chunks,
        )
    )


def decode(
    data: bytes | bytearray | memoryview, known: KnownTree | None
) -> tuple[m.Manifest, bool]:
    """The manifest, not validated, and whether its tree is the known one. `ManifestError` for
    columns that do not go together; msgspec's errors for what is nothing like it."""
    found = _compact.decode(data)
    if len(found.storages) // 4 + len(found.others) > m.MAX_LEAVES:
        raise ManifestError(f"more leaves than the cap of {m.MAX_LEAVES}")
    storages = unpack(found.storages, _SIGNED)
    count = len(storages)
    leaves = count + len(found.others)
    rows = np.arange(count) if not found.others else unpack(found.rows, _NUMBER, count)
    if found.others and count:
        if (rows[1:] <= rows[:-1]).any() or rows[-1] >= leaves:
            raise ManifestError("tensors out of order or of range")
    elif found.rows:
        raise ManifestError("rows of tensors that are known")
    numbers = unpack(found.numbers, _NUMBER, count) if found.numbers else np.zeros(count, np.int64)
    if count and int(numbers.max()) >= len(found.kinds):
        raise ManifestError("a tensor of no kind")
    offsets = unpack(found.offsets, _LONG, count) if found.offsets else np.zeros(count, np.int64)
    sizes = unpack(found.sizes, _LONG)
    on = unpack(found.on, _NUMBER, len(sizes)) if found.on else None
    if len(sizes) and (0 if on is None else int(on.max())) >= len(found.devices):
        raise ManifestError("a storage on no device")
    table = Table(rows, found.kinds, numbers, storages, offsets)
    others = np.setdiff1d(np.arange(leaves), rows).tolist() if found.others else []
    same = known is not None and known.leaves == leaves and known.encoded == bytes(found.tree)
    manifest = manifest_of(
        found.step,
        known.tree if known is not None and same else _tree.decode(found.tree),
        Leaves(table, dict(zip(others, found.others, strict=True))),
        Storages(sizes, found.devices, on),
        found.chunks,
        found.version,
    )
    return manifest, same


def manifest_of(
    step: int | None,
    tree: m.Node,
    leaves: Leaves,
    storages: Storages,
    chunks: tuple[int, ...],
    version: tuple[int, int] = m.VERSION,
) -> m.Manifest:
    """A manifest whose leaves and storages are in columns: those stand in for the tuples."""
    records = cast("tuple[m.Leaf, ...]", leaves), cast("tuple[m.Storage, ...]", storages)
    return m.Manifest(version, step, tree, *records, chunks)


def _devices(storages: Sequence[m.Storage]) -> tuple[tuple[str, ...], Numbers | None]:
    if isinstance(storages, Storages):
        return tuple(storages.devices), storages.numbers
    names = list(dict.fromkeys(storage.device for storage in storages))
    if len(names) < 2:
        return tuple(names), None
    return tuple(names), np.array([names.index(storage.device) for storage in storages], np.int64)
