"""A `.safetensors` file as a state to be looked at, and any state as such a file. No torch.

Its header is read and checked whole first. A file is written a slab at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec

from torchrelay.errors import CheckpointError, DamagedError, ManifestError, UsageError
from torchrelay.inspection.file_bytes import FileBytes
from torchrelay.inspection.opened_state import Contents, OpenedState
from torchrelay.planning.stored import Shard, StoredTensor
from torchrelay.progress import Progress, ProgressCallback
from torchrelay.record.dtypes import itemsize
from torchrelay.record.schema import VolumeRecord
from torchrelay.shares.layout import Entry, arrange
from torchrelay.stores.local.files import atomic_file
from torchrelay.stores.reading.chunks import VerifiedFiles
from torchrelay.stores.safetensors import DTYPES, METADATA
from torchrelay.system import read_full

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MAX_DIMS = 64
_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_HeaderEntry)


class SafetensorsSource:
    """Implements `OpenedState` on a file that stays open until `close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        try:
            self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115
        except OSError as fault:
            raise CheckpointError(f"cannot be opened: {fault.strerror}", file=self.name) from fault
        try:
            size = os.fstat(self._file.fileno()).st_size
            tensors = read_header(self._file, size)
        except ManifestError as fault:
            self.close()
            raise DamagedError(
                f"no valid .safetensors file: {fault.message}", file=self.name
            ) from fault
        except BaseException:
            self.close()
            raise
        self.contents = Contents(None, 1, tensors, (VolumeRecord(Path(path).name, size),))

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        if not read_full(self._file.fileno(), view, start):
            raise DamagedError("the file was cut short while it was read", file=self.name)

    def verify(self, progress: ProgressCallback, known: VerifiedFiles | None = None) -> str:
        return "the format has no digests, so only its header and sizes were checked"

    def close(self) -> None:
        self._file.close()


def read_header(file: BinaryIO, size: int) -> tuple[StoredTensor, ...]:
    """The tensors that a header tells. `ManifestError` unless they fill the file, without holes."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ManifestError(f"a header of {length} bytes in a file of {size}")
    try:
        entries = _header.decode(file.read(length))
        found = [(name, _entry.decode(raw)) for name, raw in entries.items() if name != METADATA]
    except (msgspec.MsgspecError, RecursionError, ValueError) as fault:
        raise ManifestError(f"its header is not what the format says: {fault}") from None
    at = 0
    for name, entry in sorted(found, key=lambda item: item[1].data_offsets):
        if entry.data_offsets != (at, at + _nbytes(name, entry)):
            raise ManifestError(f"{name[:80]!r} has bytes {entry.data_offsets}, not those at {at}")
        at = entry.data_offsets[1]
    if 8 + length + at != size:
        raise ManifestError(f"{8 + length + at} bytes are described, the file has {size}")
    tensors = []
    for name, entry in found:
        start = 8 + length + entry.data_offsets[0]
        whole = Shard((0,) * len(entry.shape), entry.shape, 0, start)
        tensors.append(StoredTensor(name, _NAMES[entry.dtype], entry.shape, (whole,)))
    return tuple(tensors)


def _nbytes(name: str, entry: _HeaderEntry) -> int:
    if entry.dtype not in _NAMES:
        raise ManifestError(f"{name[:80]!r} has dtype {entry.dtype[:20]!r}, which is not known")
    if len(entry.shape) > _MAX_DIMS or any(not 0 <= length < 1 << 62 for length in entry.shape):
        raise ManifestError(f"{name[:80]!r} has shape {entry.shape[:8]}")
    return prod(entry.shape) * itemsize(_NAMES[entry.dtype])


def write_safetensors(
    source: OpenedState,
    tensors: Sequence[StoredTensor],
    target: str | os.PathLike[str],
    progress: ProgressCallback,
) -> int:
    """Write whole tensors of a state as a file, which takes its name once it is durable; returns
    its bytes. A file that has the name is replaced."""
    path = Path(target)
    entries = [
        Entry(tensor.name, tensor.dtype, tensor.shape, (0,) * len(tensor.shape), tensor.shape)
        for tensor in tensors
    ]
    if not entries:
        raise UsageError(f"{source.name} has no tensors, so there is nothing to write")
    (layout,) = arrange(entries, file_bytes=None).files
    data = FileBytes(layout.header, [tensors[index] for _, index in layout.placed])
    try:
        with atomic_file(path) as file:
            for piece in data.pieces(source, 0, layout.nbytes):
                file.write(piece)
                progress(Progress(file.tell(), layout.nbytes))
    except OSError as fault:
        raise CheckpointError(f"cannot be written: {fault.strerror}", file=str(path)) from fault
    return layout.nbytes
