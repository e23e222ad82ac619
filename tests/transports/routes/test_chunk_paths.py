"""The path of each chunk on one machine. Pure: addresses are numbers here."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.describing.region import Stream
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Runs
from torchrelay.transports.routes.host.chunk_paths import (
    ChunkBytes,
    ChunkPath,
    SenderMemory,
    choose_paths,
    path_of,
)

NOTHING = ChunkBytes(0, 0, False, True, 0, 0, 0, 0, False)
ON_HOST = NOTHING._replace(on_host=100, host_to_host=100)
STRIDED = NOTHING._replace(elsewhere=True)
ON_GPU = ChunkBytes(0, 100, True, False, 100, 0, 100, 0, True)
MIXED = ON_GPU._replace(on_host=60, host_to_host=60, exported=40, to_device=40, device_to_device=40)
READS = {"reads": True, "verify": False, "hashes_devices": False}


@pytest.mark.parametrize(
    ("chunk", "changed", "path"),
    [
        (ON_HOST, {}, ChunkPath.DIRECT),
        (ON_HOST, {"verify": True}, ChunkPath.DIRECT),
        (ON_HOST, {"reads": False}, ChunkPath.RINGED),
        # Some of it goes nowhere: its digest needs a buffer.
        (ON_HOST._replace(host_to_host=60), {}, ChunkPath.DIRECT),
        (ON_HOST._replace(host_to_host=60), {"verify": True}, ChunkPath.BUFFERED),
        (ON_HOST._replace(host_to_host=60, to_device=40), {}, ChunkPath.BUFFERED),
        (STRIDED, {}, ChunkPath.RINGED),
        (STRIDED._replace(on_host=60, host_to_host=60), {}, ChunkPath.RINGED),
        (ON_GPU, {}, ChunkPath.OPENED),
        (ON_GPU, {"hashes_devices": True}, ChunkPath.OPENED),
        (ON_GPU, {"reads": False, "verify": True, "hashes_devices": True}, ChunkPath.OPENED),
        (ON_GPU._replace(hashable=False), {"hashes_devices": True}, ChunkPath.RINGED),
        (ON_GPU._replace(exported=110), {"hashes_devices": True}, ChunkPath.RINGED),
        (ON_GPU._replace(unexported=True), {}, ChunkPath.RINGED),
        (ON_GPU._replace(to_device=110), {}, ChunkPath.RINGED),  # from the host, too
        (ON_GPU._replace(device_to_host=8), {}, ChunkPath.RINGED),
        (MIXED, {}, ChunkPath.OPENED),
        (MIXED, {"verify": True}, ChunkPath.RINGED),
        (MIXED, {"hashes_devices": True}, ChunkPath.RINGED),
        (MIXED, {"reads": False}, ChunkPath.RINGED),
        (NOTHING, {}, ChunkPath.DIRECT),  # nothing to read
    ],
)
def test_the_path_of_one_chunk(
    chunk: ChunkBytes, changed: dict[str, bool], path: ChunkPath
) -> None:
    assert path_of(chunk, **{**READS, **changed}) is path


class Places(Stream):
    """A destination, by addresses alone."""

    def __init__(self, host: Runs, device: Runs) -> None:
        self._found = {"host": host, "device": device}

    host: Any = property(lambda self: self._found["host"])
    device: Any = property(lambda self: self._found["device"])


def test_four_tensors_take_four_paths() -> None:
    """A host tensor, one for a GPU, one of a GPU, and one that is strided at the sender."""
    chunks = Chunks([64] * 4, [64] * 4)
    sender = SenderMemory(
        host=Runs.of([(0, 1000, 64), (64, 2000, 64)]),
        elsewhere=[2, 3],
        reads=True,
        exported=Runs.of([(128, 5000, 64)]),
        unexported=[3],
    )
    places = Places(
        Runs.of([(0, 7000, 64), (192, 8000, 64)]), Runs.of([(64, 9000, 64), (128, 9500, 64)])
    )
    found = choose_paths(chunks, places, sender, verify=False)
    assert found == [ChunkPath.DIRECT, ChunkPath.BUFFERED, ChunkPath.OPENED, ChunkPath.RINGED]
    closed = sender._replace(exported=None)
    found = choose_paths(chunks, places, closed, verify=False)
    assert found == [ChunkPath.DIRECT, ChunkPath.BUFFERED, ChunkPath.RINGED, ChunkPath.RINGED]
    found = choose_paths(chunks, places, closed._replace(reads=False), verify=False)
    assert found == [ChunkPath.RINGED] * 4
    hashed = sender._replace(hashed=frozenset())  # no digest of memory that is not aligned
    assert choose_paths(chunks, places, hashed, verify=False)[2] is ChunkPath.RINGED
