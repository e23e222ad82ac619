"""Records as bytes: JSON at rest, MessagePack between live ranks. One schema, and one validator.

At rest, in `manifest.json`, a record is one JSON object of two fields: `checkpoint`, the record,
and `digest`, the xxh3-128 of the bytes of that field as they stand in the file. Columns of numbers
are bytes: base64 in JSON.
"""

from __future__ import annotations

import msgspec
import xxhash

from torchrelay.errors import FormatError, ManifestError
from torchrelay.record.checkpoint import first_format
from torchrelay.record.checkpoint.consistency import check
from torchrelay.record.checkpoint.schema import FORMAT, Checkpoint
from torchrelay.record.manifest import MAX_RECORD_BYTES
from torchrelay.record.pause import gc_paused


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    checkpoint: msgspec.Raw
    digest: str


class _StepVersion(msgspec.Struct):
    format: tuple[int, int]


_envelope = msgspec.json.Decoder(_Envelope)
_version = msgspec.json.Decoder(_StepVersion)
_checkpoint = msgspec.json.Decoder(Checkpoint)
_part = msgspec.msgpack.Decoder(Checkpoint)
# What a decoder raises for bytes that are no record, and a check for numbers that cannot be.
_FAULTS = (msgspec.MsgspecError, RecursionError, ValueError, OverflowError)


def encode(checkpoint: Checkpoint) -> bytes:
    body = msgspec.json.encode(checkpoint)
    return msgspec.json.encode(_Envelope(msgspec.Raw(body), xxhash.xxh3_128_hexdigest(body)))


def content_digest(checkpoint: Checkpoint) -> str:
    """What a step holds, whenever and by whichever version it was saved, as a digest."""
    bare = msgspec.structs.replace(checkpoint, time="", torch="", torchrelay="")
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))


def decode(data: bytes) -> Checkpoint:
    """The record in `data`, its digest and every number in it checked, or `ManifestError`. One of
    an earlier format is given as if it were of this one; `FormatError` for one that is unknown."""
    if len(data) > MAX_RECORD_BYTES:
        raise ManifestError(f"commit record of {len(data)} bytes, the cap is {MAX_RECORD_BYTES}")
    with gc_paused():
        try:
            return _decode(_body(data))
        except _FAULTS as fault:
            raise ManifestError(f"not a commit record: {fault}") from None


def encode_part(checkpoint: Checkpoint) -> bytes:
    """What a live rank has of a state, as it tells another."""
    return msgspec.msgpack.encode(checkpoint)


def decode_part(data: bytes) -> Checkpoint:
    """The record in `data` of a part of a state, every number checked, or `ManifestError`."""
    with gc_paused():
        try:
            checkpoint = _part.decode(data)
            if checkpoint.format != FORMAT:
                raise ManifestError(f"a record of format {checkpoint.format}, ours is {FORMAT}")
            check(checkpoint, part=True)
        except _FAULTS as fault:
            raise ManifestError(f"not a record: {fault}") from None
    return checkpoint


def _body(data: bytes) -> bytes:
    envelope = _envelope.decode(data)
    body = bytes(envelope.checkpoint)
    # Byte for byte: nothing beside the two fields, and those in one spelling.
    if data != msgspec.json.encode(envelope):
        raise ManifestError("not a commit record: bytes that were not written by torchrelay")
    if envelope.digest != xxhash.xxh3_128_hexdigest(body):
        raise ManifestError("the commit record does not have the digest it was written with")
    return body


def _decode(body: bytes) -> Checkpoint:
    major, minor = _version.decode(body).format
    if major not in (first_format.MAJOR, FORMAT[0]):
        raise _unknown(major, minor)
    try:
        decoder = first_format.decode if major == first_format.MAJOR else _checkpoint.decode
        checkpoint = decoder(body)
        check(checkpoint)
    except (ManifestError, *_FAULTS):
        if (major, minor) > FORMAT:  # it has its digest, so it may have kinds that are new
            raise _unknown(major, minor) from None
        raise
    return checkpoint


def _unknown(major: int, minor: int) -> FormatError:
    return FormatError(
        f"a checkpoint of format {major}.{minor}, this version knows formats up to "
        f"{FORMAT[0]}.{FORMAT[1]}: read it with the torchrelay that wrote it"
    )
