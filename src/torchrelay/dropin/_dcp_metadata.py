"""The `.metadata` of a stock DCP checkpoint, a pickle, read without running what it names.

The records below are made of inert values, with every name, number and box checked.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from torchrelay.dropin._pickles.unpickler import (
    DTYPES,
    MAX_DEPTH,
    MAX_NUMBER,
    PickledCall,
    PickledDict,
    PickleRefusedError,
    count,
    fields,
    properties,
    refuse,
    size,
    typed,
    unpickled,
)
from torchrelay.errors import ManifestError, RelayError, UnsupportedLeafError
from torchrelay.geometry.boxes import Comparisons
from torchrelay.plan.stored import Shard, StoredTensor
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
        "torch.serialization._get_layout",
        "torch.Size",
        # The checkpoint's own path, which is left unread.
        *(f"{m}.{n}" for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")),
        *DTYPES,
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
        return _metadata(unpickled(data, _NAMES), len(data))
    except PickleRefusedError as fault:
        raise ManifestError(f"a stock DCP .metadata was refused: {fault}") from fault
    except RelayError:
        raise
    except Exception as fault:  # every way in which hostile bytes can fail has this one meaning
        raise ManifestError(f"a stock DCP .metadata is malformed: {fault!r:.200}") from fault


def _metadata(value: object, length: int) -> StockMetadata:
    f = fields(value, _DCP + "Metadata")
    stored = _stored(typed(f.get("storage_data"), PickledDict))
    items: dict[str, StoredTensor | StockPiece] = {}
    pieces: list[StockPiece] = []
    # A list that a short pickle shares among its records could make for endless work; a chunk of
    # its own takes more bytes than this.
    room = length // 16
    comparisons = Comparisons()
    for fqn, record in typed(f["state_dict_metadata"], PickledDict).items():
        name = typed(fqn, str)
        if type(record) is PickledCall and record.name == _DCP + "BytesStorageMetadata":
            items[name] = _found(stored, name, None)
        else:
            g = fields(record, _DCP + "TensorStorageMetadata")
            room -= len(typed(g["chunks"], list))
            if room < 0:
                refuse("it has more chunks than its bytes can tell")
            items[name] = _tensor(name, g, stored, pieces, comparisons)
    return StockMetadata(items, pieces, _paths(f.get("planner_data"), length))


# By name, and by offset as text, which has a secret hash.
_Stored = dict[tuple[str, str], StockPiece]


def _stored(data: dict[Any, Any]) -> _Stored:
    found: _Stored = {}
    for key, value in data.items():
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
        file = typed(g["relative_path"], str)
        if file in ("", ".", "..") or any(c in "/\\\0" for c in file) or not file.isprintable():
            refuse(f"{file!r:.200} is not the name of a file in the checkpoint's directory")
        found[index] = StockPiece(file, count(g["offset"]), count(g["length"]))
    # Ranges that overlap would let a small file stand for a state of any size.
    ordered = sorted(found.values(), key=lambda p: (p.file, p.offset, p.length))
    for one, other in itertools.pairwise(ordered):
        if one.file == other.file and one.offset + one.length > other.offset:
            refuse(f"two items of {one.file!r} overlap at byte {other.offset}")
    return found


def _found(stored: _Stored, fqn: str, offset: tuple[int, ...] | None) -> StockPiece:
    piece = stored.get((fqn, str(offset)))
    if piece is None:
        where = "" if offset is None else f" at {offset!r:.200}"
        refuse(f"nothing is stored for {fqn!r:.200}{where}")
    return piece


def _tensor(
    fqn: str,
    f: dict[str, Any],
    stored: _Stored,
    pieces: list[StockPiece],
    comparisons: Comparisons,
) -> StoredTensor:
    # The memory format and the rest are torch's deprecated fields, which its reader ignores too.
    kind, layout = properties(f["properties"], *_PROPERTIES)
    if layout != "torch.strided":
        raise UnsupportedLeafError("a stock DCP tensor is not strided", path=fqn)
    shape = tuple(size(f["size"]))
    if math.prod(shape) * kind.itemsize >= MAX_NUMBER:
        refuse(f"{fqn!r:.200} has a malformed shape")
    shards = []
    for box in f["chunks"]:
        g = fields(box, _DCP + "ChunkStorageMetadata")
        offsets, sizes = tuple(size(g["offsets"])), tuple(size(g["sizes"]))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            refuse(f"a chunk of {fqn!r:.200} has another number of dimensions")
        if any(o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            refuse(f"a chunk of {fqn!r:.200} reaches past it")
        piece = _found(stored, fqn, offsets)
        if math.prod(sizes) * kind.itemsize > piece.length:
            refuse(f"a chunk of {fqn!r:.200} is larger than the {piece.length} bytes it is in")
        shards.append(Shard(offsets, sizes, len(pieces), 0))
        pieces.append(piece)
    # Boxes inside a tensor tile it when none overlap and their volumes add up to its own.
    boxes = [(one.offsets, one.sizes) for one in shards if 0 not in one.sizes]
    if comparisons.overlap(boxes):
        refuse(f"two chunks of {fqn!r:.200} overlap")
    held, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if held != whole:
        refuse(f"the chunks of {fqn!r:.200} hold {held} of its {whole} values")
    return StoredTensor(fqn, NAMES[kind], shape, shards)


def _paths(value: object, room: int) -> dict[str, tuple[str | int, ...]]:
    if value is None:
        return {}
    found: dict[str, tuple[str | int, ...]] = {}
    for fqn, path in typed(value, PickledDict).items():
        steps = typed(path, tuple)
        room -= len(steps)
        if room < 0 or not 0 < len(steps) <= MAX_DEPTH or type(steps[0]) is not str:
            refuse("a path into the state is malformed")
        found[typed(fqn, str)] = tuple(s if type(s) is str else count(s) for s in steps)
    return found
