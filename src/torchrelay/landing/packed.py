"""A small state as one run of bytes: its record, then its chunks."""

from __future__ import annotations

import torch

from torchrelay.errors import ManifestError
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.seam import land
from torchrelay.plan.snapshot import capture
from torchrelay.record.encoding import decode

_LENGTH_BYTES = 8


def pack(state: object) -> bytes:
    """`UnsupportedLeafError` names what cannot travel."""
    snapshot = capture(state)
    record = snapshot.encoded()
    out = bytearray(len(record).to_bytes(_LENGTH_BYTES, "little") + record)
    for index, nbytes in enumerate(snapshot.chunks.sizes):
        chunk = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        snapshot.read(index, chunk)
        out += chunk.numpy().tobytes()
    return bytes(out)


def unpack(data: bytes) -> object:
    """The state, in new tensors on the host; `ManifestError` for bytes that hold none."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    body = data[_LENGTH_BYTES + length :]
    record = decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    landing = land(record, options=LandingOptions(device=torch.device("cpu")))
    if len(body) != landing.chunks.stream_bytes:
        raise ManifestError(f"{len(body)} bytes for a state of {landing.chunks.stream_bytes}")
    for index, (at, nbytes) in enumerate(
        zip(landing.chunks.offsets, landing.chunks.sizes, strict=True)
    ):
        landing.write(index, torch.frombuffer(bytearray(body[at : at + nbytes]), dtype=torch.uint8))
    return landing.commit().state
