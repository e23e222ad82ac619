"""The plain case: a contiguous tensor in host memory, known by a handful of numbers.

Most tensors of most states are plain, and each question to torch costs as much as the rest of the
work on a small tensor. `survey` asks as few as it can; what is not plain takes the general path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch

from torchrelay.state import manifest as m
from torchrelay.state.spans import contiguous_strides
from torchrelay.state.tensors import NAMES

_Tensor = torch.Tensor
_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

# What contiguous tensors of one dtype and shape have in common: name of the dtype, shape, strides,
# item size, bytes.
Kind = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
# A plain tensor: its kind, address and flags.
Plain = tuple[Kind, int, int]


def survey(leaves: Iterable[object]) -> Iterator[Plain | None]:
    """For each leaf what there is to know if it is a plain tensor, else None.

    Memory that torch cannot show never passes: asked for the address of a sparse, functional or
    functorch-wrapped tensor, or for the shape of a nested one, torch raises or says 0.
    """
    kinds: dict[tuple[torch.dtype, torch.Size], Kind | None] = {}
    for leaf in leaves:
        if type(leaf) not in _TYPES:
            yield None
            continue
        tensor: Any = leaf
        try:
            key = (tensor.dtype, tensor.shape)
            address = tensor.data_ptr()
        except RuntimeError:
            yield None
            continue
        if key not in kinds:
            kinds[key] = _kind(tensor)
        kind = kinds[key]
        if not (kind and address and tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
            yield None
            continue
        flags = m.REQUIRES_GRAD if tensor.requires_grad else 0
        yield kind, address, flags if type(leaf) is _Tensor else flags | m.PARAMETER


def _kind(tensor: torch.Tensor) -> Kind | None:
    # Complex tensors may be conjugated, quantized ones come with more than their bytes.
    name = NAMES.get(tensor.dtype)
    if name is None or tensor.is_complex() or tensor.is_quantized or not tensor.numel():
        return None
    if tensor.dim() > m.MAX_DIMS:
        return None
    shape, size = tuple(tensor.shape), tensor.element_size()
    return name, shape, contiguous_strides(shape), size, prod(shape) * size
