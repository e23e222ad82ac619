"""Device memory of another process of this machine, by CUDA's inter-process handles.

A handle opens a whole allocation of the driver, which holds many tensors: allocations, not tensors,
are exported and opened, and both ends remember them. The id that the driver gives to an allocation
is never given again, so memory that was freed and allocated anew is not taken for the old.

The sender's memory is only read, and only while its `send` lasts. What a receiver has opened ends
with its process; the driver keeps nothing for a dead one.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from torchrelay.memory.kernels import (
    SUM_DESTINATION,
    SUM_SOURCE,
    WHOLE,
    CudaError,
    Piece,
    Tables,
    copy_and_sum,
    device_bytes,
    driver,
    word_sum,
)
from torchrelay.memory.side import on_side_stream
from torchrelay.transports.protocol import wire
from torchrelay.transports.routes import place

HANDLE_BYTES = 64
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_LAZY_PEER_ACCESS = 1
MAX_KEPT = 4096  # allocations that are remembered


class IpcError(Exception):
    """Device memory that cannot be shared; the message says why."""


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


class _Allocation(NamedTuple):
    base: int
    export: wire.Export


class Exported(NamedTuple):
    """What device memory a state lies in, for another process to open."""

    exports: tuple[wire.Export, ...]
    pieces: tuple[wire.Piece, ...]


class Exports:
    """The sender's end: allocations that were exported, by address."""

    def __init__(self) -> None:
        self._known: dict[int, _Allocation] = {}  # by the address of a tensor
        self._last: tuple[object, Exported] | None = None
        self.tables = Tables()

    def of(self, stretches: Sequence[tuple[int, torch.Tensor]]) -> Exported:
        """The memory of contiguous tensors, each with its position in the stream.

        `IpcError` if it cannot be shared. Allocations are asked for their ids each time.
        """
        ask, number = _driver().cuPointerGetAttribute, ctypes.c_ulonglong()
        into = ctypes.addressof(number)
        found = []
        for position, tensor in stretches:
            address = tensor.data_ptr()
            _check(ask(into, _BUFFER_ID, address), "tell allocations apart")
            found.append((position, address, number.value, tensor.nbytes))
        last = self._last
        if last is not None and last[0] == found:
            return last[1]
        tensors = [tensor for _, tensor in stretches]
        exported = self._describe(found, tensors)
        self._last = found, exported
        return exported

    def _describe(
        self, found: list[tuple[int, int, int, int]], tensors: list[torch.Tensor]
    ) -> Exported:
        exports: dict[int, int] = {}
        records: list[wire.Export] = []
        pieces: list[wire.Piece] = []
        for (position, address, number, nbytes), tensor in zip(found, tensors, strict=True):
            known = self._known.get(address)
            if known is None or known.export.id != number:
                known = _export(address, tensor.get_device(), number)
                if len(self._known) >= MAX_KEPT:
                    self._known.clear()
                self._known[address] = known
            if number not in exports:
                exports[number] = len(records)
                records.append(known.export)
            offset = address - known.base
            pieces.append(wire.Piece(position, nbytes, exports[number], offset))
        return Exported(tuple(records), tuple(pieces))


def _export(address: int, device: int, number: int) -> _Allocation:
    base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    driver = _driver()
    with torch.cuda.device(device):
        _check(
            driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), address),
            "say where the allocation begins",
        )
        _check(
            driver.cuIpcGetMemHandle(ctypes.byref(handle), base),
            "export this memory: expandable_segments, or another allocator than torch's own",
        )
    raw = ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)
    return _Allocation(base.value, wire.Export(number, place.device_id(device), raw))


class _Opened(NamedTuple):
    pointer: int
    device: int
    nbytes: int


class Openings:
    """The receiver's end: allocations of each sender that are open here.

    What a sender's newest state does not use any more is closed, so that memory which the sender
    has freed is not held by this process.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, _Opened]] = {}  # by the sender's rank
        self._last: dict[int, tuple[object, list[Source]]] = {}
        self._lock = threading.Lock()
        self.copier = Copier()

    def sources(self, sender: int, memory: wire.Memory, stream_bytes: int) -> list[Source]:
        """The sender's memory, opened, in the order of the stream; `IpcError` if that fails."""
        last = self._last.get(sender)
        wanted = memory.exports, memory.pieces, stream_bytes
        if last is not None and last[0] == wanted:
            return last[1]
        found = _sources(memory, self._opened(sender, memory), stream_bytes)
        self._last[sender] = wanted, found
        return found

    def _opened(self, sender: int, memory: wire.Memory) -> list[_Opened]:
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


def _open(export: wire.Export) -> _Opened:
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


class Source(NamedTuple):
    """Bytes [position, end) of the stream in memory of the sender's that is open here."""

    position: int
    end: int
    address: int
    device: int


def _sources(memory: wire.Memory, opened: Sequence[_Opened], stream_bytes: int) -> list[Source]:
    found: list[Source] = []
    last = 0
    for position, nbytes, export, offset in map(msgspec.structs.astuple, memory.pieces):
        end = position + nbytes
        if position < last or nbytes < 1 or end > stream_bytes:
            raise IpcError("memory that is not in the order of the stream")
        if not 0 <= export < len(opened) or offset < 0:
            raise IpcError("memory of no export")
        last = end
        pointer, device, size = opened[export]
        if offset + nbytes > size:
            raise IpcError("memory outside of an export")
        found.append(Source(position, end, pointer + offset, device))
    return found


class Copy(NamedTuple):
    """A piece to be copied. `source`: the index of the source that it is all of; -1: of a part."""

    position: int
    piece: Piece
    source: int
    there: int  # device
    here: int


def copies(
    sources: Sequence[Source], destinations: Sequence[tuple[int, torch.Tensor]]
) -> list[Copy]:
    """What both have, in the order of the stream."""
    starts = [source.position for source in sources]
    found = []
    if len(sources) == len(destinations):  # each the other's counterpart: the common case
        for index, ((position, end, base, there), (at, tensor)) in enumerate(
            zip(sources, destinations, strict=True)
        ):
            nbytes = tensor.nbytes
            if position != at or end != at + nbytes:
                break
            piece = Piece(base, tensor.data_ptr(), nbytes)
            found.append(Copy(at, piece, index, there, tensor.get_device()))
        else:
            return found
        found.clear()
    for at, tensor in destinations:
        end, address, here = at + tensor.nbytes, tensor.data_ptr(), tensor.get_device()
        index = max(bisect_right(starts, at) - 1, 0)
        while index < len(sources) and starts[index] < end:
            position, until, base, there = sources[index]
            low, high = max(at, position), min(end, until)
            if low < high:
                piece = Piece(base + low - position, address + low - at, high - low)
                whole = (low, high) == (position, until)
                found.append(Copy(low, piece, index if whole else -1, there, here))
            index += 1
    return found


class _Sums(NamedTuple):
    """Of copies between two devices: of all that was read, and of two things that are to be equal:
    the same parts of the sender's memory, and of what is in its place now."""

    copies: list[Copy]
    read: torch.Tensor
    there: torch.Tensor
    here: torch.Tensor


class Copied:
    """What `copy` did."""

    def __init__(self, sources: int) -> None:
        self._sources = sources
        self.sums: list[_Sums] = []
        self.pieces = 0
        self.nbytes = 0

    def add(self, some: list[Copy]) -> None:
        self.pieces += len(some)
        self.nbytes += sum(one.piece.nbytes for one in some)

    def differs(self, theirs: bytes) -> int | None:
        """The position of bytes whose sums are not what the sender says they are, if there are any.

        What was copied of a source in part is compared with what was read there alone.
        """
        expected = np.frombuffer(theirs, "<i8") if len(theirs) % 8 == 0 else np.zeros(0, "<i8")
        if len(expected) != self._sources:
            return 0
        for some, read, there, here in self.sums:
            bad = (there != here).cpu().numpy()
            source = np.array([one.source for one in some])
            whole = source >= 0
            bad[whole] |= read.cpu().numpy()[whole] != expected[source[whole]]
            if bad.any():
                return some[int(np.flatnonzero(bad)[0])].position
        return None


SAMPLE = 8  # of so many tiles one is read again after it was written, unless all are
_turn = itertools.count()


class Copier:
    """Copies device memory, and remembers the last plan of it: addresses, and no memory."""

    def __init__(self) -> None:
        self._last: tuple[object, dict[tuple[int, int], list[Copy]]] | None = None
        self._tables = Tables()

    def clear(self) -> None:
        self._last = None
        self._tables.clear()

    def copy(
        self,
        sources: Sequence[Source],
        destinations: Sequence[tuple[int, torch.Tensor]],
        *,
        sums: bool,
        whole: bool,
    ) -> Copied:
        """Copy; returns when it is over.

        With `sums` all that is read is summed up on its way, to be compared with what the sender
        found, and what was written is read again: some of it, other parts each time, or the whole.
        """
        copied = Copied(len(sources))
        for (there, here), some in self._planned(sources, destinations).items():
            pieces = [one.piece for one in some]
            copied.add(some)
            with torch.cuda.device(here), on_side_stream():
                if there != here:
                    copied.sums += _copy_across(some, there, here, sums=sums)
                    continue
                read = copy_and_sum(pieces, here, self._tables, sums=sums)
                if read is not None:
                    part = WHOLE if whole else (next(_turn) % SAMPLE, SAMPLE)
                    ends = [
                        copy_and_sum(pieces, here, self._tables, what=end, part=part)
                        for end in (SUM_SOURCE, SUM_DESTINATION)
                    ]
                    copied.sums.append(_Sums(some, read, *ends))  # type: ignore[arg-type]
        return copied

    def _planned(
        self, sources: Sequence[Source], destinations: Sequence[tuple[int, torch.Tensor]]
    ) -> dict[tuple[int, int], list[Copy]]:
        key = [sources, *[(at, to.data_ptr(), to.nbytes) for at, to in destinations]]
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        found: dict[tuple[int, int], list[Copy]] = {}
        for one in copies(sources, destinations):
            found.setdefault((one.there, one.here), []).append(one)
        self._last = key, found
        return found


def _copy_across(some: list[Copy], there: int, here: int, *, sums: bool) -> list[_Sums]:
    """From one GPU to another that can reach it."""
    for source, destination, nbytes in (one.piece for one in some):
        data = device_bytes(source, nbytes, there)
        device_bytes(destination, nbytes, here).copy_(data)
    if not sums:
        return []
    ends = []
    for device, end in ((there, 0), (here, 1)):
        pieces = (one.piece for one in some)
        parts = [word_sum(device_bytes(piece[end], piece.nbytes, device)) for piece in pieces]
        ends.append(torch.stack(parts).to(f"cuda:{here}"))
    return [_Sums(some, ends[0], *ends)]


def word_sums(tensors: Sequence[torch.Tensor], tables: Tables) -> list[torch.Tensor]:
    """Sums of contiguous tensors: asked of their devices, not awaited. One result a device, in
    order of first use."""
    by_device: dict[int, list[Piece]] = {}
    for tensor in tensors:
        address = tensor.data_ptr()
        piece = Piece(address, address, tensor.nbytes)
        by_device.setdefault(tensor.get_device(), []).append(piece)
    found = []
    for device, pieces in by_device.items():
        total = copy_and_sum(pieces, device, tables, what=SUM_SOURCE)
        assert total is not None
        found.append(total)
    return found


def packed_sums(tensors: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]) -> bytes:
    """The sums of `word_sums(tensors)` in the order of the tensors."""
    if len(sums) == 1:
        return sums[0].cpu().numpy().astype("<i8").tobytes()
    devices = list(dict.fromkeys(tensor.get_device() for tensor in tensors))
    columns = {device: iter(one.tolist()) for device, one in zip(devices, sums, strict=True)}
    numbers = [next(columns[tensor.get_device()]) for tensor in tensors]
    return np.array(numbers, "<i8").tobytes()
