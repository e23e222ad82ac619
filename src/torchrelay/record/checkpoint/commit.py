"""Records of steps as bytes.

At rest, in `manifest.json`, a record is one JSON object of two fields: `checkpoint`, the record,
and `digest`, the xxh3-128 of the bytes of that field as they stand in the file. Columns of numbers
are bytes: base64 in JSON.
"""

from __future__ import annotations

import msgspec
import xxhash

from torchrelay.errors import FormatError, ManifestError
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
    """The record in `data`, its digest and every number in it checked, or `ManifestError`;
    `FormatError` for a format that this version does not know."""
    if len(data) > MAX_RECORD_BYTES:
        raise ManifestError(f"commit record of {len(data)} bytes, the cap is {MAX_RECORD_BYTES}")
    with gc_paused():
        try:
            return _decode(_body(data))
        except _FAULTS as fault:
            raise ManifestError(f"not a commit record: {fault}") from None


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
    if major != FORMAT[0]:
        raise _unknown(major, minor)
    try:
        checkpoint = _checkpoint.decode(body)
        check(checkpoint)
    except (ManifestError, *_FAULTS):
        if (major, minor) > FORMAT:  # it has its digest, so it may have kinds that are new
            raise _unknown(major, minor) from None
        raise
    return checkpoint


def _unknown(major: int, minor: int) -> FormatError:
    return FormatError(
        f"a checkpoint of format {major}.{minor}, this version reads format {FORMAT[0]}: read it "
        "with the torchrelay that wrote it"
    )
