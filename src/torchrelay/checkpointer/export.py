"""A saved model as the files that Hugging Face loaders look for."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torchrelay.errors import CheckpointError, MismatchError, UsageError
from torchrelay.memory.bounded import bounded
from torchrelay.state import tensors as t
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.store import LocalSink, token
from torchrelay.stores.seam import Buffer
from torchrelay.stores.shares.drafting import Share
from torchrelay.stores.shares.layout import Entry, arrange
from torchrelay.stores.shares.plans import Drafted
from torchrelay.stores.writer.ranges import Writing

SHARD_BYTES = 5_000_000_000  # what Hugging Face's own tools split at


class _Beside:
    """A directory that takes its name when everything in it is durable. A `seam.Draft` as far as
    writing goes."""

    def __init__(self, target: Path, left: threading.Event) -> None:
        self.target = target
        self._left = left
        self.path = target.with_name(f"{target.name}.tmp-{token()}")
        self._files = Files()

    def begin(self) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._files.make_dir(str(self.path))

    def open(self, name: str, nbytes: int) -> LocalSink:
        return _ExportSink(str(self.path / name), self._files, nbytes, self._left)

    def commit(self, manifest: bytes) -> None:
        _check_wanted(self._left)
        self._files.sync_dir(str(self.path))
        self._files.rename(str(self.path), str(self.target))
        self._files.sync_dir(str(self.target.parent))

    def discard(self) -> None:
        if self.path.exists():
            for file in self.path.glob("*"):
                file.unlink()
            self.path.rmdir()


class _ExportSink(LocalSink):
    """A file of an export. Nothing more is written once nobody waits for it."""

    def __init__(self, path: str, files: Files, nbytes: int, left: threading.Event) -> None:
        super().__init__(path, files, nbytes)
        self._left = left

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        _check_wanted(self._left)
        super().write(position, buffers)


def _check_wanted(left: threading.Event) -> None:
    if left.is_set():
        raise InterruptedError("nobody waits for it any more")


def export_hf(
    model: object,
    target: str | os.PathLike[str],
    seconds: float,
    *,
    shard_bytes: int | None = SHARD_BYTES,
) -> list[str]:
    """Write a flat dict of tensors as `model.safetensors`, or as several files with the index
    `model.safetensors.index.json`; returns their names. The directory must not exist. After
    `seconds`, or an interrupt, nothing takes that name, and what was written is removed."""
    left = threading.Event()
    return bounded(
        lambda: _write(model, target, left, shard_bytes),
        seconds,
        "write the model",
        file=os.fspath(target),
        left=left,
    )


def _write(
    model: object,
    target: str | os.PathLike[str],
    left: threading.Event,
    shard_bytes: int | None,
) -> list[str]:
    if shard_bytes is not None and shard_bytes < 1:
        raise UsageError(f"shard_bytes is a positive number or None, not {shard_bytes}")
    place = Path(target).absolute()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"{place} is there already, and is not overwritten")
    drafted = Drafted([], [], {})
    for name, tensor in _flat(model).items():
        shape = tuple(tensor.shape)
        drafted.entries.append(Entry(name, t.NAMES[tensor.dtype], shape, (0,) * len(shape), shape))
        drafted.tensors.append(tensor)
    share = Share(drafted, arrange(drafted.entries, file_bytes=shard_bytes))
    draft = _Beside(place, left)
    writing: Writing | None = None
    try:
        draft.begin()
        writing = Writing(draft, share.files)
        for ranges in share.passes():
            writing.write(ranges)
        writing.finish()
        draft.commit(b"")
    except BaseException as fault:
        if writing is not None:
            writing.abort()
        draft.discard()
        if not isinstance(fault, OSError):
            raise
        why = fault.strerror or fault
        raise CheckpointError(f"cannot export: {why}", phase="write", file=str(place)) from fault
    return [file.name for file in share.files]


def _flat(model: object) -> dict[str, torch.Tensor]:
    """The tensors of a model by name, each once: a tied one under its first name."""
    if not isinstance(model, Mapping):
        raise MismatchError("a model is exported from a dict of tensors")
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or not t.is_plain(value):
            raise MismatchError(
                "not a plain tensor: a model is exported from a flat dict of tensors",
                path=str(name),
            )
        tensor = value.detach().resolve_conj().resolve_neg()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        found[str(name)] = tensor
    return found
