"""torch's `PGTransport` protocol on a process group: one message for each tensor.

A message is known by its tag: 1 the length of the pickled record, 2 the record, 3 + i the i-th
storage as bytes. Messages are those of a stock sender. A received record is checked before a tensor
is asked for, and tensors are written into the caller's after the last one has arrived.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchrelay.dropin import torch_private as private
from torchrelay.dropin._pickles.state_record import loads
from torchrelay.dropin._torch_records import (
    SHARDED,
    _DTensorMeta,
    _prepare_state_dict,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
    _why_not,
)
from torchrelay.errors import MismatchError, RelayError, RemoteProtocolError, UnsupportedLeafError
from torchrelay.geometry.strides import extent
from torchrelay.memory.free import take_free
from torchrelay.memory.writable import READ_ONLY, ReadOnlyMemory
from torchrelay.state.backing import missing_memory
from torchrelay.state.tensors import dtensor_parts

if TYPE_CHECKING:
    from torchrelay.dropin.torch_private import KeyPath

LENGTH_TAG = 1
RECORD_TAG = 2
FIRST_TENSOR_TAG = 3
_IN_FLIGHT = 16
_PROTOCOL = 4  # of pickles: the default of Python 3.8 to 3.13, which peers may have
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)

Wait = Callable[[Work, str], None]
"""Blocks until the work is done; raises if it fails or if the caller's deadline passes."""


def send_torch(
    pg: ProcessGroup, dst_ranks: list[int], state_dict: object, device: torch.device, wait: Wait
) -> None:
    """Send the state to each rank, in the messages of a stock torch sender."""
    record, tensors = _prepare_state_dict(state_dict, device)
    data = _pickled(record)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    pending: list[tuple[Work, str]] = []

    def finish() -> None:
        for work, what in pending:
            wait(work, what)
        pending.clear()

    for rank in dst_ranks:
        pending.append((pg.send([length], rank, LENGTH_TAG), f"sending torch header to {rank}"))
        pending.append((pg.send([body], rank, RECORD_TAG), f"sending torch record to {rank}"))
    for i, tensor in enumerate(tensors):
        moved = tensor.to(device)
        for rank in dst_ranks:
            what = f"sending torch tensor {i + 1} of {len(tensors)} to {rank}"
            pending.append((pg.send([moved], rank, FIRST_TENSOR_TAG + i), what))
        # Copies are freed before the next is made; the rest is bounded for the transport's sake.
        if moved is not tensor or len(pending) >= _IN_FLIGHT:
            finish()
    finish()


def recv_torch(
    pg: ProcessGroup,
    src_rank: int,
    length: int,
    device: torch.device,
    wait: Wait,
    into: Mapping[KeyPath, object] | None = None,
) -> object:
    """Receive a stock sender's state, whose first message announced a record of `length` bytes.

    A tensor of `into` at the path of a sent one is written and returned; it is `MismatchError`
    if the two do not fit. Other tensors are new, on the CPU, and own no more than their bytes.
    On a refusal nothing is written. All messages of the sender are received, so that it can finish.
    """
    if not 0 < length <= 1 << 30:
        raise RemoteProtocolError(f"a record of {length} bytes was announced", rank=src_rank)
    body = torch.zeros(length, dtype=torch.uint8, device=device)
    wait(pg.recv([body], src_rank, RECORD_TAG), f"receiving torch record from {src_rank}")
    record = loads(body.cpu().numpy().tobytes())
    leaves = record.non_tensor_leaves
    parts = [part for leaf in leaves for part in _parts(leaf)]
    storages = _storages(pg, src_rank, parts, device, wait)
    try:
        _check_memory(parts, device)
        read_only = ReadOnlyMemory()
        targets = [
            _target(path, leaf, (into or {}).get(path), read_only)
            for path, leaf in zip(record.paths, leaves, strict=True)
        ]
    except RelayError as refusal:
        for _ in storages:
            pass
        refusal.rank = src_rank
        raise
    arrived = [
        [_tensor(part, next(storages), new=target is None) for part in _parts(leaf)]
        for leaf, target in zip(leaves, targets, strict=True)
    ]
    # Making a value can fail, if its record fits no tensor: writing comes after all of them.
    values = list(map(_value, leaves, targets, arrived))
    with torch.no_grad():
        for target, tensors in zip(targets, arrived, strict=True):
            if target is not None:
                _copy(target, *tensors)
    return private.tree_unflatten(values, record.treespec)


class _RecordPickler(pickle.Pickler):
    """Pickles a record for processes of other releases of torch.

    The mesh of a DTensor has a field more since torch 2.15, which cannot compare meshes without it;
    earlier ones do not look at it. Hashes that torch remembers are of this process alone.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (DeviceMesh, private.DTensorSpec):
            return NotImplemented
        reduced: Any = value.__reduce_ex__(_PROTOCOL)
        make, arguments, state, *_ = reduced
        added = {"_preserve_rank_order": False} if type(value) is DeviceMesh else {}
        return make, arguments, {**added, **state, "_hash": None}


def _pickled(record: _StateDictMeta) -> bytes:
    data = io.BytesIO()
    try:
        _RecordPickler(data, _PROTOCOL).dump(record)
        return data.getvalue()
    except Exception as fault:
        for path, leaf in zip(record.paths, record.non_tensor_leaves, strict=True):
            try:
                pickle.dumps(leaf)
            except Exception as cause:
                raise UnsupportedLeafError(
                    f"torch's PGTransport protocol pickles its leaves, and {type(leaf).__name__} "
                    f"cannot be: {cause}",
                    path=private.keystr(path),
                ) from cause
        raise UnsupportedLeafError(f"the tree of the state cannot be pickled: {fault}") from fault


def _parts(leaf: object) -> list[_TensorMeta]:
    """The tensors of a record's leaf in the order of their messages."""
    if isinstance(leaf, _ShardedTensorMeta):
        return leaf.local_shards_meta
    if isinstance(leaf, _DTensorMeta):
        return [leaf.local]
    return [leaf] if isinstance(leaf, _TensorMeta) else []


def _storages(
    pg: ProcessGroup, src_rank: int, parts: list[_TensorMeta], device: torch.device, wait: Wait
) -> Iterator[torch.Tensor]:
    """The bytes of each part as they come, with a few receives posted ahead."""
    posted: list[tuple[Work, torch.Tensor]] = []
    for i in range(len(parts)):
        for j in range(i + len(posted), min(i + _IN_FLIGHT, len(parts))):
            _check_memory(parts[j : j + 1], device)
            # Zeros: a message may be shorter than was said, and what was here before is not sent.
            buffer = torch.zeros(parts[j].nbytes, dtype=torch.uint8, device=device)
            posted.append((pg.recv([buffer], src_rank, FIRST_TENSOR_TAG + j), buffer))
        work, buffer = posted.pop(0)
        wait(work, f"receiving torch tensor {i + 1} of {len(parts)} from {src_rank}")
        yield buffer


def _check_memory(parts: list[_TensorMeta], device: torch.device) -> None:
    """`ResourceError` where the sender announces more than there is memory for."""
    if device.type == "cpu":
        take_free(sum(part.nbytes for part in parts), "the state that is announced")


def _target(
    path: KeyPath, sent: object, into: object, read_only: ReadOnlyMemory | None = None
) -> torch.Tensor | None:
    """The caller's tensor that takes a leaf of the sent state, if there is one. Raises for a leaf
    that cannot be taken, and `MismatchError` if the two do not fit."""
    if isinstance(sent, _ShardedTensorMeta):
        raise UnsupportedLeafError(f"the sender's tensor is {SHARDED}", path=private.keystr(path))
    if any(part.dtype in _QUANTIZED for part in _parts(sent)):
        raise UnsupportedLeafError(
            "the sender's quantized tensor came without its scale", path=private.keystr(path)
        )
    if not isinstance(into, torch.Tensor):
        return None
    if isinstance(sent, _DTensorMeta) and isinstance(into, DTensor):
        why = _other_placement(sent, into) or _misfit(sent.local, dtensor_parts(into)[0])
    elif isinstance(sent, _TensorMeta) and not isinstance(into, DTensor):
        why = _misfit(sent, into)
    else:
        kind = type(sent).__name__.strip("_").removesuffix("Meta")
        why = f"it is a {type(into).__name__}, and a {kind} was sent"
    read_only = read_only or ReadOnlyMemory()
    if why is None and read_only.has(_local(into)):
        why = f"it cannot be written: {READ_ONLY}"
    if why is not None:
        raise MismatchError(f"the destination does not fit: {why}", path=private.keystr(path))
    return into


def _tensor(part: _TensorMeta, storage: torch.Tensor, *, new: bool) -> torch.Tensor:
    """A tensor over the storage that came for it. A new one leaves the device at once, so that the
    device holds each once at most."""
    # Not `storage.view(dtype)`: the bytes need not be a whole number of items.
    view = torch.empty(0, dtype=part.dtype, device=storage.device).set_(
        storage.untyped_storage(), part.storage_offset, part.shape, part.stride
    )
    return _owned(view) if new else view


def _value(sent: object, target: torch.Tensor | None, tensors: list[torch.Tensor]) -> object:
    """The value of a leaf in the received state."""
    if target is not None:
        return target
    if isinstance(sent, _DTensorMeta):
        make: Any = DTensor
        return make(*tensors, sent.spec, requires_grad=False)
    return tensors[0] if tensors else sent


def _misfit(part: _TensorMeta, target: torch.Tensor) -> str | None:
    """Why a tensor cannot be written over another; None if it can."""
    reason = _why_not(target)
    if reason is not None:
        return f"it is {reason}"
    if any(step == 0 and n > 1 for n, step in zip(target.shape, target.stride(), strict=True)):
        return "its elements share memory (an expanded tensor)"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "it is an inference tensor, which cannot be written outside inference mode"
    if (why := missing_memory(target)) is not None:
        return f"it cannot be written: {why}"
    if part.dtype != target.dtype:
        return f"its dtype is {target.dtype}, and {part.dtype} was sent"
    if part.shape != target.shape:
        return f"its shape is {tuple(target.shape)}, and {tuple(part.shape)} was sent"
    return None


def _other_placement(sent: _DTensorMeta, into: DTensor) -> str | None:
    theirs, ours = sent.spec, dtensor_parts(into)[1]
    if tuple(theirs.shape) != tuple(ours.shape):
        return f"its whole shape is {tuple(ours.shape)}, and {tuple(theirs.shape)} was sent"
    if theirs.placements != ours.placements:
        return f"its placements are {ours.placements}, and {theirs.placements} were sent"
    if getattr(theirs, "shard_order", None) != getattr(ours, "shard_order", None):
        return "the dimensions of its mesh cut it in another order"
    layouts = [private.layout_of(spec.mesh) for spec in (theirs, ours)]
    if layouts[0].top_level_sizes != layouts[1].top_level_sizes:
        return "its mesh has another shape"
    # Ranks may differ, since the sender can be of another replica; its share of the tensor may not.
    here, there = ours.mesh.get_coordinate(), private.coordinate_of(theirs.mesh)
    if here is None or there is None:
        return None if here is there is None else "one of the two is outside of its mesh"
    for dim, placement in enumerate(ours.placements):
        if not isinstance(placement, Replicate) and here[dim] != there[dim]:
            return f"it is share {list(here)} of the mesh, and share {list(there)} was sent"
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return dtensor_parts(tensor)[0] if isinstance(tensor, DTensor) else tensor


def _copy(target: torch.Tensor, view: torch.Tensor) -> None:
    target = _local(target)
    # torch has no copy for types below a byte, and no other view of a lazily negated one.
    if target.dtype.itemsize == 1 and not target.is_neg():
        target, view = target.view(torch.uint8), view.view(torch.uint8)
    target.copy_(view)


def _owned(view: torch.Tensor) -> torch.Tensor:
    """The same values on the CPU, in a storage that holds little else."""
    storage: torch.UntypedStorage = view.untyped_storage().cpu()  # type: ignore[no-untyped-call]
    item, start = view.dtype.itemsize, int(view.storage_offset())
    size = extent(view.shape, view.stride()) * item

    def over(storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        return torch.empty(0, dtype=view.dtype, device="cpu").set_(
            storage, offset, view.shape, view.stride()
        )

    if size == storage.nbytes():
        return over(storage, start)
    if size <= view.numel() * item:  # dense or overlapping: the strides can stay
        return over(storage[start * item : start * item + size].clone(), 0)
    whole = over(storage, start)
    return whole.view(torch.uint8).clone().view(view.dtype) if item == 1 else whole.clone()
