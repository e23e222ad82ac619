"""Whether a caller's object can take an offered leaf, and which of its memory does."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from torchrelay.errors import MismatchError, UnsupportedLeafError
from torchrelay.record import manifest as m
from torchrelay.record.dtypes import dtype_from_text
from torchrelay.state import tensors as t
from torchrelay.state.backing import missing_memory
from torchrelay.state.boxed import BoxedTensor
from torchrelay.state.dtensor_pieces import placement_records
from torchrelay.state.hints import (
    CUT_OTHERWISE,
    SHARDED_TO_WHOLE,
    UNINITIALIZED,
    WHOLE_TO_SHARDED,
    WITHOUT_MEMORY,
)
from torchrelay.state.leaves import describe
from torchrelay.state.local_parts import local_parts
from torchrelay.state.paths import Path, naming
from torchrelay.state.refusals import QUANTIZED
from torchrelay.state.registry import subclass_name
from torchrelay.state.tree import flatten


class Fit(NamedTuple):
    """One offered strided tensor and the destination that takes it."""

    part: m.TensorLeaf
    destination: torch.Tensor
    whole: m.SparseLeaf | None = None  # its parts are checked together before any is written


class ArrayFit(NamedTuple):
    leaf: m.ArrayLeaf
    destination: np.ndarray[Any, Any]


class Found(NamedTuple):
    """A pair, its path, and the leaf here that it is of."""

    pair: Fit | ArrayFit
    path: Path
    here: int


def fit(leaf: m.Leaf, into: object, path: Path) -> Iterator[Fit | ArrayFit]:
    """Pair the parts of `leaf` with the memory of `into`. Nothing for plain values.

    `MismatchError` where dtype, shape, layout or placement differ: bits are never reinterpreted,
    values never converted.
    """
    with naming(path):
        if isinstance(leaf, m.ArrayLeaf):
            yield from _fit_array(leaf, into)
        elif isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)):
            if isinstance(into, (torch.Tensor, np.ndarray)):
                _differ("kind", "a plain value", _kind(into))
        elif isinstance(into, torch.Tensor):
            for pair in _fit_tensor(leaf, into):
                if (why := missing_memory(pair.destination)) is not None:
                    raise MismatchError(f"the destination cannot be written: {why}")
                yield pair
        else:
            _differ("kind", "a tensor", _kind(into))


def _differ(what: str, offered: object, have: object, hint: str = "") -> NoReturn:
    text = f"{what} differs: offered {offered}, the destination has {have}"
    raise MismatchError(f"{text}; {hint}" if hint else text)


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _same(what: str, offered: object, have: object, hint: str = "") -> None:
    if offered != have:
        _differ(what, offered, have, hint)


def _fit_array(leaf: m.ArrayLeaf, into: object) -> Iterator[ArrayFit]:
    if leaf.scalar and not isinstance(into, (torch.Tensor, np.ndarray)):
        return  # immutable, replaced like any plain value
    if not isinstance(into, np.ndarray):
        _differ("kind", "a numpy array", _kind(into))
    _same("numpy dtype", dtype_from_text(leaf.descr), into.dtype)
    _same("shape", leaf.shape, into.shape)
    if not into.flags.writeable:
        raise MismatchError("the destination array is read-only")
    if into.size:
        yield ArrayFit(leaf, into)


def _fit_tensor(leaf: m.Leaf, into: torch.Tensor) -> Iterator[Fit]:
    if t.is_sharded(into) and not isinstance(leaf, m.ShardedLeaf):
        _differ("kind", "another kind of tensor", _describe(into), WHOLE_TO_SHARDED)
    if isinstance(leaf, m.TensorLeaf):
        yield from _fit_plain(leaf, into)
    elif isinstance(leaf, m.DTensorLeaf):
        if not t.is_dtensor(into):
            _differ("kind", "a DTensor", _describe(into), SHARDED_TO_WHOLE)
        _same("global shape", leaf.shape, tuple(into.shape))
        _check_mesh(leaf, into)
        yield from _fit_plain(leaf.local, t.dtensor_parts(into)[0])
    elif isinstance(leaf, m.ShardedLeaf):
        yield from _fit_sharded(leaf, into)
    elif isinstance(leaf, m.SparseLeaf):
        _same("layout", f"sparse_{leaf.layout}", str(into.layout).removeprefix("torch."))
        _same("shape", leaf.shape, tuple(into.shape))
        if leaf.layout == "coo":
            _same("being coalesced", bool(leaf.flags & m.COALESCED), into.is_coalesced())
        mine_parts = t.sparse_parts(into.detach())
        there, here = (prod(one.shape[:1]) for one in (leaf.parts[-1], mine_parts[-1]))
        _same("number of specified elements", there, here)
        for part, mine in zip(leaf.parts, mine_parts, strict=True):
            for pair in _fit_plain(part, mine):
                yield pair._replace(whole=leaf)
    elif isinstance(leaf, m.SubclassLeaf):
        yield from _fit_subclass(leaf, into)


def _describe(tensor: torch.Tensor) -> str:
    if isinstance(tensor, BoxedTensor):
        return "a CheckpointableTensor"
    if t.is_sharded(tensor):
        return "a ShardedTensor"
    return f"{type(tensor).__name__} ({str(tensor.layout).removeprefix('torch.')})"


def _fit_plain(part: m.TensorLeaf, into: torch.Tensor) -> Iterator[Fit]:
    if into.is_quantized:
        raise UnsupportedLeafError(QUANTIZED)
    if not t.is_plain(into):
        hint = WHOLE_TO_SHARDED if t.is_dtensor(into) else ""
        if torch.nn.parameter.is_lazy(into):
            hint = UNINITIALIZED
        _differ("kind", "a strided tensor", _describe(into), hint)
    _same("dtype", part.dtype, t.NAMES[into.dtype])
    _same("shape", part.shape, tuple(into.shape))
    if into.device.type == "meta" and not part.flags & m.META:
        _differ("kind", "a tensor with values", "a meta tensor", WITHOUT_MEMORY)
    if into.device.type != "meta" and part.flags & m.META:
        _differ("kind", "a meta tensor, which has no values", "one with memory")
    if part.storage != -1:
        yield Fit(part, into)


def _check_mesh(leaf: m.DTensorLeaf, like: t.DTensor) -> None:
    """Whether the offered shard is this rank's own in the mesh of `like`."""
    _, spec = t.dtensor_parts(like)
    _same("mesh shape", leaf.mesh.shape, tuple(spec.mesh.mesh.shape), CUT_OTHERWISE)
    if leaf.shape == tuple(like.shape):
        mine = _show(placement_records(like))
        _same("placements", _show(leaf.placements), mine, CUT_OTHERWISE)
    coordinate = spec.mesh.get_coordinate()
    if leaf.coordinate is not None and coordinate is not None:
        for dim, placement in enumerate(leaf.placements):
            if placement.kind != "replicate":
                what = f"place on mesh dimension {dim}"
                _same(what, leaf.coordinate[dim], coordinate[dim], CUT_OTHERWISE)


def mesh_of(leaf: m.Leaf, like: torch.Tensor) -> t.DeviceMesh | None:
    """The mesh for a new leaf that belongs to `like`; None if it is not distributed.

    `MismatchError` where one of the two is distributed and the other is not, or otherwise.
    """
    if isinstance(leaf, m.DTensorLeaf):
        if not t.is_dtensor(like):
            _differ("kind", "a DTensor", _describe(like), SHARDED_TO_WHOLE)
        _check_mesh(leaf, like)
        return t.dtensor_parts(like)[1].mesh
    # A scalar, such as a count of steps, is not a shard.
    shape = leaf.shape if isinstance(leaf, m.TensorLeaf) else ()
    if shape and t.is_dtensor(like) and shape == tuple(like.shape):
        _differ("kind", "a strided tensor", _describe(like), WHOLE_TO_SHARDED)
    return None


def _show(placements: tuple[m.Placement, ...]) -> str:
    names = {
        "replicate": "replicate",
        "shard": "shard({0.dim})",
        "strided": "strided shard({0.dim}, {0.split})",
        "partial": "partial({0.reduce})",
    }
    return str([names[placement.kind].format(placement) for placement in placements])


def _fit_sharded(leaf: m.ShardedLeaf, into: torch.Tensor) -> Iterator[Fit]:
    # A DTensor with several boxes on this rank takes each of them, as a ShardedTensor does.
    parts = local_parts(into) if t.is_distributed(into) else []
    if not t.is_sharded(into) and len(parts) < 2:
        kind = "a CheckpointableTensor" if leaf.checkpointable else "a ShardedTensor"
        _differ("kind", kind, _describe(into), SHARDED_TO_WHOLE)
    _same("global shape", leaf.shape, tuple(into.size()))
    _same(
        "local shards",
        [(box.offsets, box.sizes) for box in leaf.boxes],
        [part.box for part in parts],
    )
    for shard, part in zip(leaf.shards, parts, strict=True):
        yield from _fit_plain(shard, part.tensor)


def _fit_subclass(leaf: m.SubclassLeaf, into: torch.Tensor) -> Iterator[Fit]:
    _same("type", leaf.name, subclass_name(type(into)))
    attributes, context = into.__tensor_flatten__()  # type: ignore[attr-defined]
    _same("attributes", leaf.attributes, tuple(attributes))
    _same("shape", leaf.shape, tuple(into.shape))
    flat = flatten(context)
    tensors: list[torch.Tensor] = []

    def refuse(tensor: torch.Tensor, *, separate: bool = False) -> int:
        tensors.append(tensor)
        return 0

    mine = [describe(value, ("context",), refuse) for value in flat.leaves]
    if tensors:
        raise MismatchError("a subclass with tensors in its context cannot be filled")
    _same("context", (leaf.context, list(leaf.context_leaves)), (flat.tree, mine))
    for name, part in zip(attributes, leaf.parts, strict=True):
        yield from _fit_tensor(part, getattr(into, name))
