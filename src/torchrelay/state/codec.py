"""Manifests as bytes: MessagePack on the wire, JSON on disk, the same records.

Decoding is total: any byte string gives a manifest whose every number is in range and whose
records agree with each other, or a `ManifestError`; time and memory are bounded by its length.
"""

from __future__ import annotations

import msgspec

from torchrelay.errors import ManifestError
from torchrelay.state.manifest import MAX_ENCODED_BYTES, VERSION, Manifest
from torchrelay.state.pause import gc_paused
from torchrelay.state.validation import check

Buffer = bytes | bytearray | memoryview


class _Version(msgspec.Struct, array_like=True):
    """The first field of every manifest of every version."""

    version: tuple[int, int]


class _Step(_Version):
    step: int | None


_step = msgspec.msgpack.Decoder(_Step)
_manifest = msgspec.msgpack.Decoder(Manifest)
_version = msgspec.msgpack.Decoder(_Version)
_json_manifest = msgspec.json.Decoder(Manifest)
_json_version = msgspec.json.Decoder(_Version)


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def encode_json(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def decode(data: Buffer) -> Manifest:
    """The manifest in MessagePack `data`, validated whole, or `ManifestError`."""
    with gc_paused():
        return _decode(data, _manifest, _version)


def decode_json(data: Buffer) -> Manifest:
    """The manifest in JSON `data`, validated whole, or `ManifestError`."""
    with gc_paused():
        return _decode(data, _json_manifest, _json_version)


def step_of(data: Buffer) -> int | None:
    """The step of an encoded manifest, by itself; None also where it cannot be read."""
    try:
        return _step.decode(data).step
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _decode(
    data: Buffer,
    decoder: msgspec.msgpack.Decoder[Manifest] | msgspec.json.Decoder[Manifest],
    version_decoder: msgspec.msgpack.Decoder[_Version] | msgspec.json.Decoder[_Version],
) -> Manifest:
    if len(data) > MAX_ENCODED_BYTES:
        raise ManifestError(f"manifest of {len(data)} bytes, the cap is {MAX_ENCODED_BYTES}")
    try:
        major, minor = version_decoder.decode(data).version
        if major != VERSION[0]:
            raise ManifestError(
                f"manifest of version {major}.{minor}, this library reads {VERSION[0]}.x: "
                "use the same major version of torchrelay on both sides"
            )
        manifest = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        raise ManifestError(f"not a manifest: {fault}") from None
    check(manifest)
    return manifest
