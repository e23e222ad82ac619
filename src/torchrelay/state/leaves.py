"""Leaves of every kind: object to record, record to object, and whether a destination fits.

Each kind reduces to strided tensors (its *parts*), whose bytes `images` and `landing` deal with,
and a record that says how to put the parts together again.
"""

from __future__ import annotations

import dataclasses
import enum
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch

from torchrelay.errors import RelayError, UnsupportedLeafError
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.record import manifest as m
from torchrelay.record.checks.leaves import SUB_BYTE, packed_bytes
from torchrelay.record.dtypes import dtype_from_text, dtype_to_text
from torchrelay.record.manifest import parts
from torchrelay.record.values import decode_value, encode_value
from torchrelay.state import tensors as t
from torchrelay.state.hints import UNINITIALIZED
from torchrelay.state.meshes import mesh_record
from torchrelay.state.paths import Path
from torchrelay.state.registry import subclass_name, subclass_named
from torchrelay.state.tree import check_types, flatten, show, unflatten


class Add(Protocol):
    def __call__(self, tensor: torch.Tensor, *, apart: bool = False) -> int:
        """Take a part in; returns its ticket. `apart`: whatever else lies in its memory."""


Finish = Callable[[Callable[[int], m.TensorLeaf]], m.Leaf]
Part = Callable[[m.TensorLeaf], torch.Tensor]


def describe(leaf: object, path: Path, add: Add) -> int | Finish:
    """Hand the leaf's parts to `add`; the ticket of a plain tensor, or how to finish the record.

    `UnsupportedLeafError` names the path of what cannot travel exactly.
    """
    try:
        if isinstance(leaf, torch.Tensor):
            return add(leaf) if t.is_plain(leaf) else _tensor(leaf, path, add)
        record = _value(leaf, add)
    except RelayError as fault:
        fault.path = fault.path or show(path)
        raise
    except TypeError as fault:
        raise UnsupportedLeafError(
            f"a leaf of type {fault} cannot travel: {_remedy(leaf)}", path=show(path)
        ) from None
    return record


def _remedy(leaf: object) -> str:
    if isinstance(leaf, type):
        return "it is a class; put an instance, or its name as text, in its place"
    if callable(getattr(leaf, "state_dict", None)):
        return (
            "put its state_dict() in its place (objects with state_dict and load_state_dict are "
            "taken as they are in dicts, lists and tuples, not inside of other types)"
        )
    if dataclasses.is_dataclass(leaf) or isinstance(leaf, enum.Enum):
        return f"call torchrelay.register({type(leaf).__name__}) on every rank"
    return "see torchrelay.register()"


def _value(leaf: object, add: Add) -> Finish:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return _array(leaf, add)
    if isinstance(leaf, torch.Size):
        size = m.SizeLeaf(tuple(leaf))
        return lambda part: size
    if isinstance(leaf, torch.dtype):
        named = m.ValueLeaf("dtype", str(leaf).removeprefix("torch."))
    elif isinstance(leaf, torch.device):
        named = m.ValueLeaf("device", str(leaf))
    else:
        named = m.ValueLeaf("plain", encode_value(leaf))
    return lambda part: named


def _array(leaf: np.ndarray[Any, Any] | np.generic, add: Add) -> Finish:
    if type(leaf) is not np.ndarray and not isinstance(leaf, np.generic):
        raise TypeError(type(leaf).__name__)
    array = np.asarray(leaf)
    if isinstance(leaf, (np.str_, np.bytes_)) and array[()] != leaf:
        raise TypeError(f"{type(leaf).__name__} with zeros at its end, which numpy drops,")
    text = dtype_to_text(array.dtype)
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    flat = np.ravel(array, order="F" if fortran else "C")
    scalar = isinstance(leaf, np.generic)
    shape, nbytes = array.shape, array.nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a read-only array: it is only read here
        ticket = add(torch.from_numpy(flat.view(np.uint8)), apart=True) if nbytes else 0

    def finish(part: Callable[[int], m.TensorLeaf]) -> m.ArrayLeaf:
        storage = part(ticket).storage if nbytes else -1
        return m.ArrayLeaf(text, shape, fortran, storage, nbytes, scalar)

    return finish


def _tensor(leaf: torch.Tensor, path: Path, add: Add) -> int | Finish:
    if t.is_dtensor(leaf):
        return _dtensor(leaf, add)
    if isinstance(leaf, t.ShardedTensor):
        return _sharded(leaf, add)
    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
        if leaf.layout in t.SPARSE:
            return _sparse(leaf, add)
        if leaf.is_quantized:
            return _quantized(leaf, add)
        raise UnsupportedLeafError("a nested, functional or transformed tensor", path=show(path))
    if torch.nn.parameter.is_lazy(leaf):
        raise UnsupportedLeafError(UNINITIALIZED, path=show(path))
    if hasattr(leaf, "__tensor_flatten__"):
        return _subclass(leaf, path, add)
    raise UnsupportedLeafError(
        f"tensor subclass {type(leaf).__name__} does not say how to flatten itself "
        "(__tensor_flatten__)",
        path=show(path),
    )


def _plain_part(tensor: torch.Tensor, what: str, add: Add) -> int:
    if not t.is_plain(tensor):
        raise UnsupportedLeafError(f"{what} is not a plain strided tensor")
    return add(tensor.detach())


def _dtensor(leaf: t.DTensor, add: Add) -> Finish:
    local, spec = t.dtensor_parts(leaf)
    ticket = _plain_part(local, "the local part of a DTensor", add)
    coordinate = spec.mesh.get_coordinate()
    facts: dict[str, Any] = {
        "mesh": mesh_record(spec.mesh),
        "placements": tuple(t.placement_record(p) for p in spec.placements),
        "shape": tuple(leaf.shape),
        "strides": tuple(leaf.stride()),
        "coordinate": None if coordinate is None else tuple(coordinate),
        "flags": t.flags_of(leaf) & (m.REQUIRES_GRAD | m.PARAMETER),
    }
    return lambda part: m.DTensorLeaf(part(ticket), **facts)


def _sharded(leaf: t.ShardedTensor, add: Add) -> Finish:
    locals_, boxes, all_boxes, properties = t.sharded_parts(leaf)
    tickets = [_plain_part(local, "a shard", add) for local in locals_]
    facts: dict[str, Any] = {
        "boxes": boxes,
        "all_boxes": all_boxes,
        "shape": tuple(leaf.size()),
        "dtype": t.NAMES[properties.dtype],
        "flags": m.REQUIRES_GRAD if properties.requires_grad else 0,
        "pinned": properties.pin_memory,
    }
    return lambda part: m.ShardedLeaf(tuple(part(ticket) for ticket in tickets), **facts)


def _sparse(leaf: torch.Tensor, add: Add) -> Finish:
    data = leaf.detach()
    tickets = [_plain_part(part, "a part of a sparse tensor", add) for part in t.sparse_parts(data)]
    layout, shape = t.SPARSE[leaf.layout], tuple(leaf.shape)
    flags = t.flags_of(leaf) & (m.REQUIRES_GRAD | m.PARAMETER)
    if leaf.layout is torch.sparse_coo and leaf.is_coalesced():
        flags |= m.COALESCED
    return lambda part: m.SparseLeaf(layout, shape, tuple(map(part, tickets)), flags)


def _quantized(leaf: torch.Tensor, add: Add) -> Finish:
    packs: dict[str, Any] = {}
    if t.NAMES[leaf.dtype] in SUB_BYTE:
        storage = leaf.untyped_storage()
        packs = {"dtype": t.NAMES[leaf.dtype], "shape": tuple(leaf.shape)}
        if storage.nbytes() != packed_bytes(**packs) or not leaf.is_contiguous():
            raise UnsupportedLeafError(f"a view of a tensor of {leaf.dtype}")
        flat = t.flat_bytes(storage, 0, storage.nbytes())
        ticket = add(torch.nn.Parameter(flat, False) if t.flags_of(leaf) else flat)
    else:
        ticket = add(leaf)
    scheme, how = t.quantizer_of(leaf)
    if "scale" in how:
        scalars = (encode_value(how["scale"]), encode_value(how["zero_point"]))
        return lambda part: m.QuantizedLeaf(part(ticket), scheme, scalars, **packs)
    tickets = [add(how["scales"]), add(how["zero_points"])]
    return lambda part: m.QuantizedLeaf(
        part(ticket), scheme, (), tuple(map(part, tickets)), how["axis"], **packs
    )


def _subclass(leaf: torch.Tensor, path: Path, add: Add) -> Finish:
    if leaf.is_nested:
        raise UnsupportedLeafError("a nested tensor", path=show(path))
    attributes, context = leaf.__tensor_flatten__()  # type: ignore[attr-defined]
    if not all(type(name) is str and name.isidentifier() for name in attributes):
        raise UnsupportedLeafError("__tensor_flatten__ names no plain attributes", path=show(path))
    inner = [describe(getattr(leaf, name), (*path, name), add) for name in attributes]
    flat = flatten(context)
    known = [describe(value, (*path, "context"), add) for value in flat.leaves]
    facts: dict[str, Any] = {
        "shape": tuple(leaf.shape),
        "strides": tuple(leaf.stride()),
        "flags": t.flags_of(leaf) & (m.REQUIRES_GRAD | m.PARAMETER),
    }
    name = subclass_name(type(leaf))

    def finish(part: Callable[[int], m.TensorLeaf]) -> m.SubclassLeaf:
        return m.SubclassLeaf(
            name,
            tuple(attributes),
            tuple(finished(item, part) for item in inner),
            flat.tree,
            tuple(finished(item, part) for item in known),
            **facts,
        )

    return finish


def finished(described: int | Finish, part: Callable[[int], m.TensorLeaf]) -> m.Leaf:
    return part(described) if isinstance(described, int) else described(part)


def is_plain(leaf: m.Leaf) -> bool:
    """Whether it is a value that every process has: no tensor, no type."""
    return isinstance(leaf, m.SizeLeaf) or (isinstance(leaf, m.ValueLeaf) and leaf.kind == "plain")


def check_buildable(leaf: m.Leaf) -> None:
    """Raise `UnsupportedLeafError` if this process lacks what the leaf needs (dtype, type)."""
    if is_plain(leaf):
        return
    for part in parts(leaf):
        t.dtype_named(part.dtype)
    if isinstance(leaf, m.QuantizedLeaf) and leaf.dtype:
        t.dtype_named(leaf.dtype)
    if isinstance(leaf, m.ValueLeaf):
        try:
            build(leaf, lambda part: torch.empty(0, device="cpu"), 0)
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
        value = decode_value(leaf.value)
        if leaf.kind == "dtype":
            return t.dtype_named(str(value))
        return torch.device(str(value)) if leaf.kind == "device" else value
    if isinstance(leaf, m.SizeLeaf):
        return torch.Size(leaf.size)
    if isinstance(leaf, m.ArrayLeaf):
        return _build_array(leaf, part)
    if isinstance(leaf, m.DTensorLeaf):
        return t.dtensor(part(leaf.local), leaf)
    if isinstance(leaf, m.ShardedLeaf):
        return t.sharded([part(shard) for shard in leaf.shards], leaf, rank)
    if isinstance(leaf, m.SparseLeaf):
        return _build_sparse(leaf, [part(piece) for piece in leaf.parts])
    if isinstance(leaf, m.QuantizedLeaf):
        return _build_quantized(leaf, part)
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


def _build_sparse(leaf: m.SparseLeaf, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    coalesced = bool(leaf.flags & m.COALESCED)
    return t.with_flags(t.sparse(leaf.layout, pieces, leaf.shape, coalesced), leaf.flags)


def _build_quantized(leaf: m.QuantizedLeaf, part: Part) -> torch.Tensor:
    if leaf.scalars:
        scale, point = map(decode_value, leaf.scalars)
        if not isinstance(scale, float) or not isinstance(point, int):
            raise ValueError(f"quantized with scale {scale!r} and zero point {point!r}")
        how: dict[str, Any] = {"scale": scale, "zero_point": point}
    else:
        scales, points = (part(tensor) for tensor in leaf.tensors)
        how = {"scales": scales, "zero_points": points, "axis": leaf.axis}
    raw, record, strides = part(leaf.raw), leaf.raw, part(leaf.raw).stride()
    if leaf.dtype:
        record = m.TensorLeaf(leaf.dtype, leaf.shape, None, leaf.raw.storage)
        strides = contiguous_strides(leaf.shape)
    built = t.quantized(raw.untyped_storage(), t.byte_offset(raw), record, strides, how)
    return t.with_flags(built, leaf.raw.flags & m.PARAMETER)


def _build_subclass(leaf: m.SubclassLeaf, part: Part, rank: int) -> object:
    kind: Any = subclass_named(leaf.name)
    inner = {
        name: build(piece, part, rank)
        for name, piece in zip(leaf.attributes, leaf.parts, strict=True)
    }
    context = unflatten(leaf.context, [build(item, part, rank) for item in leaf.context_leaves])
    built = kind.__tensor_unflatten__(inner, context, torch.Size(leaf.shape), leaf.strides)
    return t.with_flags(built, leaf.flags) if leaf.flags else built
