"""Reads the `.metadata` of a stock DCP checkpoint, and runs nothing that it names.

The file is a pickle. `Machine` reads it into inert objects; from these come the records below, with
every name, number and box checked. No torch class is made: what a reader needs is less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchrelay.dropin._pickles.fields import MAX_NUMBER, count, fields, made, size, typed
from torchrelay.dropin._pickles.machine import Machine, Name, PickledCall, refuse
from torchrelay.errors import ManifestError, RelayError, RemoteProtocolError, UnsupportedLeafError
from torchrelay.geometry.boxes import Comparisons

MAX_METADATA = 1 << 30
_MAX_DEPTH = 200

_DCP = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_OLD = "torch.distributed._shard.sharded_tensor.metadata."  # where torch before 2.3 had them
_PROPERTIES = (_DCP + "TensorProperties", _OLD + "TensorProperties")
_LAYOUT = "torch.serialization._get_layout"
_DTYPES = {f"torch.{n}": d for n, d in vars(torch).items() if isinstance(d, torch.dtype)}

# Every name the pickle may hold. The strings are only compared; nothing is looked up by them.
_NAMES = frozenset(
    [
        *(_DCP + n for n in ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "StorageMeta")),
        *(_DCP + n for n in ("TensorStorageMetadata", "BytesStorageMetadata")),
        _DCP + "_MEM_FORMAT_ENCODING",
        _OLD + "MEM_FORMAT_ENCODING",
        *_PROPERTIES,
        _STORAGE_INFO,
        _LAYOUT,
        "torch.Size",
        # The checkpoint's own path, which is left unread.
        *(f"{m}.{n}" for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")),
        *_DTYPES,
    ]
)


@dataclass(frozen=True)
class StockPiece:
    """A byte range of one file that holds one `torch.save` archive."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its values are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    piece: StockPiece


@dataclass(frozen=True)
class StockTensor:
    """A tensor whose chunks tile it: no hole, no overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class StockBytes:
    """An object that is no tensor."""

    piece: StockPiece


@dataclass(frozen=True)
class StockMetadata:
    """`items` by name, and the path of each in the nested state where the checkpoint tells it."""

    items: dict[str, StockTensor | StockBytes]
    paths: dict[str, tuple[str | int, ...]]


def decode(data: bytes) -> StockMetadata:
    """The records in `data`, checked whole.

    `ManifestError` for anything else; `UnsupportedLeafError` where an item went through one of
    torch's stream transforms, which only code from outside could undo.
    """
    try:
        return _metadata(_Machine(data, _NAMES).run(), len(data))
    except RemoteProtocolError as fault:
        # The machine words its refusals for a peer; the reason stands behind the colon.
        why = fault.message.partition(": ")[2]
        raise ManifestError(f"a stock DCP .metadata was refused: {why}") from fault
    except RelayError:
        raise
    except Exception as fault:  # every way in which hostile bytes can fail has this one meaning
        raise ManifestError(f"a stock DCP .metadata is malformed: {fault!r:.200}") from fault


class _Machine(Machine):
    """The machine, for a pickle in which some dicts have records as keys."""

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        # A `PickledCall` hashes by identity: no key can make hashing slow or run anything.
        if type(target) is not dict or not all(
            type(key) in (str, PickledCall) for key in items[::2]
        ):
            refuse("a dict has keys that are neither text nor records")
        target.update(zip(items[::2], items[1::2], strict=True))


def _metadata(value: object, length: int) -> StockMetadata:
    f = fields(value, _DCP + "Metadata")
    pieces = _pieces(typed(f.get("storage_data"), dict))
    items: dict[str, StockTensor | StockBytes] = {}
    # A list that a short pickle shares among its records could make for endless work; a chunk of
    # its own takes more bytes than this.
    room = length // 16
    comparisons = Comparisons()
    for fqn, record in typed(f["state_dict_metadata"], dict).items():
        name = typed(fqn, str)
        if type(record) is PickledCall and record.name == _DCP + "BytesStorageMetadata":
            items[name] = StockBytes(_found(pieces, name, None))
        else:
            g = fields(record, _DCP + "TensorStorageMetadata")
            room -= len(typed(g["chunks"], list))
            if room < 0:
                refuse("it has more chunks than its bytes can tell")
            items[name] = _tensor(name, g, pieces, comparisons)
    return StockMetadata(items, _paths(f.get("planner_data"), length))


_Pieces = dict[
    tuple[str, str], StockPiece
]  # by name, and by offset as text, which has a secret hash


def _pieces(stored: dict[Any, Any]) -> _Pieces:
    found: _Pieces = {}
    for key, value in stored.items():
        f = fields(key, _DCP + "MetadataIndex")
        fqn, offset = typed(f["fqn"], str), f.get("offset")
        index = (fqn, str(None if offset is None else tuple(size(offset))))
        if index in found:
            refuse(f"{fqn!r:.200} is stored twice")
        g = fields(value, _STORAGE_INFO)
        if g.get("transform_descriptors"):
            raise UnsupportedLeafError(
                "a stock DCP item was written through stream transforms "
                f"({g['transform_descriptors']!r:.100}), which are not undone here",
                path=fqn,
            )
        file = _plain_name(typed(g["relative_path"], str))
        found[index] = StockPiece(file, count(g["offset"]), count(g["length"]))
    # Ranges that overlap would let a small file stand for a state of any size.
    ordered = sorted(found.values(), key=lambda p: (p.file, p.offset, p.length))
    for one, other in itertools.pairwise(ordered):
        if one.file == other.file and one.offset + one.length > other.offset:
            refuse(f"two items of {one.file!r} overlap at byte {other.offset}")
    return found


def _found(pieces: _Pieces, fqn: str, offset: tuple[int, ...] | None) -> StockPiece:
    piece = pieces.get((fqn, str(offset)))
    if piece is None:
        where = "" if offset is None else f" at {offset!r:.200}"
        refuse(f"nothing is stored for {fqn!r:.200}{where}")
    return piece


def _plain_name(name: str) -> str:
    if name in ("", ".", "..") or any(c in "/\\\0" for c in name) or not name.isprintable():
        refuse(f"{name!r:.200} is not the name of a file in the checkpoint's directory")
    return name


def _tensor(fqn: str, f: dict[str, Any], pieces: _Pieces, comparisons: Comparisons) -> StockTensor:
    shape, dtype = tuple(size(f["size"])), _dtype(fqn, f["properties"])
    if math.prod(shape) * dtype.itemsize >= MAX_NUMBER:
        refuse(f"{fqn!r:.200} has a malformed shape")
    chunks = []
    for box in f["chunks"]:
        g = fields(box, _DCP + "ChunkStorageMetadata")
        offsets, sizes = tuple(size(g["offsets"])), tuple(size(g["sizes"]))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            refuse(f"a chunk of {fqn!r:.200} has another number of dimensions")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            refuse(f"a chunk of {fqn!r:.200} reaches past it")
        piece = _found(pieces, fqn, offsets)
        if math.prod(sizes) * dtype.itemsize > piece.length:
            refuse(f"a chunk of {fqn!r:.200} is larger than the {piece.length} bytes it is in")
        chunks.append(Chunk(offsets, sizes, piece))
    _check_tiling(fqn, shape, chunks, comparisons)
    return StockTensor(dtype, shape, tuple(chunks))


def _check_tiling(
    fqn: str, shape: Sequence[int], chunks: list[Chunk], comparisons: Comparisons
) -> None:
    """Boxes inside a tensor tile it when none overlap and their volumes add up to its own."""
    boxes = [(c.offsets, c.sizes) for c in chunks if 0 not in c.sizes]
    if comparisons.overlap(boxes):
        refuse(f"two chunks of {fqn!r:.200} overlap")
    held, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if held != whole:
        refuse(f"the chunks of {fqn!r:.200} hold {held} of its {whole} values")


def _paths(value: object, room: int) -> dict[str, tuple[str | int, ...]]:
    if value is None:
        return {}
    found: dict[str, tuple[str | int, ...]] = {}
    for fqn, path in typed(value, dict).items():
        steps = typed(path, tuple)
        room -= len(steps)
        if room < 0 or not 0 < len(steps) <= _MAX_DEPTH or type(steps[0]) is not str:
            refuse("a path into the state is malformed")
        found[typed(fqn, str)] = tuple(s if type(s) is str else count(s) for s in steps)
    return found


def _dtype(fqn: str, value: object) -> torch.dtype:
    if type(value) is not PickledCall or value.name not in _PROPERTIES or value.args:
        refuse("TensorProperties was expected")
    # The memory format and the rest are torch's deprecated fields, which its reader ignores too.
    dtype, layout, *_ = typed(value.state, tuple)
    if made(layout, _LAYOUT) != ("torch.strided",):
        raise UnsupportedLeafError("a stock DCP tensor is not strided", path=fqn)
    return _DTYPES[typed(dtype, Name).name]
