"""Device memory of another process of this machine, by CUDA's inter-process handles.

A handle opens a whole allocation of the driver, which holds many tensors: allocations, not tensors,
are exported and opened, and both ends remember them. The id that the driver gives to an allocation
is never given again, so memory that was freed and allocated anew is not taken for the old.

The sender's memory is only read, and only while its `send` lasts. What a receiver has opened ends
with its process; the driver keeps nothing for a dead one.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta

from torchrelay.geometry.runs import Runs, moves
from torchrelay.memory.gpu.kernels import CudaError, brief_driver, device_at, driver
from torchrelay.record.manifest import MAX_STREAM_BYTES
from torchrelay.transports.protocol import wire
from torchrelay.transports.resources import Kept
from torchrelay.transports.routes.nearby import place
from torchrelay.transports.routes.nearby.device_digests import Copier, Grid, Sources

HANDLE_BYTES = 64
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1
MAX_KEPT = 4096  # allocations that are remembered
_APART = 48  # bits: no allocation is that large


class IpcError(Exception):
    """Device memory that cannot be shared; the message says why."""


class Export(msgspec.Struct, array_like=True, frozen=True):
    """An allocation of device memory that another process can open."""

    id: wire.Serial  # never given again by the process
    device: wire.Name
    handle: Annotated[bytes, Meta(max_length=HANDLE_BYTES)]


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


@cache
def _driver() -> Any:
    try:
        library = driver()
        pointer = ctypes.c_uint64
        library.cuPointerGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, pointer)
        library.cuMemGetAddressRange_v2.argtypes = (ctypes.c_void_p, ctypes.c_void_p, pointer)
        library.cuIpcGetMemHandle.argtypes = (ctypes.c_void_p, pointer)
        library.cuIpcCloseMemHandle.argtypes = (pointer,)
        library.cuIpcOpenMemHandle_v2.argtypes = (
            ctypes.POINTER(ctypes.c_uint64),
            _Handle,
            ctypes.c_uint,
        )
        return library
    except (CudaError, AttributeError) as fault:
        raise IpcError(str(fault)) from None


def _check(code: int, what: str) -> None:
    if code:
        raise IpcError(f"CUDA cannot {what} (error {code})")


def _attribute(address: int, which: int) -> int:
    number = ctypes.c_ulonglong()
    code = _driver().cuPointerGetAttribute(ctypes.addressof(number), which, address)
    _check(code, "tell allocations apart")
    return number.value


class _Allocation(NamedTuple):
    base: int
    nbytes: int
    export: Export


class Exported(NamedTuple):
    """What device memory a state lies in, for another process to open: `device` is `pack`ed."""

    exports: tuple[Export, ...]
    device: bytes


class Exports(Kept):
    """The sender's end: allocations that were exported, by address."""

    def __init__(self) -> None:
        self._known: dict[int, _Allocation] = {}  # by their first address
        self._last: tuple[Runs, _Ids, Exported] | None = None
        self.taken = False  # whether a receiver has opened any
        self.grid = Grid()

    def of(self, memory: Runs) -> Exported:
        """The memory of contiguous tensors, by its positions in the stream.

        `IpcError` if it cannot be shared. Allocations are asked for their ids each time.
        """
        last = self._last
        if last is not None and last[0] is memory and last[1].hold():
            return last[2]
        found = self._allocations(memory)
        exported = Exported(tuple(one.export for one in found), pack(memory, found))
        self._last = memory, _Ids(found), exported
        return exported

    def _allocations(self, memory: Runs) -> list[_Allocation]:
        """Those that hold the memory, in order of address."""
        order = np.argsort(memory.addresses)
        lows = memory.addresses[order]
        highs = lows + (memory.stops - memory.starts)[order]
        found: list[_Allocation] = []
        bases = sorted(self._known)
        reach = 0  # all memory below it is in those found
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
            at = max(low, reach)
            while at < high:
                found.append(self._allocation(at, bases))
                at = reach = found[-1].base + found[-1].nbytes
        return found

    def _allocation(self, address: int, bases: list[int]) -> _Allocation:
        number = _attribute(address, _BUFFER_ID)
        place_ = bisect_right(bases, address) - 1
        known = self._known.get(bases[place_]) if place_ >= 0 else None
        if known is None or known.export.id != number:
            known = _export(address, number)
            if len(self._known) >= MAX_KEPT:
                self._known.clear()
            self._known[known.base] = known
        return known


class _Ids:
    """The ids of allocations, to be asked for again as fast as that goes: what a call of the driver
    takes is made beforehand."""

    def __init__(self, allocations: list[_Allocation]) -> None:
        self._ids = [one.export.id for one in allocations]
        self._found = (ctypes.c_ulonglong * len(allocations))()
        first, size = ctypes.addressof(self._found), ctypes.sizeof(ctypes.c_ulonglong)
        into = [ctypes.c_void_p(first + n * size) for n in range(len(allocations))]
        which = [ctypes.c_int(_BUFFER_ID)] * len(allocations)
        bases = [ctypes.c_uint64(one.base) for one in allocations]
        self._asked = (into, which, bases)

    def hold(self) -> bool:
        """Whether the driver still has the allocations under their ids."""
        asked = map(brief_driver().cuPointerGetAttribute, *self._asked)
        return not any(asked) and list(self._found) == self._ids


def pack(memory: Runs, allocations: list[_Allocation]) -> bytes:
    """Which bytes of the stream lie where in which allocation: columns of positions, bytes, indices
    of exports, offsets."""
    order = np.argsort(memory.addresses)
    sizes = (memory.stops - memory.starts)[order]
    ours = Runs(memory.addresses[order], memory.starts[order], sizes)  # by address
    bases = np.array([one.base for one in allocations], np.uint64)
    numbers = np.arange(len(bases), dtype=np.uint64) << np.uint64(_APART)
    theirs = Runs(bases, numbers, [one.nbytes for one in allocations])
    _, positions, there, nbytes = moves(ours, theirs)
    order = np.argsort(positions)
    offsets = there & np.uint64((1 << _APART) - 1)
    columns = (positions, nbytes, there >> np.uint64(_APART), offsets)
    return np.stack([column[order] for column in columns]).astype("<u8").tobytes()


def _export(address: int, number: int) -> _Allocation:
    base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    driver = _driver()
    device = device_at(address)
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        _check(
            driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), address),
            "say where the allocation begins",
        )
        _check(
            driver.cuIpcGetMemHandle(ctypes.byref(handle), base),
            "export this memory: expandable_segments, or another allocator than torch's own",
        )
    raw = ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)
    export = Export(number, place.device_id(device), raw)
    return _Allocation(base.value, nbytes.value, export)


class _Opened(NamedTuple):
    pointer: int
    device: int
    nbytes: int


class Openings(Kept):
    """The receiver's end: allocations of each sender that are open here.

    What a sender's newest state does not use any more is closed, so that memory which the sender
    has freed is not held by this process.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, _Opened]] = {}  # by the sender's rank
        self._last: dict[int, tuple[object, Sources]] = {}
        self._lock = threading.Lock()
        self.copier = Copier()

    def sources(self, sender: int, memory: Exported, stream_bytes: int) -> Sources:
        """The sender's memory, opened; `IpcError` if that fails."""
        wanted = memory, stream_bytes
        last = self._last.get(sender)
        if last is None or last[0] != wanted:
            found = sources(memory.device, self._opened(sender, memory), stream_bytes)
            last = self._last[sender] = wanted, found
        return last[1]

    def _opened(self, sender: int, memory: Exported) -> list[_Opened]:
        with self._lock:
            if len({export.id for export in memory.exports}) < len(memory.exports):
                raise IpcError("an allocation that is exported twice")
            before = self._open.get(sender, {})
            now: dict[int, _Opened] = {}
            try:
                for export in memory.exports:
                    now[export.id] = before.get(export.id) or _open(export)
            except IpcError:
                self._close(now, keep=before)
                raise
            self._close(before, keep=now)
            self._open[sender] = now
            return [now[export.id] for export in memory.exports]

    def close(self) -> None:
        with self._lock:
            self._last.clear()
            self.copier.clear()
            while self._open:
                self._close(self._open.popitem()[1], keep={})

    def _close(self, some: dict[int, _Opened], keep: dict[int, _Opened]) -> None:
        for number, opened in some.items():
            if number not in keep:
                with torch.cuda.device(opened.device):
                    torch.cuda.synchronize()
                    _driver().cuIpcCloseMemHandle(opened.pointer)


def _open(export: Export) -> _Opened:
    ids = [place.device_id(index) for index in range(torch.cuda.device_count())]
    if export.device not in ids:
        raise IpcError("the sender's GPU is not visible to this process")
    if len(export.handle) != HANDLE_BYTES:
        raise IpcError("a handle of another kind")
    index = ids.index(export.device)
    pointer, handle = ctypes.c_uint64(), _Handle()
    ctypes.memmove(ctypes.byref(handle), export.handle, HANDLE_BYTES)
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the device's context this thread's
        _check(
            _driver().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS),
            "open the sender's memory",
        )
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        _check(
            _driver().cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(nbytes), pointer.value
            ),
            "say how large the sender's memory is",
        )
    return _Opened(pointer.value, index, nbytes.value)


def sources(device: bytes, opened: list[_Opened], stream_bytes: int) -> Sources:
    """What `pack` made, in memory that is open here."""
    if len(device) % 32:
        raise IpcError("a torn table of device memory")
    table: Any = np.frombuffer(device, "<u8").reshape(4, -1).astype(np.uint64)
    positions, nbytes, exports, offsets = table
    if (table > MAX_STREAM_BYTES).any() or (nbytes < 1).any():
        raise IpcError("memory of no size, or beyond all bounds")
    ends = positions + nbytes
    if (ends[:-1] > positions[1:]).any() or (ends > stream_bytes).any():
        raise IpcError("memory that is not in the order of the stream")
    if (exports >= len(opened)).any():
        raise IpcError("memory of no export")
    pointers, devices, sizes = (np.array(column, np.uint64) for column in zip(*opened, strict=True))
    index = exports.astype(np.int64)
    if (offsets + nbytes > sizes[index]).any():
        raise IpcError("memory outside of an export")
    addresses, on = pointers[index] + offsets, devices[index]
    return {
        int(n): Runs(positions[on == n], addresses[on == n], nbytes[on == n]) for n in np.unique(on)
    }
