"""The path that each chunk of a state takes on one machine. Pure.

`path_of` decides about one chunk by how many of its bytes lie where at both ends. Three chunks of
100 bytes, where this process can read the sender's host memory and has opened its GPU memory:

    sender has              goes to                path      because
    100 on the host         100 on the host        DIRECT    the kernel copies it, or a thread does
    60 host, 40 on a GPU    60 host, 40 on a GPU   OPENED    the 40 are copied on the GPU; the 60 by
                                                             the kernel, unless a digest is wanted:
                                                             then RINGED, as a digest needs all 100
    100 on the host         60 host, 40 on a GPU   BUFFERED  a copy by address does not reach a GPU
    100 strided             100 on the host        RINGED    they are at no address: the sender
                                                             packs them into a slot of the ring
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

from torchrelay.describing.region import Stream
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Moves, Runs, moves


class ChunkPath(Enum):
    """How the bytes of a chunk get here."""

    DIRECT = auto()  # from the sender's host memory to ours, without a buffer
    OPENED = auto()  # from device memory of the sender that is open here; host memory as DIRECT
    BUFFERED = auto()  # from the sender's host memory to a buffer, and from there to all places
    RINGED = auto()  # through the ring: this process cannot read them where they lie


class ChunkBytes(NamedTuple):
    """Where the bytes of one chunk lie, at the sender and here."""

    on_host: int  # at an address of the sender's host memory
    exported: int  # in device memory of the sender that is open here
    elsewhere: bool  # the sender says that some are at no address of its host
    unexported: bool  # and that some of those are in no exported memory either
    to_device: int  # go to device memory here
    host_to_host: int  # are at such an address at both ends
    device_to_device: int  # are in such device memory at both ends
    device_to_host: int
    hashable: bool  # this process's devices can make its digest


class SenderMemory(NamedTuple):
    """The locations of the sender's bytes, and the parts that this process can read."""

    host: Runs
    elsewhere: Collection[int]  # chunks that have bytes at no address of its host
    reads: bool  # this process can read its host memory
    exported: Runs | None = None  # bytes in device memory that this process can read too
    unexported: Collection[int] = ()  # chunks that have bytes where no export reaches
    hashed: frozenset[int] | None = None  # if device memory is hashed: chunks that can be


def path_of(chunk: ChunkBytes, *, reads: bool, verify: bool, hashes_devices: bool) -> ChunkPath:
    """`reads`: this process can read the sender's host memory. `verify`: host memory is hashed;
    `hashes_devices`: device memory is."""
    if _is_opened(chunk, reads=reads, verify=verify, hashes_devices=hashes_devices):
        return ChunkPath.OPENED
    if chunk.elsewhere or not reads:
        return ChunkPath.RINGED
    # A digest is of the whole chunk, also of bytes that go nowhere.
    if chunk.to_device or (verify and chunk.host_to_host < chunk.on_host):
        return ChunkPath.BUFFERED
    return ChunkPath.DIRECT


def _is_opened(chunk: ChunkBytes, *, reads: bool, verify: bool, hashes_devices: bool) -> bool:
    """Whether copies on devices bring all that device memory of the sender has of a chunk."""
    if not chunk.elsewhere or chunk.unexported or chunk.device_to_host:
        return False
    if chunk.device_to_device != chunk.to_device:
        return False
    if chunk.host_to_host and (verify or hashes_devices or not reads):
        return False  # bytes on the host have to be read, and may have to be in the digest
    return not hashes_devices or (chunk.hashable and chunk.exported == chunk.to_device)


def choose_paths(
    chunks: Chunks, places: Stream, memory: SenderMemory, *, verify: bool
) -> list[ChunkPath]:
    """The path of each chunk, from the sender's memory to `places`. `verify`: host memory is
    hashed."""
    device = places.device.stretches
    exported = memory.exported if memory.exported is not None else Runs([], [], [])
    columns = (
        _bytes_in(chunks, memory.host),
        _bytes_in(chunks, exported),
        _bytes_in(chunks, device),
        _bytes_in(chunks, moves(memory.host, places.host)),
        _bytes_in(chunks, moves(exported, device)),
        _bytes_in(chunks, moves(exported, places.host)),
    )
    elsewhere, unexported = set(memory.elsewhere), set(memory.unexported)
    hashes_devices, hashable = memory.hashed is not None, memory.hashed or frozenset()
    found = []
    for index, row in enumerate(zip(*columns, strict=True)):
        on_host, opened, to_device, host_to_host, device_to_device, device_to_host = row
        chunk = ChunkBytes(
            on_host=on_host,
            exported=opened,
            elsewhere=index in elsewhere,
            unexported=index in unexported or memory.exported is None,
            to_device=to_device,
            host_to_host=host_to_host,
            device_to_device=device_to_device,
            device_to_host=device_to_host,
            hashable=index in hashable,
        )
        path = path_of(chunk, reads=memory.reads, verify=verify, hashes_devices=hashes_devices)
        found.append(path)
    return found


def _bytes_in(chunks: Chunks, memory: Runs | Moves) -> list[int]:
    """How many bytes of these lie in each chunk."""
    if isinstance(memory, Moves):
        counts = chunks.shares_of(memory.positions, memory.nbytes)
    else:
        counts = chunks.shares_of(memory.starts, memory.stops - memory.starts)
    found: list[int] = counts.tolist()
    return found
