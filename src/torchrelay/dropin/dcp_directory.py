"""A stock DCP directory: `.metadata`, and files whose byte ranges hold `torch.save` archives.

Nothing that it holds is run. It is read whole, name by name, or looked at as any other state: then
the archive of one box is read and checked at a time, so memory is bounded by the largest box, which
is what one rank had of one tensor.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchrelay.dropin._dcp_metadata import StockPiece, decode
from torchrelay.errors import (
    CheckpointError,
    DigestError,
    ManifestError,
    RelayError,
    UnsupportedLeafError,
)
from torchrelay.files import is_file
from torchrelay.inspection.numbers import memory_of
from torchrelay.inspection.opened_state import Contents, PlainValue
from torchrelay.inspection.step_source import shown
from torchrelay.memory.free import take_free
from torchrelay.planning.stored import Shard, StoredTensor
from torchrelay.progress import Bar, ProgressCallback
from torchrelay.record.schema import VolumeRecord
from torchrelay.shares.layout import rank_of
from torchrelay.state.local_parts import cut
from torchrelay.state.tensors import dtype_named
from torchrelay.stores.reading.chunks import VerifiedFiles

_MAX_METADATA = 1 << 30
_GLOBAL = re.compile(r"GLOBAL (\S+) was not an allowed global")


class StockDirectory:
    """A checkpoint whose metadata was checked whole, and whose files have every byte range.

    Implements `OpenedState`: each box of a tensor is a volume.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        check_crc: bool = True,
        metadata: Path | None = None,
    ) -> None:
        self.name = os.fspath(folder)
        self._folder, self._check_crc = Path(folder), check_crc
        self._opened: tuple[str, io.BufferedReader] | None = None
        self._part: tuple[int, torch.Tensor] | None = None  # the box that was read last
        try:
            data = _read_metadata(self._folder) if metadata is None else metadata.read_bytes()
            self.items, self._pieces, self.paths = decode(data)
            self._check()
        except OSError as fault:
            raise CheckpointError(f"could not be read: {fault}", file=self.name) from fault
        tensors = [item for item in self.items.values() if isinstance(item, StoredTensor)]
        self._boxes = [(tensor, shard) for tensor in tensors for shard in tensor.shards]

    def close(self) -> None:
        self._part = None
        if self._opened is not None:
            self._opened[1].close()

    def _check(self) -> None:
        sizes: dict[str, int] = {}
        for fqn, item in self.items.items():
            if isinstance(item, StockPiece):
                pieces = [item]
            else:
                pieces = [self._pieces[shard.file] for shard in item.shards]
            for piece in pieces:
                if piece.file not in sizes:
                    file = self._folder / piece.file
                    if not is_file(file):
                        raise ManifestError(f"{piece.file} is missing from {self.name}", path=fqn)
                    sizes[piece.file] = file.stat().st_size
                if piece.offset + piece.length > sizes[piece.file]:
                    raise ManifestError(
                        f"bytes {piece.offset} to {piece.offset + piece.length} are outside of "
                        f"{piece.file}, which has {sizes[piece.file]}; it may be cut short",
                        path=fqn,
                    )

    def value(self, fqn: str) -> Any:
        """A whole tensor, on the CPU, or another object."""
        item = self.items[fqn]
        if isinstance(item, StockPiece):
            return self._load(fqn, item)
        dtype = dtype_named(item.dtype)
        take_free(math.prod(item.shape) * dtype.itemsize, fqn)
        whole = torch.empty(item.shape, dtype=dtype, device="cpu")
        for shard in item.shards:
            part = self._box(item, shard)
            if shard.sizes == item.shape:
                return part
            cut(whole, shard.offsets, shard.sizes).copy_(part)
        return whole

    def _box(self, tensor: StoredTensor, shard: Shard) -> torch.Tensor:
        """A box of a tensor, as its archive has it; `ManifestError` unless it is as described."""
        piece, dtype = self._pieces[shard.file], dtype_named(tensor.dtype)
        part = self._load(tensor.name, piece)
        if (
            type(part) is not torch.Tensor
            or part.dtype != dtype
            or part.layout != torch.strided
            or tuple(part.shape) != shard.sizes
            # A stride of 0 would let few bytes stand for many.
            or part.untyped_storage().nbytes() < math.prod(shard.sizes) * dtype.itemsize
        ):
            raise ManifestError(
                f"{piece.file} does not hold the {dtype} tensor of {shard.sizes} that the metadata "
                "describes",
                path=tensor.name,
            )
        return part.detach()

    def _load(self, fqn: str, piece: StockPiece) -> Any:
        """The object in the archive at `piece`."""
        if self._opened is None or self._opened[0] != piece.file:
            if self._opened is not None:
                self._opened[1].close()
            # Closed by the next file and by `close`.
            self._opened = (piece.file, (self._folder / piece.file).open("rb"))
        file = self._opened[1]
        file.seek(piece.offset)
        try:
            return load_archive(io.BytesIO(file.read(piece.length)), self._check_crc)
        except RelayError as fault:
            where = f"the archive at byte {piece.offset} of {piece.file}"
            fault.message = f"{where} was refused: {fault.message}"
            fault.path = fqn
            raise
        except Exception as fault:  # torch's reader fails in many ways on bytes that are not its
            raise DigestError(f"{piece.file} is damaged: {fault!r:.300}", path=fqn) from fault

    # To be looked at.

    @cached_property
    def contents(self) -> Contents:
        items = self.items.items()
        tensors = tuple([item for _, item in items if isinstance(item, StoredTensor)])
        try:
            objects = [(n, self.value(n)) for n, item in items if isinstance(item, StockPiece)]
        except OSError as fault:
            raise CheckpointError(f"could not be read: {fault}", file=self.name) from fault
        volumes = tuple([self._volume(*box) for box in self._boxes])
        ranks = len({rank_of(volume.name) for volume in volumes}) or 1
        values = tuple([value for one in objects for value in _values(*one)])
        return Contents(None, ranks, tensors, volumes, values)

    def _volume(self, tensor: StoredTensor, shard: Shard) -> VolumeRecord:
        nbytes = math.prod(shard.sizes) * dtype_named(tensor.dtype).itemsize
        return VolumeRecord(self._pieces[shard.file].file, nbytes)

    def read_into(self, volume: int, start: int, view: memoryview) -> None:
        if self._part is None or self._part[0] != volume:
            self._part = None  # two boxes at once are more than the bound
            part = self._box(*self._boxes[volume])
            self._part = (volume, part.contiguous().reshape(-1).view(torch.uint8))
        data = self._part[1][start : start + view.nbytes]
        view[:] = memory_of(data.numpy())

    def verify(self, progress: ProgressCallback, known: VerifiedFiles | None = None) -> str:
        bar = Bar(progress, sum(piece.length for piece in self._pieces))
        for box, piece in zip(self._boxes, self._pieces, strict=True):
            self._box(*box)
            bar.add(piece.length)
        return "the format has CRC-32 checksums in place of digests; they were checked"


def _read_metadata(folder: Path) -> bytes:
    file = folder / ".metadata"
    if not is_file(file):
        hint = (
            "; it was saved with use_collectives=False, one .metadata a rank"
            if next(folder.glob("__*.metadata"), None) is not None
            else ""
        )
        raise ManifestError(f"{folder} is not a stock DCP checkpoint: it has no .metadata{hint}")
    if file.stat().st_size > _MAX_METADATA:
        raise ManifestError(f"{file} is over the limit of {_MAX_METADATA} bytes")
    return file.read_bytes()


def load_archive(file: BinaryIO, check_crc: bool) -> Any:
    """The object in an archive of `torch.save`, with tensors on the CPU.

    `DigestError` unless the archive is whole and its records have their checksums, and
    `ManifestError` where one is compressed, since a small file could stand for a large state:
    `torch.load` looks at neither. `UnsupportedLeafError` for more than `weights_only=True` allows.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type]
            bad = archive.testzip() if check_crc and not packed else None
    except Exception as fault:  # zipfile has as many ways to fail as a damaged file has
        raise DigestError(f"it is not an intact archive: {fault!r:.200}") from fault
    if packed:
        raise ManifestError("it has a compressed record")
    if bad is not None:
        raise DigestError(
            f"record {bad!r} does not have its checksum; pass check_crc=False for what was saved "
            "without checksums"
        )
    return load_unchecked(file)


def load_unchecked(file: BinaryIO) -> Any:
    """The same for files from before torch 1.6, too, which have no checksums."""
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as fault:
        raise UnsupportedLeafError(_refusal(fault)) from fault


def _refusal(fault: Exception) -> str:
    """The reason of torch's restricted unpickler, without its advice to load the file anyway."""
    text = str(fault)
    if named := _GLOBAL.search(text):
        return f"it has {named[1][:200]} in it, which only pickle could make"
    lines = [line for line in text.splitlines() if "Unpickler error:" in line] or [text]
    return lines[0].partition("Unpickler error:")[2].strip()[:300] or text.partition("\n")[0][:300]


def _values(path: str, value: object) -> list[PlainValue]:
    """The plain values of an object: its items, if it is a container."""
    if isinstance(value, dict) and value:
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        items = [(str(place), item) for place, item in enumerate(value)]
    else:
        return [PlainValue(path, shown(value))]
    return [found for key, item in items for found in _values(f"{path}.{key}", item)]
