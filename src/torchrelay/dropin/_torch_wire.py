"""torch's `PGTransport` protocol on a process group: one message for each tensor.

A message is known by its tag: 1 the length of the pickled record, 2 the record, 3 + i the i-th
storage as bytes. Messages are those of a stock sender. A received record is checked before a tensor
is asked for, and tensors are written into the caller's after the last one has arrived.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import KeyPath, keystr, tree_unflatten

from torchrelay.dropin._pickles.state_record import loads
from torchrelay.dropin._torch_records import (
    _DTensorMeta,
    _prepare_state_dict,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
    _why_not,
)
from torchrelay.errors import (
    MismatchError,
    RelayError,
    RemoteProtocolError,
    UnsupportedLeafError,
)
from torchrelay.geometry.strides import extent

LENGTH_TAG = 1
RECORD_TAG = 2
FIRST_TENSOR_TAG = 3
_IN_FLIGHT = 16
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
    parts = list(_parts(record.non_tensor_leaves))
    try:
        leaves = [
            _Leaf.of(path, leaf, (into or {}).get(path))
            for path, leaf in zip(record.paths, record.non_tensor_leaves, strict=True)
        ]
    except RelayError as refusal:
        for _ in _storages(pg, src_rank, parts, device, wait):
            pass
        refusal.rank = src_rank
        raise
    targets = [target for leaf in leaves for target in leaf.targets]
    arrived: list[torch.Tensor] = []
    storages = _storages(pg, src_rank, parts, device, wait)
    for part, target, storage in zip(parts, targets, storages, strict=True):
        # Not `storage.view(dtype)`: the bytes need not be a whole number of items.
        view = torch.empty(0, dtype=part.dtype, device=storage.device).set_(
            storage.untyped_storage(), part.storage_offset, part.shape, part.stride
        )
        # New tensors leave the device at once, so that the device holds each once at most.
        arrived.append(_owned(view) if target is None else view)
    rest = iter(arrived)
    values = [leaf.value(rest) for leaf in leaves]
    # Making a value can fail, if its record fits no tensor: writing comes after all of them.
    with torch.no_grad():
        for target, view in zip(targets, arrived, strict=True):
            if target is not None:
                _copy(target, view)
    return tree_unflatten(values, record.treespec)


def _pickled(record: _StateDictMeta) -> bytes:
    try:
        return pickle.dumps(record)
    except Exception as fault:
        for path, leaf in zip(record.paths, record.non_tensor_leaves, strict=True):
            try:
                pickle.dumps(leaf)
            except Exception as cause:
                raise UnsupportedLeafError(
                    f"torch's PGTransport protocol pickles its leaves, and {type(leaf).__name__} "
                    f"cannot be: {cause}",
                    path=keystr(path),
                ) from cause
        raise UnsupportedLeafError(f"the tree of the state cannot be pickled: {fault}") from fault


def _parts(leaves: Sequence[object]) -> Iterator[_TensorMeta]:
    """The tensors of a record's leaves in the order of their messages."""
    for leaf in leaves:
        if isinstance(leaf, _TensorMeta):
            yield leaf
        elif isinstance(leaf, _DTensorMeta):
            yield leaf.local
        elif isinstance(leaf, _ShardedTensorMeta):
            yield from leaf.local_shards_meta


def _storages(
    pg: ProcessGroup, src_rank: int, parts: list[_TensorMeta], device: torch.device, wait: Wait
) -> Iterator[torch.Tensor]:
    """The bytes of each part as they come, with a few receives posted ahead."""
    posted: list[tuple[Work, torch.Tensor]] = []
    for i in range(len(parts)):
        for j in range(i + len(posted), min(i + _IN_FLIGHT, len(parts))):
            # Zeros: a message may be shorter than was said, and what was here before is not sent.
            buffer = torch.zeros(parts[j].nbytes, dtype=torch.uint8, device=device)
            posted.append((pg.recv([buffer], src_rank, FIRST_TENSOR_TAG + j), buffer))
        work, buffer = posted.pop(0)
        wait(work, f"receiving torch tensor {i + 1} of {len(parts)} from {src_rank}")
        yield buffer


class _Leaf(NamedTuple):
    """One leaf of the sent state, and the caller's that takes it."""

    sent: object
    into: torch.Tensor | None  # the caller's leaf
    targets: Sequence[torch.Tensor | None]  # for each message, the plain tensor that is written

    @classmethod
    def of(cls, path: KeyPath, sent: object, into: object) -> _Leaf:
        """Match the two; `MismatchError` says why they do not fit."""
        parts = list(_parts([sent]))
        if any(part.dtype in _QUANTIZED for part in parts):
            raise UnsupportedLeafError(
                "the sender's quantized tensor came without its scale", path=keystr(path)
            )
        if not isinstance(into, torch.Tensor):
            return cls(sent, None, [None] * len(parts))
        targets: Sequence[torch.Tensor] = [into]
        why = None
        if isinstance(sent, _DTensorMeta) and isinstance(into, DTensor):
            targets, why = [into._local_tensor], _other_placement(sent, into)
        elif isinstance(sent, _ShardedTensorMeta) and isinstance(into, ShardedTensor):
            targets, why = _matching_shards(sent, into)
        elif not isinstance(sent, _TensorMeta) or isinstance(into, DTensor | ShardedTensor):
            kind = type(sent).__name__.strip("_").removesuffix("Meta")
            why = f"it is a {type(into).__name__}, and a {kind} was sent"
        if why is None:
            why = next(filter(None, map(_misfit, parts, targets)), None)
        if why is not None:
            raise MismatchError(f"the destination does not fit: {why}", path=keystr(path))
        return cls(sent, into, targets)

    def value(self, arrived: Iterator[torch.Tensor]) -> object:
        """The value of this leaf in the received state; takes its tensors off `arrived`."""
        tensors = [next(arrived) for _ in self.targets]
        if self.into is not None:
            return self.into
        if isinstance(self.sent, _DTensorMeta):
            make: Any = DTensor
            return make(tensors[0], self.sent.spec, requires_grad=False)
        if isinstance(self.sent, _ShardedTensorMeta):
            return _sharded(self.sent, tensors)
        return tensors[0] if tensors else self.sent


def _misfit(part: _TensorMeta, target: torch.Tensor) -> str | None:
    """Why a tensor cannot be written over another; None if it can."""
    reason = _why_not(target)
    if reason is not None:
        return f"it is {reason}"
    if any(step == 0 and n > 1 for n, step in zip(target.shape, target.stride(), strict=True)):
        return "its elements share memory (an expanded tensor)"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "it is an inference tensor, which cannot be written outside inference mode"
    if part.dtype != target.dtype:
        return f"its dtype is {target.dtype}, and {part.dtype} was sent"
    if part.shape != target.shape:
        return f"its shape is {tuple(target.shape)}, and {tuple(part.shape)} was sent"
    return None


def _other_placement(sent: _DTensorMeta, into: DTensor) -> str | None:
    theirs, ours = sent.spec, into._spec
    if tuple(theirs.shape) != tuple(ours.shape):
        return f"its whole shape is {tuple(ours.shape)}, and {tuple(theirs.shape)} was sent"
    if theirs.placements != ours.placements:
        return f"its placements are {ours.placements}, and {theirs.placements} were sent"
    if theirs.mesh._layout.top_level_sizes != ours.mesh._layout.top_level_sizes:
        return "its mesh has another shape"
    # Ranks may differ, since the sender can be of another replica; its share of the tensor may not.
    here, there = ours.mesh.get_coordinate(), theirs.mesh._coordinate_on_dim
    if here is None or there is None:
        return None if here is there is None else "one of the two is outside of its mesh"
    for dim, placement in enumerate(ours.placements):
        if not isinstance(placement, Replicate) and here[dim] != there[dim]:
            return f"it is share {list(here)} of the mesh, and share {list(there)} was sent"
    return None


def _matching_shards(
    sent: _ShardedTensorMeta, into: ShardedTensor
) -> tuple[list[torch.Tensor], str | None]:
    """The caller's shard for each that was sent, or why there is none."""
    if sent.sharded_tensor_metadata.size != into.metadata().size:
        return [], "its whole size differs"
    ours = {_box(shard.metadata): shard.tensor for shard in into.local_shards()}
    boxes = [_box(shard) for shard in sent.local_shards_shard_metadata]
    if sorted(boxes) != sorted(ours):
        return [], f"its shards (offsets, sizes) are {sorted(ours)}, and {sorted(boxes)} were sent"
    return [ours[box] for box in boxes], None


def _box(shard: ShardMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(shard.shard_offsets), tuple(shard.shard_sizes)


def _sharded(sent: _ShardedTensorMeta, tensors: list[torch.Tensor]) -> ShardedTensor:
    """The sender's shards as this rank's, as torch makes them."""
    here = _remote_device(f"rank:{dist.get_rank()}/cpu")
    shards = [
        Shard(tensor.contiguous(), dataclasses.replace(metadata, placement=here))
        for tensor, metadata in zip(tensors, sent.local_shards_shard_metadata, strict=True)
    ]
    make: Any = ShardedTensor._init_from_local_shards_and_global_metadata
    try:
        made: ShardedTensor = make(shards, sent.sharded_tensor_metadata)
    except Exception as fault:  # torch refuses in many ways: shards that overlap, no shards at all
        raise RemoteProtocolError(
            f"a ShardedTensor cannot be made as sent: {fault!r:.200}"
        ) from fault
    return made


def _copy(target: torch.Tensor, view: torch.Tensor) -> None:
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
