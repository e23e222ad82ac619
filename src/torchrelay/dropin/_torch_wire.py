"""torch's `PGTransport` protocol on a process group: one message for each tensor.

A message is known by its tag: 1 the length of the pickled record, 2 the record, 3 + i the i-th
storage as bytes. Messages are those of a stock sender. A received record is checked before a tensor
is asked for, and tensors are written into the caller's after the last one has arrived.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, keystr, tree_unflatten

from torchrelay.dropin._pickles.state_record import loads
from torchrelay.dropin._torch_records import (
    _DTensorMeta,
    _prepare_state_dict,
    _ShardedTensorMeta,
    _StateDictMeta,
    _TensorMeta,
)
from torchrelay.errors import RelayError, RemoteProtocolError, UnsupportedLeafError
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.seam import land
from torchrelay.plan.snapshot import capture

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
    into: object = None,
) -> object:
    """Receive a stock sender's state, whose first message announced a record of `length` bytes.

    Tensors are new, on the CPU, and own no more than their bytes. With `into` its tensors are
    written instead, if all of them fit, once everything has arrived; what it lacks is new. All
    messages of the sender are received before anything is refused, so that it can finish.
    """
    if not 0 < length <= 1 << 30:
        raise RemoteProtocolError(f"a record of {length} bytes was announced", rank=src_rank)
    body = torch.zeros(length, dtype=torch.uint8, device=device)
    wait(pg.recv([body], src_rank, RECORD_TAG), f"receiving torch record from {src_rank}")
    record = loads(body.cpu().numpy().tobytes())
    parts = list(_parts(record.non_tensor_leaves))
    views = (
        _view(part, storage)
        for part, storage in zip(parts, _storages(pg, src_rank, parts, device, wait), strict=True)
    )
    # New tensors leave the device at once, so that the device holds each once at most.
    arrived = iter([_owned(view) if into is None else view for view in views])
    try:
        leaves = zip(record.paths, record.non_tensor_leaves, strict=True)
        values = [_value(path, leaf, arrived, into is None) for path, leaf in leaves]
        state = tree_unflatten(values, record.treespec)
        return state if into is None else _landed(state, into)
    except RelayError as refusal:
        refusal.rank = src_rank
        raise


def _landed(state: object, into: object) -> object:
    """The state written into a destination, as one that came by the relay's protocol would be."""
    options = LandingOptions(
        strict=False,
        atomic=False,
        device=torch.device("cpu"),
        shards="replica",
        make_missing=True,
        rank=dist.get_rank(),
    )
    snapshot = capture(state)
    landing = land(snapshot.record, into, options)
    for index, nbytes in enumerate(landing.chunks.sizes):
        chunk = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        snapshot.read(index, chunk)
        landing.write(index, chunk)
    return landing.commit().state


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


def _view(part: _TensorMeta, storage: torch.Tensor) -> torch.Tensor:
    # Not `storage.view(dtype)`: the bytes need not be a whole number of items.
    return torch.empty(0, dtype=part.dtype, device=storage.device).set_(
        storage.untyped_storage(), part.storage_offset, part.shape, part.stride
    )


def _value(path: KeyPath, sent: object, arrived: Iterator[torch.Tensor], is_new: bool) -> object:
    """The value of a leaf in the received state; takes its tensors off `arrived`."""
    parts = list(_parts([sent]))
    tensors = [next(arrived) for _ in parts]
    if any(part.dtype in _QUANTIZED for part in parts):
        raise UnsupportedLeafError(
            "the sender's quantized tensor came without its scale", path=keystr(path)
        )
    if isinstance(sent, _DTensorMeta):
        make: Any = DTensor
        return make(tensors[0], sent.spec, requires_grad=False)
    if isinstance(sent, _ShardedTensorMeta):
        return _sharded(sent, tensors, is_new)
    return tensors[0] if tensors else sent


def _sharded(sent: _ShardedTensorMeta, tensors: list[torch.Tensor], is_new: bool) -> ShardedTensor:
    """The sender's shards as this rank's, as torch makes them."""
    here = _remote_device(f"rank:{dist.get_rank()}/cpu")
    mine, whole = sent.local_shards_shard_metadata, sent.sharded_tensor_metadata
    shards = [
        Shard(tensor.contiguous(), dataclasses.replace(metadata, placement=here))
        for tensor, metadata in zip(tensors, mine, strict=True)
    ]
    if mine and not is_new:
        # The sender may be of a replica that knows nothing of this rank, which torch would refuse.
        boxes = {_box(shard) for shard in mine}
        placed = [
            dataclasses.replace(s, placement=here if _box(s) in boxes else mine[0].placement)
            for s in whole.shards_metadata
        ]
        whole = dataclasses.replace(whole, shards_metadata=placed)
    make: Any = ShardedTensor._init_from_local_shards_and_global_metadata
    try:
        made: ShardedTensor = make(shards, whole)
    except Exception as fault:  # torch refuses in many ways: shards that overlap, no shards at all
        raise RemoteProtocolError(
            f"a ShardedTensor cannot be made as sent: {fault!r:.200}"
        ) from fault
    return made


def _box(shard: ShardMetadata) -> str:
    return f"{shard.shard_offsets} {shard.shard_sizes}"  # text, which has a secret hash


def _owned(view: torch.Tensor) -> torch.Tensor:
    """The same values on the CPU, in a storage that holds little else."""
    storage: torch.UntypedStorage = view.untyped_storage().cpu()  # type: ignore[no-untyped-call]
    item, start = view.dtype.itemsize, int(view.storage_offset())
    reach = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    size = 0 if view.numel() == 0 else reach * item

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
