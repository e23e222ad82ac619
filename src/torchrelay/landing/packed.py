"""A small state as one run of bytes: its record, then its chunks."""

from __future__ import annotations

import torch

from torchrelay.describing.snapshot import capture
from torchrelay.errors import ManifestError
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.record.encoding import decode

_LENGTH_BYTES = 8


def pack(state: object) -> bytes:
    """`UnsupportedLeafError` names what cannot travel."""
    snapshot = capture(state)
    record = snapshot.encoded()
    stream = torch.empty(snapshot.chunks.stream_bytes, dtype=torch.uint8, device="cpu")
    snapshot.stream.read(0, len(stream), stream)
    return len(record).to_bytes(_LENGTH_BYTES, "little") + record + stream.numpy().tobytes()


def unpack(data: bytes) -> object:
    """The state, in new tensors on the host; `ManifestError` for bytes that hold none."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    body = data[_LENGTH_BYTES + length :]
    record = decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    landing = land(record, options=LandingOptions(device=torch.device("cpu")))
    if len(body) != landing.chunks.stream_bytes:
        raise ManifestError(f"{len(body)} bytes for a state of {landing.chunks.stream_bytes}")
    if body:
        stream = landing.target().stream
        stream.write(0, len(body), torch.frombuffer(bytearray(body), dtype=torch.uint8))
    return landing.commit().state
