"""Weights as float8 (e4m3) with a float32 scale for each block of elements.

`Encoding(float8_block=128)` publishes every floating tensor of two or more dimensions that has a
text as its key in a dict: its values under that key, and its scales under `KEY.scale`. A reader
makes weights of them with `dequantized`.

The scale of a block is its largest magnitude divided by 448, the largest number of e4m3. So the
error of an element x is at most `max(|x| / 16, scale / 1024)`, and never more than `16 * scale`,
which is 3.6 % of the largest magnitude in its block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from torchrelay.errors import UnsupportedLeafError, UsageError
from torchrelay.state import tensors as t
from torchrelay.state.backing import with_memory
from torchrelay.state.checkpointable import is_checkpointable
from torchrelay.state.objects import flatten_objects
from torchrelay.state.tree import unflatten

SCALE = ".scale"  # behind the key of a tensor: the key of its scales
VALUES = torch.float8_e4m3fn
LARGEST = torch.finfo(VALUES).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # so that blocks of zeros can be divided by it


def quantize(tensor: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and scales of a tensor; blocks are runs of `block` elements of its last dimension,
    the last one the rest. `UsageError` if it holds a number that is not finite, or one that float32
    cannot hold: scales are float32. `UnsupportedLeafError` if its memory has been freed."""
    size = tensor.shape[-1]
    blocks = -(-size // block)
    if t.is_plain(tensor):
        tensor = with_memory(tensor.detach())
    exact = tensor.detach().to(torch.float32)
    padded = torch.nn.functional.pad(exact, (0, blocks * block - size))
    grouped = padded.view(*tensor.shape[:-1], blocks, block)
    scales = grouped.abs().amax(-1) / LARGEST
    if not bool(scales.isfinite().all()):
        if bool(tensor.isfinite().all()):
            most = torch.finfo(torch.float32).max
            raise UsageError(
                f"a tensor with numbers beyond {most:.6g}, the largest of float32, cannot be "
                "published as float8: the scales are float32"
            )
        raise UsageError("a tensor with infinities or NaNs cannot be published as float8")
    scales.clamp_(min=_SMALLEST_SCALE)
    values = (grouped / scales.unsqueeze(-1)).clamp_(-LARGEST, LARGEST).to(VALUES)
    return values.view(*tensor.shape[:-1], -1)[..., :size].contiguous(), scales


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, block: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tensor that values and scales stand for."""
    size = values.shape[-1]
    if scales.shape != (*values.shape[:-1], -(-size // block)):
        raise UsageError(
            f"scales of shape {tuple(scales.shape)} are not those of values of shape "
            f"{tuple(values.shape)} in blocks of {block}"
        )
    wide = scales.repeat_interleave(block, dim=-1)[..., :size]
    return (values.to(torch.float32) * wide).to(dtype)


def dequantized(state: Any, *, block: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A state that was published in blocks of `block` elements, with tensors of `dtype` in place
    of values and scales. The state itself is not changed."""

    def entries(items: dict[Any, Any]) -> dict[Any, Any]:
        found = {}
        for key, value in items.items():
            if _is_scale(key, items):
                continue
            scales = items.get(key + SCALE) if isinstance(key, str) else None
            if scales is not None and getattr(value, "dtype", None) is VALUES:
                value = dequantize(value, scales, block, dtype)
            found[key] = value
        return found

    return _mapped(state, entries)


def _is_scale(key: Any, items: dict[Any, Any]) -> bool:
    if not isinstance(key, str) or not key.endswith(SCALE):
        return False
    return getattr(items.get(key.removesuffix(SCALE)), "dtype", None) is VALUES


def quantized(state: Any, block: int) -> Any:
    """A state as it is published: values and scales in place of tensors. Tensors that are tied
    have the same values and scales."""
    flat, _ = flatten_objects(state)
    known: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}

    def entries(items: dict[Any, Any]) -> dict[Any, Any]:
        found = dict(items)
        for key, value in items.items():
            if not isinstance(key, str) or not _is_quantized(value):
                continue
            if key + SCALE in items:
                raise UsageError(f"the keys {key!r} and {key + SCALE!r} cannot both be published")
            local = t.dtensor_parts(value)[0] if t.is_dtensor(value) else value
            tie = (t.storage_id(local), local.storage_offset(), value.shape, local.stride())
            if tie not in known:
                known[tie] = _quantized_tensor(value, block, key)
            found[key], found[key + SCALE] = known[tie]
        return found

    return _mapped(unflatten(flat.tree, flat.leaves), entries)


def _is_quantized(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not value.numel():
        return False
    return value.is_floating_point() and value.element_size() > 1 and not value.is_meta


def _quantized_tensor(
    tensor: torch.Tensor, block: int, key: str
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        if is_checkpointable(tensor):
            raise UnsupportedLeafError(
                "a tensor that names its boxes of a larger one (CheckpointableTensor) cannot be "
                "published as float8"
            )
        if not t.is_dtensor(tensor):
            return quantize(tensor, block)
        local, spec = t.dtensor_parts(tensor)
        if any(getattr(one, "dim", -1) == tensor.dim() - 1 for one in spec.placements):
            raise UnsupportedLeafError(
                "a DTensor that is sharded along its last dimension cannot be published as float8"
            )
        parts = quantize(local, block)
    except (UsageError, UnsupportedLeafError) as fault:
        fault.path = fault.path or key
        raise
    shapes = tensor.shape, (*tensor.shape[:-1], -(-tensor.shape[-1] // block))
    values, scales = (
        t.dtensor_like(tensor, part, shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return values, scales


def _mapped(state: Any, entries: Callable[[dict[Any, Any]], dict[Any, Any]]) -> Any:
    """A state with the entries of each dict replaced, at any depth of dicts, lists and tuples."""
    if type(state) in (dict, OrderedDict):
        return {key: _mapped(value, entries) for key, value in entries(state).items()}
    if type(state) in (list, tuple):
        return type(state)(_mapped(value, entries) for value in state)
    return state
