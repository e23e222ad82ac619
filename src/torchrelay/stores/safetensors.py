"""The header of a safetensors file, for every file that is written or served. No torch.

A file is eight bytes with the length of a JSON header, the header, and the data of the tensors one
after the other. Writers put tensors in descending order of item size, so each is aligned without
holes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from types import MappingProxyType

import msgspec

from torchrelay.planning.stored import StoredTensor, stored_tensors
from torchrelay.record.dtypes import itemsize
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state.paths import empty_tensors

METADATA = "__metadata__"  # the one key of a header that is not a tensor
ALIGN = 8

# Dtypes that safetensors has a name for. Others are stored as bytes, with a last dimension of their
# item size; the commit record has their true dtype.
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "complex64": "C64",
}


def tensors_of(record: Record) -> list[StoredTensor]:
    """The tensors of a step by image, and after them those without elements: they are in no file of
    the step, but in the outline of the state."""
    tensors = stored_tensors(record)
    names = {tensor.name for tensor in tensors}
    outline = LeafRows(record, at_rest=True)
    empty = [
        StoredTensor(one.name, one.dtype, one.shape, ())
        for one in empty_tensors(outline.tree, outline.others)
        if one.name not in names
    ]
    return [*tensors, *empty]


def header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The first bytes of a file whose tensors follow in this order: key, dtype and shape of each.
    Keys are unique."""
    table: dict[str, object] = {METADATA: {"format": "pt", **metadata}}
    end = 0
    for key, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * itemsize(dtype)
        kind = DTYPES.get(dtype)
        if kind is None:
            kind, shape = "U8", (*shape, itemsize(dtype))
        table[key] = {"dtype": kind, "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(table)
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text
