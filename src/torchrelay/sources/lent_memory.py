"""Memory that a server lends to readers on its host: requested, mapped and read. No torch.

A lease is of host memory, or of memory of a GPU (`sources.device_source`).

The connection over which the descriptors came stays open while a step is read. Meanwhile the memory
is not written to, whatever is published: everything that is read belongs to one step.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Annotated, TypeVar

import msgspec

from torchrelay.machine import machine
from torchrelay.memory.pages import MappedRange
from torchrelay.memory.sealed import keeps_size
from torchrelay.processes.frames import receive_frame, send_frame
from torchrelay.stores.step_files import DataReader
from torchrelay.system import read_full

ASK_SECONDS = 5.0
MAX_SLOTS = 250  # descriptors that fit into one message
LEASE_BYTES = 64 << 20  # of a frame: a step may have many volumes
_PIECE_BYTES = 1 << 18  # copied at once: they stay in the processor's cache
_LONG = 64 << 10  # bytes from which a memcpy of its own is faster than the kernel's copy of many

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class LeaseRequest(msgspec.Struct, array_like=True, tag="host"):
    snapshot: str
    reader: str


class DeviceLeaseRequest(msgspec.Struct, array_like=True, tag="device"):
    """For memory of a GPU that has a step: the one with this id, else the one with this number,
    else the newest. With `newer_than`, the answer waits that many milliseconds for a higher one."""

    snapshot: str = ""
    step: int | None = None
    newer_than: int | None = None
    wait_ms: int = 0


class LeasedSlot(msgspec.Struct, array_like=True):
    """A piece of memory: its size, and start and size of each volume in it."""

    nbytes: Count
    volumes: dict[str, tuple[Count, Count]]


class MemoryLease(msgspec.Struct, array_like=True):
    """The answer, followed by a descriptor for each slot. `why`: the reason why nothing is lent."""

    slots: Annotated[list[LeasedSlot], msgspec.Meta(max_length=MAX_SLOTS)]
    why: str = ""


class DeviceExport(msgspec.Struct, array_like=True, frozen=True):
    """An allocation of GPU memory that other processes can open: which GPU it is on, as all
    processes of the machine call it, CUDA's handle, and its size."""

    id: Count
    device: Annotated[str, msgspec.Meta(max_length=200)]
    handle: Annotated[bytes, msgspec.Meta(max_length=64)]
    nbytes: Count


class DeviceLease(msgspec.Struct, array_like=True):
    """The answer: a step, its record where the server lists it, and start and size of the volumes
    in the memory of a GPU. `ranks`: the servers of all volumes, and `places` the index in it for
    each volume of the record. `state`: a digest that steps with the same state share. `layout`: a
    digest of the record but for its step and the digests of chunks. `why`: the reason why nothing
    is lent."""

    step: int = -1
    snapshot: str = ""
    record: bytes = b""
    ranks: list[str] = []
    places: list[int] = []
    volumes: dict[str, tuple[Count, Count]] = {}
    export: DeviceExport | None = None
    state: str = ""
    layout: str = ""
    why: str = ""


Lease = TypeVar("Lease", MemoryLease, DeviceLease)


class LocalFacts(msgspec.Struct):
    """`/local.json`: the machine that a server runs on, and the name of its Unix socket there."""

    machine: str
    socket: str


_lease = msgspec.msgpack.Decoder(MemoryLease)


def borrow(
    facts: LocalFacts,
    request: LeaseRequest | DeviceLeaseRequest,
    decoder: msgspec.msgpack.Decoder[Lease],
    resources: ExitStack,
    seconds: float = ASK_SECONDS,
) -> tuple[socket.socket, Lease]:
    """Ask a server of this machine for memory, which it lends until the connection in `resources`
    is closed. `OSError` where it lends none."""
    if not facts.socket:
        raise OSError("the server lends no memory")
    if facts.machine != machine() or not facts.machine:
        raise OSError("the server is on another machine")
    connection = resources.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    connection.settimeout(seconds)
    connection.connect(f"\0{facts.socket}")
    with suppress(BrokenPipeError):  # it may refuse, and say why, before it is asked
        send_frame(connection, msgspec.msgpack.encode(request))
    try:
        lease = decoder.decode(receive_frame(connection, LEASE_BYTES))
    except (EOFError, msgspec.MsgspecError) as fault:
        raise OSError(f"the server's Unix socket answers otherwise: {fault}") from None
    if lease.why:
        raise OSError(lease.why)
    return connection, lease


class LentMemory:
    """The volumes of a step in memory of this host, by `readers`, until `close`."""

    def __init__(self, facts: LocalFacts, snapshot: str, reader: str) -> None:
        with ExitStack() as resources:
            connection, lease = borrow(facts, LeaseRequest(snapshot, reader), _lease, resources)
            _, fds, _, _ = socket.recv_fds(connection, 1, MAX_SLOTS)
            for fd in fds:
                resources.callback(os.close, fd)
            if len(fds) != len(lease.slots):
                raise OSError("the server sent too few descriptors")
            self.readers = dict(_volumes(fds, lease.slots))
            self.close = resources.pop_all().close


def _volumes(fds: list[int], slots: list[LeasedSlot]) -> Iterator[tuple[str, MappedReader]]:
    """The volumes by name. The memory is as large as the lease says, and stays so."""
    for fd, slot in zip(fds, slots, strict=True):
        if not keeps_size(fd) or os.fstat(fd).st_size < slot.nbytes:
            raise OSError("the descriptor is not of sealed memory of that size")
        for name, (start, nbytes) in slot.volumes.items():
            if start + nbytes > slot.nbytes:
                raise OSError("a volume reaches out of the memory")
            yield name, MappedReader(fd, start, nbytes)


class MappedReader(DataReader):
    """A volume in a file of memory. Copies let other threads run."""

    def __init__(self, fd: int, start: int, nbytes: int) -> None:
        self._fd, self._start, self.nbytes = fd, start, nbytes
        self._lock = threading.Lock()
        self._range: MappedRange | None = None

    @property
    def _mapped(self) -> MappedRange:
        with self._lock:
            if self._range is None:
                self._range = MappedRange(self._fd, self._start, self.nbytes)
            return self._range

    def memory(self, position: int, nbytes: int) -> memoryview | None:
        return self._mapped.view(position, nbytes)

    def read_into(self, position: int, view: memoryview) -> None:
        if len(view) >= _LONG:
            self._mapped.copy_to(position, [view])
        elif not read_full(self._fd, view, self._start + position):
            raise EOFError(f"the memory ends before byte {position + len(view)}")

    def pieces(self, position: int, buffers: Sequence[memoryview]) -> Iterator[memoryview]:
        """Fill buffers one after the other, a piece at a time: yields what was copied."""
        for view in buffers:
            for low in range(0, len(view), _PIECE_BYTES):
                piece = view[low : low + _PIECE_BYTES]
                self.read_into(position, piece)
                position += len(piece)
                yield piece
