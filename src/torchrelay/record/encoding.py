"""Records as bytes: MessagePack between processes, JSON at rest. One schema, and one validator.

In MessagePack a column is bytes. In JSON it is a list of numbers that people can read, or base64
of those bytes where it is long. At rest, in `manifest.json`, a record is one JSON object of two
fields: `record`, and `digest`, the XXH3-128 of the bytes of that field in the file.

Decoding is total: any byte string gives a record that is valid, or a `ManifestError`; time and
memory are bounded by its length.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from torchrelay.errors import FormatError, ManifestError
from torchrelay.record.checks.images import Mode
from torchrelay.record.checks.record import check
from torchrelay.record.manifest import MAX_ENCODED_BYTES, MAX_RECORD_BYTES
from torchrelay.record.numbers import pack_column, unpack_column
from torchrelay.record.pause import gc_paused
from torchrelay.record.schema import VERSION, Record

READABLE = 1 << 15  # numbers of a column that is a list at rest
# Raised by a decoder for bytes that are not a record.
_FAULTS = (msgspec.MsgspecError, RecursionError, ValueError, TypeError, OverflowError)


class _Head(msgspec.Struct):
    """What records of all versions have."""

    version: tuple[int, int]


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    record: msgspec.Raw
    digest: str


class ColumnHooks(NamedTuple):
    """How msgspec's encoders and decoders treat columns."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]


def _as_list(column: Any) -> Any:
    return column.tolist() if len(column) <= READABLE else pack_column(column)


def _column(kind: Any, data: Any) -> Any:
    """A column of what a decoder found in its place."""
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except binascii.Error as fault:
            raise ValueError(f"a column that is not base64: {fault}") from None
    if isinstance(data, bytes):
        return unpack_column(data)
    if not isinstance(data, list) or not {int}.issuperset(map(type, data)):
        raise ValueError("a column that is neither bytes nor numbers")
    column = np.array(data, np.int64)
    if len(column) and int(column.min()) < 0:
        raise ValueError(f"{int(column.min())} in a column of numbers from 0 on")
    return column


COLUMNS = ColumnHooks(pack_column, _column)  # in MessagePack
_wire_encoder = msgspec.msgpack.Encoder(enc_hook=COLUMNS.encode)
_wire_decoder = msgspec.msgpack.Decoder(Record, dec_hook=COLUMNS.decode)
_wire_head = msgspec.msgpack.Decoder(_Head)
_rest_encoder = msgspec.json.Encoder(enc_hook=_as_list)
_rest_decoder = msgspec.json.Decoder(Record, dec_hook=_column)
_rest_head = msgspec.json.Decoder(_Head)
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
    if len(data) > MAX_ENCODED_BYTES:
        raise ManifestError(f"a record of {len(data)} bytes, the cap is {MAX_ENCODED_BYTES}")
    with gc_paused():
        try:
            record = _wire_decoder.decode(data)
        except _FAULTS as fault:
            _check_version(_version_in(_wire_head, data))
            raise ManifestError(f"not a record: {fault}") from None
        _check_version(record.version)
        check(record, mode, in_time)
    return record


def encode_at_rest(record: Record) -> bytes:
    body = _rest_encoder.encode(record)
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), xxhash.xxh3_128_hexdigest(body)))


def content_digest(record: Record) -> str:
    """A digest of what a step holds, whenever and by whichever program it was saved."""
    bare = msgspec.structs.replace(record, origin=None)
    return xxhash.xxh3_128_hexdigest(_rest_encoder.encode(bare))


def decode_at_rest(data: bytes, mode: Mode = "whole") -> Record:
    """The record in `data`, its digest and every number in it checked, or `ManifestError`;
    `FormatError` for one of a version that this library does not read."""
    if len(data) > MAX_RECORD_BYTES:
        raise ManifestError(f"a record of {len(data)} bytes, the cap is {MAX_RECORD_BYTES}")
    with gc_paused():
        try:
            body = _unsealed(data)
            version = _rest_head.decode(body).version
            if version[0] != VERSION[0]:
                raise _unknown(version)
            try:
                record = _rest_decoder.decode(body)
                check(record, mode)
            except (ManifestError, *_FAULTS):
                if version > VERSION:  # it has its digest, so it may have kinds that are new
                    raise _unknown(version) from None
                raise
        except _FAULTS as fault:
            raise ManifestError(f"not a record: {fault}") from None
    return record


def _unsealed(data: bytes) -> bytes:
    sealed = _sealed.decode(data)
    body = bytes(sealed.record)
    # Byte for byte: nothing but the two fields, and those in one spelling.
    if data != msgspec.json.encode(sealed):
        raise ManifestError("not a record: bytes that were not written by torchrelay")
    if sealed.digest != xxhash.xxh3_128_hexdigest(body):
        raise ManifestError("the record does not have the digest it was written with")
    return body


def _unknown(version: tuple[int, int]) -> FormatError:
    return FormatError(
        f"a checkpoint of format {version[0]}.{version[1]}, this version reads format "
        f"{VERSION[0]}: read it with the torchrelay that wrote it"
    )


def _version_in(decoder: Any, data: Any) -> tuple[int, int]:
    """The version of what may be the record of another one; ours where it cannot be read."""
    try:
        version: tuple[int, int] = decoder.decode(data).version
    except _FAULTS:
        return VERSION
    return version


def _check_version(version: tuple[int, int]) -> None:
    major, minor = version
    if major != VERSION[0]:
        raise ManifestError(
            f"a record of version {major}.{minor}, this library reads {VERSION[0]}.x: "
            "use the same major version of torchrelay on both sides"
        )
    if minor < 0:
        raise ManifestError(f"a record of version {major}.{minor}")
