"""Device memory of another process of this machine, by CUDA's inter-process handles.

A handle opens a whole allocation of the driver, which holds many tensors. So allocations, not
tensors, are exported and opened, and both ends keep what they have: opening one takes half a
millisecond. The driver never uses the id of an allocation twice, so memory that was freed and
allocated again is not mistaken for the old.

The sender's memory is only read, and only while its `send` lasts. An opening is closed when its
process ends, or when no transfer uses it and the sender's newest state does not either.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta

from torchrelay.geometry.runs import Runs, moves
from torchrelay.memory.gpu.kernels import CudaError, brief_driver, check, device_at, driver
from torchrelay.transports.resources import Resource
from torchrelay.transports.routes.host import location
from torchrelay.transports.wire.messages import Name, Serial

HANDLE_BYTES = 64
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1
MAX_KEPT = 4096  # allocations that are remembered
_OFFSET_BITS = 44  # bits: no allocation is that large
MAX_EXPORTS = 1 << (64 - _OFFSET_BITS)
Sources = dict[int, Runs]  # memory, by the device that it is on


class Export(msgspec.Struct, array_like=True, frozen=True):
    """An allocation of device memory that another process can open."""

    id: Serial  # never used again by the process
    device: Name
    handle: Annotated[bytes, Meta(max_length=HANDLE_BYTES)]


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


@cache
def _attribute_of() -> Any:
    """The driver's function for facts about an address."""
    ask = brief_driver().cuPointerGetAttribute
    ask.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return ask


def _id_at(address: int) -> int:
    """The id of the allocation at an address. Hundreds are asked for before each transfer."""
    number = ctypes.c_uint64()
    if code := _attribute_of()(ctypes.byref(number), _BUFFER_ID, address):
        check(code, "tell allocations apart")
    return number.value


def _range_at(address: int) -> tuple[int, int]:
    """Where the allocation at an address begins, and its bytes."""
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    ask = driver().cuMemGetAddressRange_v2
    code = ask(ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address))
    check(code, "say where the allocation begins")
    return base.value, nbytes.value


class _Allocation(NamedTuple):
    """An allocation of this process."""

    base: int
    nbytes: int
    export: Export


def export_of(address: int) -> Export:
    """The allocation of this process at an address; `CudaError` where it cannot be shared."""
    return _export(address, _id_at(address)).export


class Exported(NamedTuple):
    """What device memory a state lies in, for another process to open: `device` is `pack`ed."""

    exports: tuple[Export, ...]
    device: bytes


class Exports(Resource):
    """The sender's end: allocations that were exported. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[int, _Allocation] = {}  # by id
        self._lock = threading.Lock()

    def of(self, memory: Runs) -> Exported:
        """The memory of contiguous tensors, by its positions in the stream.

        `CudaError` if it cannot be shared. Allocations are asked for their ids each time.
        """
        order = np.argsort(memory.addresses)
        lows = memory.addresses[order].tolist()
        highs = (memory.addresses + (memory.stops - memory.starts))[order].tolist()
        found: list[_Allocation] = []
        end = 0  # all memory below it is in those found
        with self._lock:
            while (run := bisect_right(highs, end)) < len(highs):
                one = self._at(max(lows[run], end))
                found.append(one)
                end = one.base + one.nbytes
        return Exported(tuple([one.export for one in found]), pack(memory, found))

    def _at(self, address: int) -> _Allocation:
        """The allocation at an address, exported once."""
        number = _id_at(address)
        if number not in self._known:
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            self._known[number] = _export(address, number)
        return self._known[number]

    def close(self) -> None:
        """The driver keeps nothing for an export."""


def pack(memory: Runs, allocations: list[_Allocation]) -> bytes:
    """Which bytes of the stream lie where in which allocation, as `Runs.pack`: an address is the
    index of an export and, in the lowest `_OFFSET_BITS` bits, an offset."""
    order = np.argsort(memory.addresses)
    sizes = (memory.stops - memory.starts)[order]
    ours = Runs(memory.addresses[order], memory.starts[order], sizes)  # by address
    numbers = np.arange(len(allocations), dtype=np.uint64) << np.uint64(_OFFSET_BITS)
    theirs = Runs([one.base for one in allocations], numbers, [one.nbytes for one in allocations])
    _, positions, there, nbytes = moves(ours, theirs)
    return Runs(positions, there, nbytes).pack()


def _export(address: int, number: int) -> _Allocation:
    device, handle = device_at(address), _Handle()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        base, nbytes = _range_at(address)
        code = driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base))
        check(
            code, "export this memory: expandable_segments, or another allocator than torch's own"
        )
    return _Allocation(base, nbytes, Export(number, location.device_id(device), bytes(handle)))


class Opening(NamedTuple):
    """An allocation of another process, open here."""

    pointer: int
    device: int
    nbytes: int


_Key = tuple[bytes, int]  # the sender's process, and the export's id


class Openings(Resource):
    """The receiver's end: allocations of senders that are open here. Threads may share it."""

    def __init__(self) -> None:
        self._open: dict[_Key, Opening] = {}
        self._readers: Counter[_Key] = Counter()  # transfers that read from each
        self._newest: dict[bytes, list[_Key]] = {}  # by process, of its newest state
        self._lock = threading.Lock()

    @contextmanager
    def borrowed(self, sender: bytes, memory: Exported, stream_bytes: int) -> Iterator[Sources]:
        """Within: the sender's memory is open here. `CudaError` if that fails."""
        keys = [(sender, export.id) for export in memory.exports]
        if len(set(keys)) < len(keys):
            raise CudaError("an allocation that is exported twice")
        with self._lock:
            for key, export in zip(keys, memory.exports, strict=True):
                if key not in self._open:
                    self._open[key] = open_export(export)
            self._readers.update(keys)
            if self._newest.get(sender) != keys:
                self._newest[sender] = keys
                self._close_unused()
            opened = [self._open[key] for key in keys]
        try:
            yield sources(memory.device, opened, stream_bytes)
        finally:
            with self._lock:
                self._readers.subtract(keys)
                if self._newest.get(sender) != keys:
                    self._close_unused()

    def _close_unused(self) -> None:
        """Close what no transfer reads and no sender's newest state lies in: this process must not
        keep memory that the sender has freed."""
        newest = {key for keys in self._newest.values() for key in keys}
        for key in [key for key in self._open if not self._readers[key] and key not in newest]:
            close_opening(self._open.pop(key))
            del self._readers[key]

    def forget(self, process: bytes) -> None:
        with self._lock:
            self._newest.pop(process, None)
            self._close_unused()

    def close(self) -> None:
        with self._lock:
            self._newest.clear()
            self._close_unused()


def close_opening(opened: Opening) -> None:
    """Nothing of it is read any more."""
    with torch.cuda.device(opened.device):
        torch.cuda.synchronize()
        driver().cuIpcCloseMemHandle(ctypes.c_uint64(opened.pointer))


def open_export(export: Export) -> Opening:
    """Open an allocation; `CudaError` where that fails."""
    ids = [location.device_id(index) for index in range(torch.cuda.device_count())]
    if export.device not in ids:
        raise CudaError("the sender's GPU is not visible to this process")
    if len(export.handle) != HANDLE_BYTES:
        raise CudaError("a handle of another kind")
    index, pointer = ids.index(export.device), ctypes.c_uint64()
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        handle = _Handle.from_buffer_copy(export.handle)
        code = driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS)
        check(code, "open the sender's memory")
        _, nbytes = _range_at(pointer.value)
    return Opening(pointer.value, index, nbytes)


def sources(device: bytes, opened: list[Opening], stream_bytes: int) -> Sources:
    """What `pack` made, in memory that is open here."""
    try:
        packed = Runs.unpack(device, stream_bytes)
    except ValueError as fault:
        raise CudaError(str(fault)) from None
    nbytes = packed.stops - packed.starts
    index = (packed.addresses >> np.uint64(_OFFSET_BITS)).astype(np.int64)
    offsets = packed.addresses & np.uint64((1 << _OFFSET_BITS) - 1)
    if (index >= len(opened)).any() or (nbytes < 1).any():
        raise CudaError("memory of no export, or of no size")
    numbers = np.fromiter(chain.from_iterable(opened), np.uint64, 3 * len(opened))
    pointers, devices, sizes = numbers.reshape(-1, 3).T
    if (offsets + nbytes > sizes[index]).any():
        raise CudaError("memory outside of an export")
    addresses, on = pointers[index] + offsets, devices[index]
    return {
        int(n): Runs(packed.starts[on == n], addresses[on == n], nbytes[on == n])
        for n in np.unique(on)
    }
