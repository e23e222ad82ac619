"""A saved model as the files that Hugging Face loaders look for."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from torchrelay.checkpointer.stored_model import stored_model
from torchrelay.coordination.coordinator import Coordinator
from torchrelay.deadlines import Deadline
from torchrelay.errors import (
    CheckpointError,
    DamagedError,
    ManifestError,
    MismatchError,
    StepNotFoundError,
    UsageError,
)
from torchrelay.files import exists, is_dir
from torchrelay.inspection.file_bytes import PIECE_BYTES, FileBytes
from torchrelay.inspection.opened_state import StateReader
from torchrelay.inspection.step_source import StepSource
from torchrelay.inspection.tensors import TensorReader
from torchrelay.loading.loader import Loader, LoadRequest
from torchrelay.memory.bounded import bounded
from torchrelay.memory.thread_pool import run_on_threads
from torchrelay.planning.stored import Shard, StoredTensor
from torchrelay.shares.layout import Entry, FileLayout, arrange
from torchrelay.shortage import raise_shortage
from torchrelay.sources.source import Opened, Source
from torchrelay.sources.subtree import Subtree
from torchrelay.state import tensors as t
from torchrelay.state.backing import with_memory
from torchrelay.state.checkpointable import is_checkpointable
from torchrelay.state.paths import naming
from torchrelay.stores.local.draft import LocalSink
from torchrelay.stores.local.files import Files
from torchrelay.stores.local.handles import Handles
from torchrelay.stores.tokens import new_token
from torchrelay.stores.writer.file_writer import PIECE, WORKERS

SHARD_BYTES = 5_000_000_000  # the size at which Hugging Face's own tools split
_TASK_BYTES = 32 << 20  # of a file, that a thread takes on at once
_COSTLY_WORKERS = 6  # each waits for an answer most of the time
_COSTLY_BYTES = 8 << 20  # that each asks for at once


class _Reading(NamedTuple):
    """How tensors are read: on that many threads, each with a reader of its own."""

    make_reader: Callable[[], StateReader]
    workers: int
    piece_bytes: int = PIECE_BYTES


def export_step(
    source: Source,
    target: str | os.PathLike[str],
    deadline: Deadline,
    *,
    step: int | None = None,
    key: str | None = None,
    shard_bytes: int | None = SHARD_BYTES,
) -> list[str]:
    """Do as `export_hf` does with the model below a key of a step, by default of the newest that
    verifies. Its bytes go from the step's files to the new ones a few MiB at a time. The model is
    loaded whole where a tensor is not in the step as it is exported, and where bytes are damaged:
    a load finds another copy of them, or another step."""
    request = LoadRequest(step=step, key=key)
    _check_free(target, shard_bytes)
    try:
        steps = [*source.steps(deadline)]
        newest = max(steps, default=None) if request.step is None else request.step
        if newest in steps:
            with closing(source.open(newest, deadline)) as opened:
                names = _export_opened(opened, source.name, key, target, deadline, shard_bytes)
            if names is not None:
                return names
    except (DamagedError, ManifestError, StepNotFoundError):
        pass  # the load says why, or does without
    alone = Coordinator(None, "export")
    model = Loader(source, alone).load(alone.call("export"), request, deadline).state
    return export_hf(model, target, deadline.left(), shard_bytes=shard_bytes)


def _export_opened(
    opened: Opened,
    name: str,
    key: str | None,
    target: str | os.PathLike[str],
    deadline: Deadline,
    shard_bytes: int | None,
) -> list[str] | None:
    """The names of the files; None where the model has to be loaded. The reads of a step that is
    left behind end at their next piece."""
    part = opened if key is None else Subtree(opened, key)
    model = stored_model(part.record)
    if model is None:
        return None
    _check_whole(model)
    costly = opened.files.costly_reads
    reading = _Reading(
        lambda: StepSource(name, part),
        _COSTLY_WORKERS if costly else 1,
        _COSTLY_BYTES if costly else PIECE_BYTES,
    )
    return _exported([*model.values()], reading, target, deadline.left(), shard_bytes)


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
    _check_free(target, shard_bytes)
    tensors = _flat(model)
    reader = TensorReader(list(tensors.values()))
    stored = [
        StoredTensor(name, t.NAMES[one.dtype], shape, (Shard((0,) * len(shape), shape, n, 0),))
        for n, (name, one) in enumerate(tensors.items())
        for shape in [tuple(one.shape)]
    ]
    reading = _Reading(lambda: reader, WORKERS, PIECE)
    return _exported(stored, reading, target, seconds, shard_bytes)


def _check_free(target: str | os.PathLike[str], shard_bytes: int | None) -> None:
    """`UsageError` unless there may be a new directory, with files of that size."""
    if shard_bytes is not None and shard_bytes < 1:
        raise UsageError(f"shard_bytes is a positive number or None, not {shard_bytes}")
    place = Path(target).absolute()
    if exists(place) and (not is_dir(place) or any(place.iterdir())):
        raise UsageError(f"{place} exists and is not overwritten: name another directory")


def _exported(
    tensors: Sequence[StoredTensor],
    reading: _Reading,
    target: str | os.PathLike[str],
    seconds: float,
    shard_bytes: int | None,
) -> list[str]:
    """Write tensors within `seconds`; the names of the files."""
    left = threading.Event()

    def check_wanted() -> None:
        if left.is_set():
            raise InterruptedError("the caller does not wait any more")

    return bounded(
        lambda: _write(tensors, reading, target, check_wanted, shard_bytes),
        seconds,
        "write the model",
        file=os.fspath(target),
        left=left,
    )


def _write(
    tensors: Sequence[StoredTensor],
    reading: _Reading,
    target: str | os.PathLike[str],
    check_wanted: Callable[[], None],
    shard_bytes: int | None,
) -> list[str]:
    entries = [Entry(x.name, x.dtype, x.shape, (0,) * len(x.shape), x.shape) for x in tensors]
    layouts = arrange(entries, file_bytes=shard_bytes).files
    place = Path(target).absolute()
    temporary, files = _TemporaryDirectory(place), Files()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        files.make_dir(str(temporary.path))
        for layout in layouts:
            _write_file(layout, tensors, reading, temporary, check_wanted)
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
    return [layout.name for layout in layouts]


def _write_file(
    layout: FileLayout,
    tensors: Sequence[StoredTensor],
    reading: _Reading,
    folder: _TemporaryDirectory,
    check_wanted: Callable[[], None],
) -> None:
    data = FileBytes(layout.header, [tensors[index] for _, index in layout.placed])
    sink = folder.open(layout.name, layout.nbytes)

    def work() -> Callable[[tuple[int, int]], None]:
        reader = reading.make_reader()

        def write(task: tuple[int, int]) -> None:
            at, stop = task
            for piece in data.pieces(reader, at, stop, lambda volume: reading.piece_bytes):
                check_wanted()
                sink.write(at, piece)
                at += len(piece)

        return write

    try:
        run_on_threads(data.ranges(_TASK_BYTES), work, reading.workers)
        check_wanted()
        sink.finish()
    except BaseException as fault:
        sink.abort()
        if isinstance(fault, OSError):
            raise_shortage(fault, f"write {layout.name}")
        raise


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
        self.path = target.with_name(f"{target.name}.tmp-{new_token()}")

    def open(self, name: str, nbytes: int) -> LocalSink:
        return LocalSink(str(self.path / name), Files(), nbytes, Handles())
