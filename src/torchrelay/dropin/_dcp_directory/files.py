"""A stock DCP directory: `.metadata`, and files whose byte ranges hold `torch.save` archives."""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torchrelay.dropin._dcp_directory.metadata import Chunk, StockPiece, StockTensor, decode
from torchrelay.errors import (
    CheckpointError,
    DigestError,
    ManifestError,
    RelayError,
    UnsupportedLeafError,
)

_MAX_METADATA = 1 << 30
_GLOBAL = re.compile(r"GLOBAL (\S+) was not an allowed global")


class StockDirectory:
    """A checkpoint whose metadata was checked whole, and whose files have every byte range."""

    def __init__(
        self, folder: Path, *, check_crc: bool = True, metadata: Path | None = None
    ) -> None:
        self.folder = folder
        self.check_crc = check_crc
        self.opened: tuple[str, io.BufferedReader] | None = None
        try:
            found = decode(_read_metadata(folder) if metadata is None else metadata.read_bytes())
            self.items, self.paths = found
            self._check()
        except OSError as fault:
            raise CheckpointError(f"could not be read: {fault}", file=str(folder)) from fault

    def __enter__(self) -> StockDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        if self.opened is not None:
            self.opened[1].close()

    def _check(self) -> None:
        sizes: dict[str, int] = {}
        for fqn, item in self.items.items():
            pieces = [c.piece for c in item.chunks] if isinstance(item, StockTensor) else [item]
            for piece in pieces:
                if piece.file not in sizes:
                    file = self.folder / piece.file
                    if not file.is_file():
                        raise ManifestError(f"{piece.file} is missing from {self.folder}", path=fqn)
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
        whole: torch.Tensor | None = None
        for chunk in item.chunks:
            part = self.chunk(fqn, item, chunk)
            if chunk.sizes == item.shape:
                return part
            if whole is None:
                whole = torch.empty(item.shape, dtype=item.dtype, device="cpu")
            box = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                box = box.narrow(dim, start, size)
            box.copy_(part)
        return torch.empty(item.shape, dtype=item.dtype, device="cpu") if whole is None else whole

    def chunk(self, fqn: str, item: StockTensor, chunk: Chunk) -> torch.Tensor:
        """A box of a tensor, as its archive has it; `ManifestError` unless it is as described."""
        part = self._load(fqn, chunk.piece)
        if (
            type(part) is not torch.Tensor
            or part.dtype != item.dtype
            or part.layout != torch.strided
            or tuple(part.shape) != chunk.sizes
            # A stride of 0 would let few bytes stand for many.
            or part.untyped_storage().nbytes() < math.prod(chunk.sizes) * item.dtype.itemsize
        ):
            raise ManifestError(
                f"{chunk.piece.file} does not hold the {item.dtype} tensor of {chunk.sizes} that "
                "the metadata describes",
                path=fqn,
            )
        return part.detach()

    def _load(self, fqn: str, piece: StockPiece) -> Any:
        """The object in the archive at `piece`."""
        if self.opened is None or self.opened[0] != piece.file:
            if self.opened is not None:
                self.opened[1].close()
            # Closed by the next file and by `__exit__`.
            self.opened = (piece.file, (self.folder / piece.file).open("rb"))
        file = self.opened[1]
        file.seek(piece.offset)
        archive = io.BytesIO(file.read(piece.length))
        try:
            check_archive(archive, self.check_crc)
            return torch.load(archive, map_location="cpu", weights_only=True)
        except RelayError as fault:
            fault.message = (
                f"byte {piece.offset} of {piece.file} is not an archive: {fault.message}"
            )
            fault.path = fqn
            raise
        except pickle.UnpicklingError as fault:
            raise UnsupportedLeafError(
                f"an object in {piece.file} was refused: {refusal(fault)}", path=fqn
            ) from fault
        except Exception as fault:  # torch's reader fails in many ways on bytes that are not its
            raise DigestError(f"{piece.file} is damaged: {fault!r:.300}", path=fqn) from fault


def _read_metadata(folder: Path) -> bytes:
    file = folder / ".metadata"
    if not file.is_file():
        hint = (
            "; it was saved with use_collectives=False, one .metadata a rank"
            if next(folder.glob("__*.metadata"), None) is not None
            else ""
        )
        raise ManifestError(f"{folder} is not a stock DCP checkpoint: it has no .metadata{hint}")
    if file.stat().st_size > _MAX_METADATA:
        raise ManifestError(f"{file} is over the limit of {_MAX_METADATA} bytes")
    return file.read_bytes()


def check_archive(file: BinaryIO, check_crc: bool) -> None:
    """Raise `DigestError` unless a file is an archive of `torch.save` whose records have their
    checksums, and `ManifestError` where one is compressed: a small file could stand for a large
    state. `torch.load` looks at neither. The file is at its beginning again after that."""
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
    file.seek(0)


def refusal(fault: Exception) -> str:
    """The reason of torch's restricted unpickler, without its advice to load the file anyway."""
    text = str(fault)
    if named := _GLOBAL.search(text):
        return f"it has {named[1][:200]} in it, which only pickle could make"
    said = [line for line in text.splitlines() if "Unpickler error:" in line] or [text]
    return said[0].partition("Unpickler error:")[2].strip()[:300] or text.partition("\n")[0][:300]
