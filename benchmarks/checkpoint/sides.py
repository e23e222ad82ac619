"""How each tool saves and loads; what is called in the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as _dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import torchrelay
from benchmarks.checkpoint.states import flat

DCP, DCP2 = "dcp.save", "dcp.save, thread_count=2"
SAFETENSORS, TORCH, OURS = "safetensors", "torch.save", "torchrelay"
MANAGER = "torch_checkpointing"
LOAD_DCP, LOAD_SAFETENSORS = "dcp.load", "safetensors, copy_"
ATOMIC, DIRECT, UNVERIFIED = "torchrelay", "torchrelay, atomic=False", "torchrelay, verify=False"
THREAD, PROCESS = "dcp.async_save, thread", "dcp.async_save, process"
STAGER = "dcp.async_save, thread, kept stager"
COPY = "two-thread copy_"

Phases = dict[str, float]

dcp: Any = _dcp  # it does not say which names it exports

_open: dict[str, torchrelay.Checkpointer] = {}
_stager: DefaultStager | None = None
_manager: Any = None


def installed(tools: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the tools that are here."""
    missing = () if find_spec(MANAGER) else (MANAGER,)
    return tuple(tool for tool in tools if tool not in missing)


def manager() -> Any:
    """Of torch_checkpointing, kept from lap to lap; its asynchronous saves need a GPU."""
    global _manager
    if _manager is None:
        from torch_checkpointing import CheckpointManager

        _manager = CheckpointManager(CheckpointManager.Config.with_sync_save())
    return _manager


def checkpointer(group: Any, folder: str, **options: Any) -> torchrelay.Checkpointer:
    """The one of a folder, kept from lap to lap as a trainer keeps it."""
    if folder not in _open:
        rare = torchrelay.options.CheckpointerOptions(**options)
        _open[folder] = torchrelay.Checkpointer(folder, group=group, timeout=100, options=rare)
    return _open[folder]


def close() -> None:
    """End what is kept, and its processes."""
    global _stager, _manager
    for kept in _open.values():
        kept.close()
    _open.clear()
    if _manager is not None:
        _manager.close()
        _manager = None
    if _stager is not None:
        _stager.close()
        _stager = None
    _async_process_executor._CHECKPOINT_PROCESS = None  # ends when nothing refers to it


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def save(how: str, group: Any, state: dict[str, Any], folder: str) -> Phases:
    if how == OURS:
        kept = checkpointer(group, folder)
        return kept.save(0, state).seconds
    if how == DCP:  # its writer's sync_files is on by default
        dcp.save(state, checkpoint_id=folder, process_group=group)
    elif how == DCP2:
        writer = dcp.FileSystemWriter(folder, thread_count=2)
        dcp.save(state, storage_writer=writer, process_group=group)
    elif how == MANAGER:
        manager().save(folder, state)
        for path in Path(folder).iterdir():
            _fsync(path)
    else:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder, "state")
        if how == SAFETENSORS:
            save_file(flat(state), path)
        else:
            torch.save(state, path)
        _fsync(path)
    return {}


def load(how: str, group: Any, state: dict[str, Any], folder: str) -> Phases:
    """Into the state's own tensors."""
    if how == LOAD_DCP:
        dcp.load(state, checkpoint_id=folder, process_group=group)
        return {}
    if how == MANAGER:
        manager().load(folder, into=state)
        return {}
    if how == LOAD_SAFETENSORS:
        mine = flat(state)
        device = next(iter(mine.values())).device
        found = load_file(Path(folder, "state"), device=str(device))
        for name, tensor in mine.items():
            tensor.copy_(found[name])
        return {}
    kept = checkpointer(group, folder)
    return kept.load(state, atomic=how != DIRECT, verify=how != UNVERIFIED).report.seconds


class Begun:
    """An asynchronous save whose state may change."""

    def __init__(self, done: Callable[[], bool], result: Callable[[], Phases]) -> None:
        self.done = done
        self.result = result


def save_async(how: str, group: Any, state: dict[str, Any], folder: str, step: int) -> Begun:
    """Returns when the caller may change the state."""
    global _stager
    if how == OURS:
        pending = checkpointer(group, folder).save_async(step, state)
        return Begun(pending.done, lambda: pending.result(100).seconds)  # type: ignore[union-attr]
    options: dict[str, Any] = {}
    if how == PROCESS:
        options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
    if how == STAGER:
        # The most that DCP has: staged memory is kept and shared, with a GPU also pinned.
        gpu = next(iter(flat(state).values())).is_cuda
        _stager = _stager or DefaultStager(StagingOptions(gpu, True, gpu, gpu))
        options["async_stager"] = _stager
    begun = dcp.async_save(state, checkpoint_id=folder, process_group=group, **options)
    if isinstance(begun, AsyncSaveResponse):
        begun.staging_completion.result(100)
        begun = begun.upload_completion
    upload: Future[Any] = begun

    def result() -> Phases:
        upload.result(100)
        return {}

    return Begun(upload.done, result)
