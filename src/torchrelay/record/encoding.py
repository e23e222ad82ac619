"""Records as bytes: MessagePack between processes, JSON at rest. One schema, and one validator.

In MessagePack a column is bytes. In JSON it is a list of numbers that people can read, or base64
of those bytes where it is long. At rest, in `manifest.json`, a record is one JSON object of two
fields: `record`, and `digest`, the XXH3-128 of the bytes of that field in the file.

Decoding is total: any byte string gives a record that is valid, or a `ManifestError`; time and
memory are bounded by its length.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from torchrelay.errors import FormatError, ManifestError
from torchrelay.pause import gc_paused
from torchrelay.record.checks.images import Mode
from torchrelay.record.checks.record import check
from torchrelay.record.manifest import MAX_ENCODED_BYTES, MAX_RECORD_BYTES, Size
from torchrelay.record.schema import VERSION, Record, pack_column, unpack_column

READABLE = 1 << 15  # numbers of a column that is a list at rest
# Raised by a decoder for bytes that are not a record.
FAULTS = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)


class _Head(msgspec.Struct):
    """The field that records of all versions have."""

    version: tuple[Size, Size]


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    record: msgspec.Raw
    digest: str


def _as_list(column: Any) -> Any:
    return column.tolist() if len(column) <= READABLE else pack_column(column)


def read_column(kind: Any, data: Any) -> Any:
    """A column of what a decoder found in its place."""
    if isinstance(data, str):
        data = base64.b64decode(data, validate=True)
    if isinstance(data, bytes):
        return unpack_column(data)
    return np.array(msgspec.convert(data, list[Size]), np.int64)


class _Form(NamedTuple):
    """How records are read from one kind of bytes, and how another version of them is refused."""

    record: Any
    head: Any
    unknown: type[ManifestError]
    text: str


_wire_encoder = msgspec.msgpack.Encoder(enc_hook=pack_column)
_wire = _Form(
    msgspec.msgpack.Decoder(Record, dec_hook=read_column),
    msgspec.msgpack.Decoder(_Head),
    ManifestError,
    "a record of version {}.{}, this library reads {}.x: use the same version of torchrelay on "
    "both sides",
)
_rest_encoder = msgspec.json.Encoder(enc_hook=_as_list)
_rest = _Form(
    msgspec.json.Decoder(Record, dec_hook=read_column),
    msgspec.json.Decoder(_Head),
    FormatError,
    "a checkpoint of format {}.{}, this version reads format {}: read it with the torchrelay that "
    "wrote it",
)
_sealed = msgspec.json.Decoder(_Sealed)


def encode(record: Record) -> bytes:
    return _wire_encoder.encode(record)


def decode(
    data: bytes | bytearray | memoryview,
    mode: Mode = "stream",
    in_time: Callable[[], None] | None = None,
) -> Record:
    """The record in MessagePack `data`, checked whole, or `ManifestError`.

    `in_time` is called now and then, and raises when the caller's time is over.
    """
    _check_length(len(data), MAX_ENCODED_BYTES)
    return _decoded(_wire, data, mode, in_time)


def encode_at_rest(record: Record) -> bytes:
    body = _rest_encoder.encode(record)
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), xxhash.xxh3_128_hexdigest(body)))


def content_digest(record: Record) -> str:
    """A digest of what a step holds, whenever and by whichever program it was saved."""
    bare = msgspec.structs.replace(record, origin=None)
    return xxhash.xxh3_128_hexdigest(_rest_encoder.encode(bare))


def state_digest(record: Record) -> str:
    """The same for the state alone: two steps with the same state have the same one."""
    return content_digest(msgspec.structs.replace(record, step=None))


def decode_at_rest(data: bytes, mode: Mode = "whole") -> Record:
    """The record in `data`, its digest and every number in it checked, or `ManifestError`;
    `FormatError` for one of a version that this library does not read."""
    _check_length(len(data), MAX_RECORD_BYTES)
    try:
        sealed = _sealed.decode(data)
        again = msgspec.json.encode(sealed)
    except FAULTS as fault:
        raise ManifestError(f"not a record: {fault}") from None
    # Byte for byte: nothing but the two fields, and those in one spelling.
    if data != again:
        raise ManifestError("not a record: bytes that were not written by torchrelay")
    body = bytes(sealed.record)
    if sealed.digest != xxhash.xxh3_128_hexdigest(body):
        raise ManifestError("the record does not have the digest it was written with")
    return _decoded(_rest, body, mode)


def _check_length(length: int, cap: int) -> None:
    if length > cap:
        raise ManifestError(f"a record of {length} bytes, the cap is {cap}")


def _decoded(
    form: _Form, data: Any, mode: Mode, in_time: Callable[[], None] | None = None
) -> Record:
    with gc_paused():
        try:
            record: Record = form.record.decode(data)
            if record.version[0] != VERSION[0]:
                raise ManifestError("another version")
            check(record, mode, in_time)
        except (ManifestError, *FAULTS) as fault:
            version = VERSION
            with suppress(*FAULTS):
                version = form.head.decode(data).version
            # A later version may have fields and kinds that are new.
            if version[0] != VERSION[0] or version > VERSION:
                raise form.unknown(form.text.format(*version, VERSION[0])) from None
            if isinstance(fault, ManifestError):
                raise
            raise ManifestError(f"not a record: {fault}") from None
    return record
