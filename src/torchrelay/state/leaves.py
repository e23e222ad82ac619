"""Leaves of every kind: object to record, record to object, and whether a destination fits.

Each kind reduces to strided tensors (its *parts*), whose bytes `images` and `landing` deal with,
and a record that says how to put the parts together again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.record import manifest as m
from torchrelay.record.dtypes import dtype_from_text, dtype_to_text
from torchrelay.record.manifest import parts
from torchrelay.record.typed import MissingZoneError, PartError, decode_typed, encode_typed
from torchrelay.record.values import Typed
from torchrelay.state import tensors as t
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.checkpointable import checkpointable
from torchrelay.state.dtensor_pieces import placement_records
from torchrelay.state.hints import UNINITIALIZED
from torchrelay.state.meshes import mesh_record
from torchrelay.state.paths import Path, naming
from torchrelay.state.refusals import QUANTIZED, refusal
from torchrelay.state.registry import subclass_name, subclass_named
from torchrelay.state.tree import check_types, flatten, unflatten


class Add(Protocol):
    def __call__(self, tensor: torch.Tensor, *, separate: bool = False) -> int:
        """Take a part in; returns its number. `separate`: whatever else lies in its memory."""


Part = Callable[[m.TensorLeaf], torch.Tensor]


def describe(leaf: object, path: Path, add: Add) -> m.Leaf:
    """Hand the leaf's parts to `add`; its record, where each part is a number: `storage` has it.

    `UnsupportedLeafError` names the path of what cannot travel exactly.
    """
    with naming(path):
        return _tensor(leaf, path, add) if isinstance(leaf, torch.Tensor) else _value(leaf, add)


def _numbered(number: int) -> m.TensorLeaf:
    return m.TensorLeaf("", (), None, number)


def _value(leaf: object, add: Add) -> m.Leaf:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _array(leaf, add)
    if isinstance(leaf, torch.Size):
        return m.SizeLeaf(tuple(leaf))
    if isinstance(leaf, torch.dtype):
        return m.ValueLeaf("dtype", str(leaf).removeprefix("torch."))
    if isinstance(leaf, torch.device):
        return m.ValueLeaf("device", str(leaf))
    try:
        value = encode_typed(leaf)
    except PartError as fault:
        raise UnsupportedLeafError(refusal(leaf, fault.part)) from None
    except (ValueError, RecursionError) as fault:
        raise UnsupportedLeafError(f"a {type(leaf).__name__} cannot travel: {fault}") from None
    return m.ValueLeaf("object" if isinstance(value, Typed) else "plain", value)


def _array(leaf: np.ndarray[Any, Any] | np.generic, add: Add) -> m.ArrayLeaf:
    if type(leaf) is not np.ndarray and not isinstance(leaf, np.generic):
        raise UnsupportedLeafError(refusal(leaf))
    array = np.asarray(leaf)
    if isinstance(leaf, (np.str_, np.bytes_)) and array[()] != leaf:
        raise UnsupportedLeafError(
            f"a {type(leaf).__name__} with zeros at its end, which numpy drops, cannot travel: use "
            "bytes or str"
        )
    try:
        text = dtype_to_text(array.dtype)
    except TypeError as fault:
        raise UnsupportedLeafError(
            f"an array of {fault} cannot travel: put numbers in it"
        ) from None
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = np.ravel(array, order="F" if fortran else "C")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a read-only array: it is only read here
        number = add(torch.from_numpy(flat.view(np.uint8)), separate=True) if array.nbytes else -1
    scalar = isinstance(leaf, np.generic)
    return m.ArrayLeaf(text, array.shape, fortran, number, array.nbytes, scalar)


def _tensor(leaf: torch.Tensor, path: Path, add: Add) -> m.Leaf:
    if t.is_plain(leaf):
        return _numbered(add(leaf))
    if t.is_dtensor(leaf):
        local = _plain_part(t.dtensor_parts(leaf)[0], "the local part of a DTensor", add)
        return dtensor_leaf(leaf, local, _flags_of_whole(leaf))
    if t.is_sharded(leaf):
        return _sharded(leaf, add)
    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
        if leaf.layout in t.SPARSE:
            return _sparse(leaf, add)
        if leaf.is_quantized:
            raise UnsupportedLeafError(QUANTIZED)
        raise UnsupportedLeafError("a nested, functional or transformed tensor")
    if torch.nn.parameter.is_lazy(leaf):
        raise UnsupportedLeafError(UNINITIALIZED)
    if hasattr(leaf, "__tensor_flatten__"):
        return _subclass(leaf, path, add)
    raise UnsupportedLeafError(
        f"tensor subclass {type(leaf).__name__} does not say how to flatten itself "
        "(__tensor_flatten__)"
    )


def _plain_part(tensor: torch.Tensor, what: str, add: Add, separate: bool = False) -> m.TensorLeaf:
    if not t.is_plain(tensor):
        raise UnsupportedLeafError(f"{what} is not a plain strided tensor")
    return _numbered(add(tensor.detach(), separate=separate))


def _flags_of_whole(leaf: torch.Tensor) -> int:
    return t.flags_of(leaf)


def dtensor_leaf(tensor: t.DTensor, local: m.TensorLeaf, flags: int = 0) -> m.DTensorLeaf:
    """The record of a DTensor around that of its local part."""
    _, spec = t.dtensor_parts(tensor)
    coordinate = spec.mesh.get_coordinate()
    return m.DTensorLeaf(
        local,
        mesh_record(spec.mesh),
        placement_records(tensor),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        None if coordinate is None else tuple(coordinate),
        flags,
    )


def _sharded(leaf: t.ShardedTensor | BoxedTensor, add: Add) -> m.ShardedLeaf:
    locals_, boxes, all_boxes, properties = t.sharded_parts(leaf)
    # Boxes side by side in one tensor reach into each other's memory, and share no element.
    separate = isinstance(leaf, BoxedTensor) and len(locals_) > 1
    return m.ShardedLeaf(
        tuple([_plain_part(local, "a shard", add, separate) for local in locals_]),
        boxes,
        all_boxes,
        tuple(leaf.size()),
        t.NAMES[properties.dtype],
        flags_of_sharded(leaf),
        properties.pin_memory,
        isinstance(leaf, BoxedTensor),
    )


def flags_of_sharded(leaf: t.ShardedTensor | BoxedTensor) -> int:
    """The flags of the whole tensor that a leaf has shards of."""
    if isinstance(leaf, BoxedTensor) and leaf.own is not None:
        return _flags_of_whole(leaf.own)
    return m.REQUIRES_GRAD if t.sharded_parts(leaf)[3].requires_grad else 0


def _sparse(leaf: torch.Tensor, add: Add) -> m.SparseLeaf:
    parts = t.sparse_parts(leaf.detach())
    flags = _flags_of_whole(leaf)
    if leaf.layout is torch.sparse_coo and leaf.is_coalesced():
        flags |= m.COALESCED
    numbers = tuple([_plain_part(part, "a part of a sparse tensor", add) for part in parts])
    return m.SparseLeaf(t.SPARSE[leaf.layout], tuple(leaf.shape), numbers, flags)


def _subclass(leaf: torch.Tensor, path: Path, add: Add) -> m.SubclassLeaf:
    if leaf.is_nested:
        raise UnsupportedLeafError("a nested tensor")
    attributes, context = leaf.__tensor_flatten__()  # type: ignore[attr-defined]
    if not all(type(name) is str and name.isidentifier() for name in attributes):
        raise UnsupportedLeafError("__tensor_flatten__ names no plain attributes")
    flat = flatten(context)
    return m.SubclassLeaf(
        subclass_name(type(leaf)),
        tuple(attributes),
        tuple([describe(getattr(leaf, name), (*path, name), add) for name in attributes]),
        flat.tree,
        tuple([describe(value, (*path, "context"), add) for value in flat.leaves]),
        tuple(leaf.shape),
        tuple(leaf.stride()),
        _flags_of_whole(leaf),
    )


def is_plain(leaf: m.Leaf) -> bool:
    """Whether it is a value that every process has: no tensor, no type."""
    return isinstance(leaf, m.SizeLeaf) or (isinstance(leaf, m.ValueLeaf) and leaf.kind == "plain")


def distributed_parts(leaf: m.Leaf) -> Iterator[m.DTensorLeaf | m.ShardedLeaf]:
    """The distributed tensors that a leaf is, or is around."""
    if isinstance(leaf, (m.DTensorLeaf, m.ShardedLeaf)):
        yield leaf
    elif isinstance(leaf, m.SubclassLeaf):
        for part in (*leaf.parts, *leaf.context_leaves):
            yield from distributed_parts(part)


def check_buildable(leaf: m.Leaf) -> None:
    """Raise `UnsupportedLeafError` if this process lacks what the leaf needs (dtype, type)."""
    if is_plain(leaf):
        return
    for part in parts(leaf):
        t.dtype_named(part.dtype)
    if isinstance(leaf, m.ValueLeaf):
        try:
            build(leaf, lambda part: torch.empty(0, device="cpu"), 0)
        except MissingZoneError as fault:
            raise UnsupportedLeafError(str(fault)) from None
        except (RuntimeError, ValueError) as fault:
            raise UnsupportedLeafError(f"no such {leaf.kind} here: {fault}") from None
    if isinstance(leaf, m.SubclassLeaf):
        if subclass_named(leaf.name) is None:
            raise UnsupportedLeafError(
                f"tensor subclass {leaf.name!r} is not registered here: call torchrelay.register()"
            )
        check_types(leaf.context)
        for inner in (*leaf.parts, *leaf.context_leaves):
            check_buildable(inner)


def build(leaf: m.Leaf, part: Part, rank: int) -> object:
    """The object of a leaf, its strided tensors made by `part`."""
    if isinstance(leaf, m.TensorLeaf):
        return part(leaf)
    if isinstance(leaf, m.ValueLeaf):
        value = decode_typed(leaf.value)
        if leaf.kind == "dtype":
            return t.any_dtype(str(value))
        return torch.device(str(value)) if leaf.kind == "device" else value
    if isinstance(leaf, m.SizeLeaf):
        return torch.Size(leaf.size)
    if isinstance(leaf, m.ArrayLeaf):
        return _build_array(leaf, part)
    if isinstance(leaf, m.DTensorLeaf):
        return t.dtensor(part(leaf.local), leaf)
    if isinstance(leaf, m.ShardedLeaf):
        locals_ = [part(shard) for shard in leaf.shards]
        if leaf.checkpointable:
            return checkpointable(locals_, leaf.boxes, leaf)
        return t.sharded(locals_, leaf, rank)
    if isinstance(leaf, m.SparseLeaf):
        coalesced = bool(leaf.flags & m.COALESCED)
        sparse = t.sparse(leaf.layout, [*map(part, leaf.parts)], leaf.shape, coalesced)
        return t.with_flags(sparse, leaf.flags)
    return _build_subclass(leaf, part, rank)


def _build_array(leaf: m.ArrayLeaf, part: Part) -> object:
    dtype = dtype_from_text(leaf.descr)
    order: Literal["F", "C"] = "F" if leaf.fortran else "C"
    array: np.ndarray[Any, Any]
    if leaf.nbytes:
        flat = part(next(parts(leaf))).numpy()
        array = np.ndarray(leaf.shape, dtype, flat, order=order)
    else:
        array = np.empty(leaf.shape, dtype, order=order)
    return array[()] if leaf.scalar else array


def _build_subclass(leaf: m.SubclassLeaf, part: Part, rank: int) -> object:
    kind: Any = subclass_named(leaf.name)
    inner = {
        name: build(piece, part, rank)
        for name, piece in zip(leaf.attributes, leaf.parts, strict=True)
    }
    context = unflatten(leaf.context, [build(item, part, rank) for item in leaf.context_leaves])
    built = kind.__tensor_unflatten__(inner, context, torch.Size(leaf.shape), leaf.strides)
    return t.with_flags(built, leaf.flags) if leaf.flags else built
