"""Values by which ranks recognise that they have the same tensor, without comparing its bytes.

Different values show different tensors; equal ones make a replica likely: of a large tensor they
are made of samples.
"""

from __future__ import annotations

import torch
import xxhash

from torchrelay.geometry.chunks import ALIGN
from torchrelay.plan.region import Region
from torchrelay.record.digest import digest
from torchrelay.state import tensors as t
from torchrelay.stores.writer.file_writer import host_view

SMALL_BYTES = 64 << 10  # of a tensor that is compared between ranks
SAMPLES = 4


def facts_of(tensor: torch.Tensor) -> bytes:
    """Dtype, shape and layout of a tensor, and the digest of its bytes or of samples of them."""
    layout = [] if tensor.is_contiguous() else list(tensor.stride())
    facts = f"{t.NAMES[tensor.dtype]} {list(tensor.shape)} {layout} ".encode()
    return facts + _fingerprint(Region.row_major(tensor))


def _fingerprint(region: Region) -> bytes:
    if region.nbytes <= SMALL_BYTES:
        if region.address:
            return xxhash.xxh3_128_digest(host_view(region.address, region.nbytes))
        spots = [(0, region.nbytes)]
    else:
        piece = SMALL_BYTES // SAMPLES
        last = (region.nbytes - piece) // ALIGN
        starts = [last * number // (SAMPLES - 1) * ALIGN for number in range(SAMPLES)]
        spots = [(at, at + piece) for at in starts]
    sample = torch.empty(sum(stop - at for at, stop in spots), dtype=torch.uint8, device="cpu")
    done = 0
    for at, stop in spots:
        region.read(at, stop, sample[done:])
        done += stop - at
    return digest(sample)
