"""Reading and rebuilding tensors of every kind by their storage: `raw` gives an integer view of
the same memory, so that copies move bits whatever the dtype is. Callers deal in records and shapes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchrelay.errors import UnsupportedLeafError
from torchrelay.record import manifest as m
from torchrelay.record.dtypes import ITEM_SIZES
from torchrelay.state import torch_private as private
from torchrelay.state.boxed import BoxedTensor, Properties
from torchrelay.state.meshes import described_mesh
from torchrelay.state.torch_names import if_imported

if TYPE_CHECKING:  # importing it takes a second, which those who have no DTensor do not wait for
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as _Placement

    from torchrelay.state.torch_private import (
        DTensorSpec,
        ShardedTensor,
        ShardMetadata,
        TensorProperties,
    )

__all__ = ["DTensor", "DeviceMesh", "ShardedTensor"]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_SIZES if hasattr(torch, name)
}


class _Names(dict[torch.dtype, str]):
    """The name of each dtype; `UnsupportedLeafError` for one that a later torch has brought."""

    def __missing__(self, dtype: torch.dtype) -> str:
        raise UnsupportedLeafError(f"{dtype} is unknown to this version of torchrelay")


_ALL = {str(x).removeprefix("torch."): x for x in vars(torch).values() if type(x) is torch.dtype}
NAMES: dict[torch.dtype, str] = _Names((dtype, name) for name, dtype in DTYPES.items())
# Dtypes that torch can hold and not tell the limits of; its planners fail at these.
OPAQUE = {dtype for name, dtype in DTYPES.items() if re.match(r"bits|u?int[1-7]$", name)}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def dtype_named(name: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedLeafError(f"torch {torch.__version__} has no dtype {name}") from None


def any_dtype(name: str) -> torch.dtype:
    """A dtype that is itself a leaf. Tensors of it need not be supported."""
    found = _ALL.get(name)
    if found is None:
        raise UnsupportedLeafError(f"torch {torch.__version__} has no dtype {name}")
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """A strided tensor or parameter whose memory torch can show; no subclass."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not private.is_functional(tensor)
        and not private.is_functorch_wrapped(tensor)
    )


def raw(
    storage: torch.UntypedStorage,
    byte_offset: int,
    itemsize: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """An integer tensor over `storage`. 16-byte items get a trailing dimension of two."""
    carrier = torch.empty(0, dtype=CARRIERS[itemsize], device=storage.device)
    if itemsize == 16:
        shape, strides = (*shape, 2), (*(2 * stride for stride in strides), 1)
        itemsize = 8
    if byte_offset % itemsize:
        raise UnsupportedLeafError(f"memory not aligned to its item size of {itemsize} bytes")
    return carrier.set_(storage, byte_offset // itemsize, tuple(shape), tuple(strides))


def byte_offset(tensor: torch.Tensor) -> int:
    """Where the tensor's first element lies in its storage."""
    offset: int = tensor.storage_offset()  # type: ignore[assignment]
    return offset * tensor.element_size()


def storage_id(tensor: torch.Tensor) -> int:
    """Tells the storage of a tensor from others while it lives; an empty one has no address."""
    found: int = private.storage_handle_of(tensor.untyped_storage())
    return found


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    """The integer view of a strided tensor's own memory, whatever its conj and neg bits are."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    return raw(storage, byte_offset(tensor), size, tensor.shape, tensor.stride())


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Whether torch reads the tensor's memory as conjugated, and as negated. Neither is part of a
    state: what is sent and written are values."""
    return tensor.is_complex() and tensor.is_conj(), tensor.is_neg()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its values in memory of their own where it is lazily conjugated or negated."""
    if not any(lazy_bits(tensor)):
        return tensor
    strides = torch.empty_like(tensor, device="meta").stride()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    copy_values(made, tensor.detach())
    return made


def copy_values(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements of the same dtype exactly. A conj or neg bit on one side alone changes signs:
    arithmetic would quiet NaNs."""
    there, here = lazy_bits(source), lazy_bits(destination)
    elements = raw_of(source)
    if there != here:
        if not (source.is_complex() or source.is_floating_point()):
            try:
                destination.copy_(source)
            except RuntimeError as fault:
                raise UnsupportedLeafError(f"a negated view of {source.dtype}: {fault}") from None
            return
        size = source.element_size() // (2 if source.is_complex() else 1)
        flat = elements.clone(memory_format=torch.contiguous_format).reshape(-1)
        flat = flat.view(CARRIERS[size])
        sign = 0x80 if size == 1 else torch.iinfo(flat.dtype).min
        if there[1] != here[1]:
            flat.bitwise_xor_(sign)
        if there[0] != here[0]:
            flat[1::2].bitwise_xor_(sign)
        elements = flat.view(elements.dtype).view(elements.shape)
    raw_of(destination).copy_(elements)


def copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its destination, in as few kernels as torch can."""
    private.copy_each(destinations, sources)


def flat_bytes(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    return raw(storage, start, 1, (nbytes,), (1,))


def over_storage(
    storage: torch.UntypedStorage, byte_offset: int, leaf: m.TensorLeaf, strides: Sequence[int]
) -> torch.Tensor:
    """The tensor of a leaf over existing memory."""
    tensor = _empty(leaf.dtype, storage.device).new_empty(0)
    tensor.set_(storage, byte_offset // ITEM_SIZES[leaf.dtype], leaf.shape, tuple(strides))
    return with_flags(tensor, leaf.flags) if leaf.flags else tensor


@cache
def _empty(dtype: str, device: torch.device) -> torch.Tensor:
    """What tensors of a kind are made of: that is faster than from their names."""
    return torch.empty(0, dtype=dtype_named(dtype), device=device)


def without_storage(
    leaf: m.TensorLeaf, strides: Sequence[int], device: torch.device | str
) -> torch.Tensor:
    """A meta tensor or an empty one: shape and strides, no bytes."""
    tensor = torch.empty_strided(
        leaf.shape, tuple(strides), dtype=dtype_named(leaf.dtype), device=device
    )
    return with_flags(tensor, leaf.flags)


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each has been written to in place, as autograd counts it; -1 for inference tensors,
    which count nothing."""
    try:
        return list(map(private.version_of, tensors))
    except RuntimeError:
        of = private.version_of
        return [-1 if tensor.is_inference() else of(tensor) for tensor in tensors]


def note_written(tensors: Sequence[torch.Tensor]) -> None:
    """Have autograd count these as written to."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except RuntimeError:  # those made in inference mode are not counted
        counted = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(counted)


BLOCK = 512  # tensors that are asked several questions before the next: few fit into a cache


def blocks(tensors: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Some tensors at a time. What torch keeps of a tensor lies here and there in memory, and
    fetching it takes longer than looking at it."""
    for at in range(0, len(tensors), BLOCK):
        yield tensors[at : at + BLOCK]


def flags_of(tensor: torch.Tensor) -> int:
    flags = m.REQUIRES_GRAD if tensor.requires_grad else 0
    # Not isinstance: Parameter's metaclass makes that slow, and plain tensors are most of a state.
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        flags |= m.PARAMETER
    return flags


def with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    grad = bool(flags & m.REQUIRES_GRAD)
    if flags & m.PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.detach().requires_grad_() if grad else tensor


SPARSE = {
    torch.sparse_coo: "coo",
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a sparse tensor without gradient, coalesced or not."""
    if tensor.layout is torch.sparse_coo:
        return [private.indices_of(tensor)(), private.values_of(tensor)()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def sparse(
    layout: str, parts: Sequence[torch.Tensor], shape: Sequence[int], coalesced: bool
) -> torch.Tensor:
    """A sparse tensor of its parts; `RuntimeError` where they do not fit together."""
    # Where the parts are, whatever the default device is.
    how: dict[str, Any] = {"check_invariants": True, "device": parts[-1].device}
    if layout == "coo":
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, tuple(shape), is_coalesced=coalesced, **how)
    kind = next(known for known, name in SPARSE.items() if name == layout)
    make: Any = torch.sparse_compressed_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls compressed layouts a beta feature
        built: torch.Tensor = make(*parts, tuple(shape), layout=kind, **how)
    return built


def is_dtensor(leaf: object) -> TypeGuard[DTensor]:
    """A process that has not imported DTensors has none."""
    return is_dtensor_type(type(leaf))


def is_dtensor_type(kind: type) -> bool:
    dtensor = if_imported("torch.distributed.tensor.DTensor")
    return dtensor is not None and issubclass(kind, dtensor)


def is_sharded(leaf: object) -> TypeGuard[ShardedTensor | BoxedTensor]:
    """Whether its parts here are boxes that it names one by one, as those of a ShardedTensor are,
    which torch had before DTensors."""
    return isinstance(leaf, (*private.sharded_types(), BoxedTensor))


def is_distributed_type(kind: type) -> bool:
    kinds = (*private.sharded_types(), BoxedTensor)
    return issubclass(kind, kinds) or is_dtensor_type(kind)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is an `nn.Parameter`, also of a subclass; `isinstance` is slow there."""
    return type(tensor) is torch.nn.Parameter or private.is_marked_parameter(tensor)


def is_distributed(leaf: object) -> TypeGuard[DTensor | ShardedTensor | BoxedTensor]:
    return is_sharded(leaf) or is_dtensor(leaf)


def placement_record(placement: _Placement) -> m.Placement:
    from torch.distributed.tensor import placement_types as p

    if type(placement) is p.Shard:
        return m.Placement("shard", dim=placement.dim)
    if type(placement) is p.Replicate:
        return m.Placement("replicate")
    if type(placement) is p.Partial:
        return m.Placement("partial", reduce=str(placement.reduce_op))
    if isinstance(placement, private.StridedShard):
        return m.Placement("strided", dim=placement.dim, split=int(placement.split_factor))
    raise UnsupportedLeafError(f"DTensor placement {placement}")


def _placement(record: m.Placement) -> _Placement:
    from torch.distributed.tensor import placement_types as p

    if record.kind == "shard":
        return p.Shard(record.dim)
    if record.kind == "strided":
        strided: _Placement = private.StridedShard(record.dim, split_factor=record.split)
        return strided
    return p.Replicate() if record.kind == "replicate" else p.Partial(record.reduce)


def global_rank() -> int | None:
    """This process's rank as meshes count it, where there is a default group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else None


def dtensor_parts(tensor: DTensor) -> tuple[torch.Tensor, DTensorSpec]:
    return private.local_tensor_of(tensor), private.spec_of(tensor)


def dtensor(
    local: torch.Tensor, leaf: m.DTensorLeaf, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """A DTensor around `local`. Without `mesh` one is described, with no process groups behind it:
    making those is a collective call, which one rank alone cannot do."""
    from torch.distributed.tensor import DTensor

    if mesh is None:
        mesh = described_mesh(leaf.mesh, global_rank() or 0)
    spec = private.DTensorSpec(
        mesh,
        tuple([_placement(record) for record in leaf.placements]),
        tensor_meta=private.TensorMeta(torch.Size(leaf.shape), tuple(leaf.strides), local.dtype),
    )
    built: torch.Tensor = DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return with_flags(built, leaf.flags)


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor around another local tensor, of that one's dtype and in all else as `tensor` is."""
    from torch.distributed.tensor import DTensor

    spec = copy(private.spec_of(tensor))
    assert spec.tensor_meta is not None
    spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    built: torch.Tensor = DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return with_flags(built, flags_of(tensor))


def _box(shard: ShardMetadata) -> m.Box:
    placement = None if shard.placement is None else str(shard.placement)
    return m.Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes), placement)


def sharded_parts(
    tensor: ShardedTensor | BoxedTensor,
) -> tuple[list[torch.Tensor], tuple[m.Box, ...], tuple[m.Box, ...], TensorProperties | Properties]:
    """Local tensors and their boxes, all boxes, and the tensor's properties."""
    if isinstance(tensor, BoxedTensor):
        return tensor.locals_, tensor.boxes, tensor.all_boxes, tensor.properties
    shards = tensor.local_shards()
    meta = tensor.metadata()
    if meta.tensor_properties.memory_format is not torch.contiguous_format:
        raise UnsupportedLeafError("a ShardedTensor that is not in contiguous format")
    return (
        [shard.tensor for shard in shards],
        tuple([_box(shard.metadata) for shard in shards]),
        tuple([_box(shard) for shard in meta.shards_metadata]),
        meta.tensor_properties,
    )


def shard_metadata(box: m.Box, placement: str | None) -> ShardMetadata:
    return private.ShardMetadata(list(box.offsets), list(box.sizes), placement)


def sharded(locals_: Sequence[torch.Tensor], leaf: m.ShardedLeaf, rank: int) -> ShardedTensor:
    """A ShardedTensor whose local shards sit on this rank, as torch's transport builds it."""
    grad = bool(leaf.flags & m.REQUIRES_GRAD)
    shards = [
        private.OldShard(
            local.requires_grad_(grad), shard_metadata(box, f"rank:{rank}/{local.device}")
        )
        for local, box in zip(locals_, leaf.boxes, strict=True)
    ]
    metadata = private.ShardedTensorMetadata(
        shards_metadata=[shard_metadata(box, box.placement) for box in leaf.all_boxes],
        size=torch.Size(leaf.shape),
        tensor_properties=private.TensorProperties(
            dtype=dtype_named(leaf.dtype),
            requires_grad=grad,
            pin_memory=leaf.pinned,
        ),
    )
    built: ShardedTensor = private.sharded_of_shards(shards, sharded_tensor_metadata=metadata)
    return built
