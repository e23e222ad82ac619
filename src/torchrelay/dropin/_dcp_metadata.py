"""The `.metadata` of a stock DCP checkpoint, a pickle, read without running what it names.

The records below are made of inert values, with every name, number and box checked.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from torchrelay.dropin._pickles import unpickler as p
from torchrelay.errors import ManifestError, RelayError, UnsupportedLeafError
from torchrelay.geometry.boxes import Comparisons
from torchrelay.planning.stored import Shard, StoredTensor
from torchrelay.state.tensors import NAMES

_DCP = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_OLD = "torch.distributed._shard.sharded_tensor.metadata."  # where torch before 2.3 had them
_PROPERTIES = (_DCP + "TensorProperties", _OLD + "TensorProperties")

# Every name the pickle may hold.
_NAMES = frozenset(
    [
        *(_DCP + n for n in ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "StorageMeta")),
        *(_DCP + n for n in ("TensorStorageMetadata", "BytesStorageMetadata")),
        _DCP + "_MEM_FORMAT_ENCODING",
        _OLD + "MEM_FORMAT_ENCODING",
        *_PROPERTIES,
        _STORAGE_INFO,
        # The checkpoint's own path, which is left unread.
        *(f"{m}.{n}" for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")),
    ]
)


class StockPiece(NamedTuple):
    """A byte range of one file that holds one `torch.save` archive."""

    file: str
    offset: int
    length: int


class StockMetadata(NamedTuple):
    """Tensors and the pieces that hold other objects, by name; the pieces that hold boxes of
    tensors, which their shards count; and the path of each item in the nested state, where the
    checkpoint has it. The boxes of a tensor tile it: no hole, no overlap."""

    items: dict[str, StoredTensor | StockPiece]
    pieces: list[StockPiece]
    paths: dict[str, tuple[str | int, ...]]


def decode(data: bytes) -> StockMetadata:
    """The records in `data`, checked whole.

    `ManifestError` for anything else; `UnsupportedLeafError` where an item went through one of
    torch's stream transforms, which only code from outside could undo.
    """
    try:
        return _metadata(p.unpickled(data, _NAMES), len(data))
    except p.PickleRefusedError as fault:
        raise ManifestError(f"a stock DCP .metadata was refused: {fault}") from fault
    except RelayError:
        raise
    except Exception as fault:  # every way in which hostile bytes can fail has this one meaning
        raise ManifestError(f"a stock DCP .metadata is malformed: {fault!r:.200}") from fault


def _metadata(value: object, length: int) -> StockMetadata:
    f = p.fields(value, _DCP + "Metadata")
    stored = _stored(p.typed(f.get("storage_data"), p.PickledDict))
    items: dict[str, StoredTensor | StockPiece] = {}
    pieces: list[StockPiece] = []
    # A list that a short pickle shares among its records could make for endless work; a chunk of
    # its own takes more bytes than this.
    room = length // 16
    comparisons = Comparisons()
    for fqn, record in p.typed(f["state_dict_metadata"], p.PickledDict).items():
        name = p.typed(fqn, str)
        if type(record) is p.PickledCall and record.name == _DCP + "BytesStorageMetadata":
            items[name] = _found(stored, name, None)
        else:
            g = p.fields(record, _DCP + "TensorStorageMetadata")
            room -= len(p.typed(g["chunks"], list))
            if room < 0:
                p.refuse("it has more chunks than its bytes can tell")
            items[name] = _tensor(name, g, stored, pieces, comparisons)
    return StockMetadata(items, pieces, _paths(f.get("planner_data"), length))


# By name, and by offset as text, which has a secret hash.
_Stored = dict[tuple[str, str], StockPiece]


def _stored(data: dict[Any, Any]) -> _Stored:
    found: _Stored = {}
    for key, value in data.items():
        f = p.fields(key, _DCP + "MetadataIndex")
        fqn, offset = p.typed(f["fqn"], str), f.get("offset")
        index = (fqn, str(None if offset is None else tuple(p.typed(offset, torch.Size))))
        if index in found:
            p.refuse(f"{fqn!r:.200} is stored twice")
        g = p.fields(value, _STORAGE_INFO)
        if transforms := g.get("transform_descriptors"):
            raise UnsupportedLeafError(
                f"a stock DCP item was written through stream transforms{_texts(transforms)}, "
                "which are not undone here",
                path=fqn,
            )
        file = p.typed(g["relative_path"], str)
        if file in ("", ".", "..") or any(c in "/\\\0" for c in file) or not file.isprintable():
            p.refuse(f"{file!r:.200} is not the name of a file in the checkpoint's directory")
        found[index] = StockPiece(file, p.count(g["offset"]), p.count(g["length"]))
    # Ranges that overlap would let a small file stand for a state of any size.
    ordered = sorted(found.values(), key=lambda piece: (piece.file, piece.offset, piece.length))
    for one, other in itertools.pairwise(ordered):
        if one.file == other.file and one.offset + one.length > other.offset:
            p.refuse(f"two items of {one.file!r} overlap at byte {other.offset}")
    return found


def _texts(values: object) -> str:
    """The texts in a list, in brackets. Other values may be vast in writing: parts are shared."""
    if type(values) is not list:
        return ""
    return f" ({', '.join([f'{one:.100}' for one in values[:8] if type(one) is str])})"


def _found(stored: _Stored, fqn: str, offset: tuple[int, ...] | None) -> StockPiece:
    piece = stored.get((fqn, str(offset)))
    if piece is None:
        where = "" if offset is None else f" at {offset!r:.200}"
        p.refuse(f"nothing is stored for {fqn!r:.200}{where}")
    return piece


def _tensor(
    fqn: str,
    f: dict[str, Any],
    stored: _Stored,
    pieces: list[StockPiece],
    comparisons: Comparisons,
) -> StoredTensor:
    # The memory format and the rest are torch's deprecated fields, which its reader ignores too.
    kind, layout, *_ = p.typed(p.named(f["properties"], *_PROPERTIES).state, tuple)
    if layout != "torch.strided":
        raise UnsupportedLeafError("a stock DCP tensor is not strided", path=fqn)
    shape = tuple(p.typed(f["size"], torch.Size))
    if math.prod(shape) * p.typed(kind, torch.dtype).itemsize >= p.MAX_NUMBER:
        p.refuse(f"{fqn!r:.200} has a malformed shape")
    shards = []
    for box in f["chunks"]:
        g = p.fields(box, _DCP + "ChunkStorageMetadata")
        offsets, sizes = (tuple(p.typed(g[n], torch.Size)) for n in ("offsets", "sizes"))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            p.refuse(f"a chunk of {fqn!r:.200} has another number of dimensions")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            p.refuse(f"a chunk of {fqn!r:.200} reaches past it")
        piece = _found(stored, fqn, offsets)
        if math.prod(sizes) * kind.itemsize > piece.length:
            p.refuse(f"a chunk of {fqn!r:.200} is larger than the {piece.length} bytes it is in")
        shards.append(Shard(offsets, sizes, len(pieces), 0))
        pieces.append(piece)
    # Boxes inside a tensor tile it when none overlap and their volumes add up to its own.
    boxes = [(one.offsets, one.sizes) for one in shards if 0 not in one.sizes]
    if comparisons.overlap(boxes):
        p.refuse(f"two chunks of {fqn!r:.200} overlap")
    covered, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if covered != whole:
        p.refuse(f"the chunks of {fqn!r:.200} hold {covered} of its {whole} values")
    return StoredTensor(fqn, NAMES[kind], shape, shards)


def _paths(value: object, room: int) -> dict[str, tuple[str | int, ...]]:
    if value is None:
        return {}
    found: dict[str, tuple[str | int, ...]] = {}
    for fqn, path in p.typed(value, p.PickledDict).items():
        steps = p.typed(path, tuple)
        room -= len(steps)
        if room < 0 or not 0 < len(steps) <= p.MAX_DEPTH or type(steps[0]) is not str:
            p.refuse("a path into the state is malformed")
        found[p.typed(fqn, str)] = tuple([s if type(s) is str else p.count(s) for s in steps])
    return found
