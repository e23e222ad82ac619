"""A saved model as the files that Hugging Face loaders look for."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from torchrelay.errors import CheckpointError, MismatchError, UsageError
from torchrelay.memory.bounded import bounded
from torchrelay.state import tensors as t
from torchrelay.state.backing import with_memory
from torchrelay.state.checkpointable import is_checkpointable
from torchrelay.state.paths import naming
from torchrelay.stores.local.draft import LocalSink
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.handles import Handles
from torchrelay.stores.local.root import token
from torchrelay.stores.shares.layout import Entry, arrange
from torchrelay.stores.shares.share import Share

SHARD_BYTES = 5_000_000_000  # the size at which Hugging Face's own tools split


def export_hf(
    model: object,
    target: str | os.PathLike[str],
    seconds: float,
    *,
    shard_bytes: int | None = SHARD_BYTES,
) -> list[str]:
    """Write a flat dict of tensors as `model.safetensors`, or as several files with the index
    `model.safetensors.index.json`; returns their names. The directory must not exist. After
    `seconds`, or an interrupt, nothing gets that name, and what was written is removed."""
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
        raise UsageError(f"{place} exists and is not overwritten: name another directory")
    tensors = _flat(model)
    entries = [
        Entry(name, t.NAMES[one.dtype], tuple(one.shape), (0,) * one.dim(), tuple(one.shape))
        for name, one in tensors.items()
    ]
    share = Share(arrange(entries, file_bytes=shard_bytes), list(tensors.values()))
    temporary, files = _TemporaryDirectory(place), Files()

    def check_wanted(nbytes: int = 0) -> None:
        if left.is_set():
            raise InterruptedError("the caller does not wait any more")

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.make_dir(str(temporary.path))
        share.write_to(temporary, check_wanted)
        check_wanted()
        files.sync_dir(str(temporary.path))
        files.rename(str(temporary.path), str(place))
        files.sync_name(str(place))
    except BaseException as fault:
        shutil.rmtree(temporary.path, ignore_errors=True)
        if not isinstance(fault, OSError):
            raise
        why = fault.strerror or fault
        raise CheckpointError(f"cannot export: {why}", phase="write", file=str(place)) from fault
    return [file.name for file in share.files]


def _flat(model: object) -> dict[str, torch.Tensor]:
    """The tensors of a model by name, each once: a tied one under its first name."""
    if not isinstance(model, Mapping):
        raise MismatchError("a model is exported from a dict of tensors: name its key")
    _check_whole(model)
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) or not t.is_plain(value) or is_checkpointable(value):
            raise MismatchError(
                "not a plain tensor: a model is exported from a flat dict of tensors",
                path=str(name),
            )
        with naming((name,)):
            tensor = with_memory(value.detach()).resolve_conj().resolve_neg()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        found[str(name)] = tensor
    return found


def _check_whole(names: Iterable[object]) -> None:
    """Refuse a model with adapters of PEFT: its names are those of no model, so a loader would
    begin with new weights."""
    texts = [name for name in names if isinstance(name, str)]
    wrapped = any(".base_layer." in name for name in texts)
    for name in texts:
        if name.startswith("base_model.model.") or (wrapped and ".lora_" in name):
            raise MismatchError(
                "the step holds a model with adapters of PEFT, not one that loaders know: load it "
                "and pass it to PEFT's save_pretrained(target, state_dict=...), or use "
                "RelayCallback.export",
                path=name,
            )


class _TemporaryDirectory:
    """Where the files are until everything is durable."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f"{target.name}.tmp-{token()}")

    def open(self, name: str, nbytes: int) -> LocalSink:
        return LocalSink(str(self.path / name), Files(), nbytes, Handles())
