"""A small state as one run of bytes: its manifest, then its chunks."""

from __future__ import annotations

import torch

from torchrelay.errors import ManifestError
from torchrelay.landing.seam import land
from torchrelay.plan.snapshot import capture
from torchrelay.record.codec import decode, encode

_LENGTH_BYTES = 8


def pack(state: object) -> bytes:
    """`UnsupportedLeafError` names what cannot travel."""
    snapshot = capture(state)
    manifest = encode(snapshot.manifest)
    out = bytearray(len(manifest).to_bytes(_LENGTH_BYTES, "little") + manifest)
    for index, nbytes in enumerate(snapshot.chunks.sizes):
        chunk = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        snapshot.read(index, chunk)
        out += chunk.numpy().tobytes()
    return bytes(out)


def unpack(data: bytes) -> object:
    """The state, in new tensors on the host; `ManifestError` for bytes that hold none."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    body = data[_LENGTH_BYTES + length :]
    manifest = decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    if len(body) != manifest.stream_bytes:
        raise ManifestError(f"{len(body)} bytes for a state of {manifest.stream_bytes}")
    landing = land(manifest, device=torch.device("cpu"))
    at = 0
    for index, nbytes in enumerate(manifest.chunks):
        landing.write(index, torch.frombuffer(bytearray(body[at : at + nbytes]), dtype=torch.uint8))
        at += nbytes
    return landing.commit().state
