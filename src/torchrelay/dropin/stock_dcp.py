"""Stock checkpoints: torch's DCP directories and `torch.save` files, read without running them.

A DCP directory holds a pickle, `.metadata`, and files of `torch.save` archives. The pickle is read
by a closed reader that calls nothing; the archives by `torch.load(weights_only=True)`. Anything
that either refuses is refused here by name, and never loaded another way.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import os
import pickle
import types
import uuid
import warnings
import zipfile
import zoneinfo
from collections.abc import Callable
from contextlib import closing
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from torchrelay.dropin import torch_private as private
from torchrelay.dropin.dcp_directory import StockDirectory, load_archive, load_unchecked
from torchrelay.errors import (
    CheckpointError,
    ManifestError,
    RelayError,
    UnsupportedLeafError,
    UsageError,
)
from torchrelay.files import exists, is_dir
from torchrelay.inspection.file_kinds import is_torch_save
from torchrelay.state import paths
from torchrelay.state.checkpointable import boxed, is_checkpointable
from torchrelay.state.tensors import is_sharded
from torchrelay.state.tree import is_namedtuple, show
from torchrelay.stores.local.files import atomic_file
from torchrelay.system import sync

_MAX_HOLES = 1 << 16
_PROPERTIES = 5  # fields of a tensor that every torch reads

# Types that `torch.load(weights_only=True)` reads.
_AS_THEY_ARE = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.Size, torch.dtype, torch.device),
)
_SPELLED: dict[type, Callable[[Any], Any]] = {
    **{
        kind: lambda value: value.isoformat()
        for kind in (datetime.date, datetime.time, datetime.datetime)
    },
    datetime.timedelta: datetime.timedelta.total_seconds,
    **dict.fromkeys((datetime.timezone, zoneinfo.ZoneInfo), str),
    **dict.fromkeys((uuid.UUID, decimal.Decimal, fractions.Fraction), str),
}
_NUMBERS = (np.bool_, np.integer, np.floating, np.complexfloating)


def read_stock(path: str | os.PathLike[str], *, check_crc: bool = True) -> dict[str, Any]:
    """The whole state of a stock DCP directory, nested as it was saved, its tensors on the CPU.

    Nested is what `planner_data` tells; without it the dict is flat, by torch's dotted names. The
    format itself turns keys of dicts into text and leaves no trace of empty dicts: an empty dict
    among the items of a list comes back as `None`.

    Nothing that the directory holds is executed. `ManifestError`: no valid checkpoint.
    `DigestError`: a value is damaged. `UnsupportedLeafError`: an object that only pickle could
    make; `path` is its name. `check_crc=False` is for checkpoints written under
    `torch.serialization.set_crc32_options(False)`, which carry no checksums.
    """
    try:
        with closing(StockDirectory(path, check_crc=check_crc)) as directory:
            values = {fqn: directory.value(fqn) for fqn in directory.items}
    except OSError as fault:
        raise CheckpointError(f"could not be read: {fault}", file=str(path)) from fault
    return _nested(values, directory.paths)


def write_stock(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write `state` as a stock DCP directory, from this process alone.

    The directory is new or empty. Values are in types that `torch.load(weights_only=True)` reads
    (`torch_values`). `read_stock` says what the format does not keep. Dicts whose keys are the same
    text, as 1 and "1", are refused, and so are tensors that this process has only a shard of.
    Torch 2.11 and later read it, whichever wrote it. `.metadata` gets its name last, once it was
    read back: only then the checkpoint exists. After a failure nothing is left.
    """
    folder = Path(path)
    if exists(folder) and (not is_dir(folder) or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; give a new directory")
    state = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}
    state = _with_whole_tensors(torch_values(state))
    _refuse_shards(state)
    was_there = is_dir(folder)
    try:
        _write_stock(folder, state)
    except BaseException:
        for file in folder.glob("*") if is_dir(folder) else ():
            file.unlink()
        if is_dir(folder) and not was_there:
            folder.rmdir()
        raise


def _write_stock(folder: Path, state: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            # It warns that nothing is distributed, which is what was asked for.
            warnings.simplefilter("ignore", UserWarning)
            writer = _StockWriter(folder)
            writer.fs = _ReadBack()
            save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as fault:
        cause = fault.failures[min(fault.failures)][0]
        if not isinstance(cause, Exception) or isinstance(cause, RelayError):
            raise cause from None
        if isinstance(cause, (ValueError, TypeError, AttributeError, pickle.PicklingError)):
            raise UnsupportedLeafError(f"stock DCP cannot hold this state: {cause}") from cause
        raise CheckpointError(f"stock DCP failed: {_reason(cause)}", file=str(folder)) from cause


class _StockWriter(FileSystemWriter):
    """Torch's writer, which hands its record to `_ReadBack`."""

    fs: _ReadBack

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # Torch 2.11 adds these to a copy of the record.
        metadata.storage_data = {one.index: one.storage_data for rank in results for one in rank}
        metadata.storage_meta = self.storage_meta()
        self.fs.metadata = metadata
        super().finish(metadata, results)


class _MetadataPickler(pickle.Pickler):
    """Pickles a record as torch 2.11 and later read it. Torch 2.15 adds the strides that a tensor
    had to its properties, and an older one fails on a sixth field."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is TensorProperties:
            reduced: Any = value.__reduce_ex__(2)
            make, arguments, state, *_ = reduced
            return make, arguments, state[:_PROPERTIES]
        return NotImplemented


class _ReadBack(FileSystem):
    """Gives `.metadata` its name only once it was read back and the files have what it tells."""

    metadata: Metadata

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        with Path(path).open("wb") as file:
            _MetadataPickler(file, 4).dump(self.metadata)  # the default before Python 3.14
            file.flush()
            sync(file.fileno())
        try:
            StockDirectory(Path(new_path).parent, metadata=Path(path)).close()
        except ManifestError as fault:
            raise CheckpointError(
                f"the checkpoint cannot be read back, so it was not made one: {fault.message}",
                file=str(new_path),
            ) from fault
        super().rename(path, new_path)


def read_torch_save(path: str | os.PathLike[str], *, check_crc: bool = True) -> Any:
    """The object that `torch.save` wrote, with tensors on the CPU; nothing is executed.

    Raises `UnsupportedLeafError` if it contains more than `weights_only=True` allows,
    `ManifestError` for another kind of file, `DigestError` for a damaged one, and
    `CheckpointError` if it cannot be read at all.
    `check_crc` is as for `read_stock`; files from before torch 1.6 have no checksums.
    """
    try:
        if not is_torch_save(Path(path)):
            raise ManifestError("it is not a torch.save file")
        with Path(path).open("rb") as file:
            if zipfile.is_zipfile(file):
                return load_archive(file, check_crc)
            return load_unchecked(file)
    except RelayError as fault:
        fault.message = f"{path} was refused: {fault.message}"
        raise
    except OSError as fault:
        raise CheckpointError(f"could not be read: {fault}", file=str(path)) from fault
    except Exception as fault:
        raise ManifestError(f"{path} is not an intact torch.save file: {fault!r:.300}") from fault


def write_torch_save(path: str | os.PathLike[str], state: Any) -> None:
    """`torch.save`, but an existing file is replaced only by a whole and synced one, and values are
    in types that `weights_only=True` reads (`torch_values`)."""
    state = torch_values(state)
    try:
        with atomic_file(Path(path)) as file:
            torch.save(state, file)
    except (pickle.PicklingError, TypeError, AttributeError) as fault:
        raise UnsupportedLeafError(f"torch.save cannot hold this state: {fault}") from fault
    except (OSError, RuntimeError) as fault:
        raise CheckpointError(f"cannot be written: {_reason(fault)}", file=str(path)) from fault


def _reason(fault: BaseException) -> str:
    """Why something could not be written: what the system said, where torch's writer, which then
    fails at its own end, hides it."""
    found: BaseException | None = fault
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return repr(fault) if found is None else found.strerror or str(found)


def _with_whole_tensors(state: Any, path: paths.Path = ()) -> Any:
    """The state with whole tensors in the places of those that this process has all boxes of."""
    if is_checkpointable(state):
        with paths.naming(path):
            found = boxed(state)
        return found.joined() if found.is_whole else found
    if isinstance(state, dict):
        made = {key: _with_whole_tensors(value, (*path, key)) for key, value in state.items()}
        return made if type(state) is dict else type(state)(made)
    if type(state) in (list, tuple):
        items = [_with_whole_tensors(value, (*path, place)) for place, value in enumerate(state)]
        return items if type(state) is list else tuple(items)
    return state


def _refuse_shards(state: dict[str, Any]) -> None:
    """torch's `save` would write the part that is here as if it were a checkpoint."""
    try:
        leaves, _ = private.flatten_state_dict(state)
    except ValueError as fault:
        raise UnsupportedLeafError(f"stock DCP cannot hold this state: {fault}") from fault
    for fqn, leaf in leaves.items():
        if is_sharded(leaf) or (
            isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements)
        ):
            raise UnsupportedLeafError(
                "one process has only a shard of this tensor: gather it first, or save with all "
                "ranks by torchrelay.dropin.Checkpointer",
                path=fqn,
            )


class _Container(dict[Any, Any]):
    """A container of the state, as a dict: dicts among the loaded values are leaves."""


def _nested(values: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> dict[str, Any]:
    """The values at their paths."""
    root = _Container()
    for fqn, value in values.items():
        *above, last = paths.get(fqn, (fqn,))
        here = root
        for step in above:
            here = here.setdefault(step, _Container())
            if type(here) is not _Container:
                raise ManifestError("a value has the path of a container of the state", path=fqn)
        if last in here:
            raise ManifestError("two values have one place in the state", path=fqn)
        here[last] = value
    holes = _MAX_HOLES

    def with_values(value: Any) -> Any:
        """A branch as the dict or the list that it stands for. Paths bound its depth."""
        nonlocal holes
        if type(value) is not _Container:
            return value
        items = {key: with_values(item) for key, item in value.items()}
        numbered = [type(key) is int for key in items]
        if not any(numbered):
            return items
        if not all(numbered):
            raise ManifestError("numbers and text are keys of one container of the state")
        length = max(items) + 1
        holes -= length - len(items)
        if holes < 0:
            raise ManifestError("a list of the state has more holes than a checkpoint can have")
        return [items.get(n) for n in range(length)]

    return {key: with_values(item) for key, item in root.items()}


def torch_values(value: Any, path: paths.Path = ()) -> Any:
    """The state with each value in the nearest of those types: arrays are tensors, numpy's scalars
    Python's, deques lists, namedtuples tuples, paths text, buffers bytes; namespaces dicts; dates,
    times (ISO 8601), time zones, UUIDs, Decimals and Fractions text, timedeltas seconds, ranges and
    slices tuples of three, frozensets sets, or tuples inside of a set.

    `UnsupportedLeafError` names the path of anything else.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        made = {key: torch_values(item, (*path, key)) for key, item in value.items()}
        keeps = kind in (collections.OrderedDict, collections.Counter)
        return kind(made) if keeps else made
    if kind in (list, tuple, collections.deque) or is_namedtuple(kind):
        items = [torch_values(item, (*path, place)) for place, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if kind in (set, frozenset):
        return {_member(item, path) for item in value}
    if kind in _SPELLED:
        return _SPELLED[kind](value)
    if kind in (range, slice):
        return torch_values((value.start, value.stop, value.step), path)
    if kind in (argparse.Namespace, types.SimpleNamespace):
        return torch_values(vars(value), path)
    if kind is np.ndarray:
        return _tensor(value, path)
    if isinstance(value, (np.str_, np.bytes_)) or (
        isinstance(value, _NUMBERS) and not isinstance(value, (np.longdouble, np.clongdouble))
    ):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    if kind is io.BytesIO:
        return value.getvalue()
    raise _refused(f"a leaf of type {kind.__name__}", path)


def _member(member: Any, path: paths.Path) -> Any:
    """A member of a set in such a type, which can be one again."""
    kind = type(member)
    if kind is tuple:
        return tuple([_member(item, path) for item in member])
    if kind is frozenset:
        return tuple(sorted([_member(item, path) for item in member], key=repr))
    if kind in (*_AS_THEY_ARE, *_SPELLED, range) or isinstance(member, PurePath):
        return torch_values(member, path)
    raise _refused(f"a set with a {kind.__name__} in it", path)


def _tensor(array: np.ndarray[Any, Any], path: paths.Path) -> torch.Tensor:
    try:
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        return torch.from_numpy(native.reshape(array.shape).copy())
    except TypeError:
        raise _refused(f"a numpy array of dtype {array.dtype}", path) from None


def _refused(what: str, path: paths.Path) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{what} is not written, because torch.load(weights_only=True) would not read it: put "
        "tensors and plain values in its place",
        path=show(path),
    )


__all__ = ["read_stock", "read_torch_save", "write_stock", "write_torch_save"]
