"""The plain case: a contiguous tensor in host memory, known by a handful of numbers.

Most tensors of most states are plain, and each question to torch costs as much as the rest of the
work on a small tensor. `glance` asks as few as it can; what is not plain takes the general path.
"""

from __future__ import annotations

from math import prod

import torch

from torchrelay.state import manifest as m
from torchrelay.state.spans import contiguous_strides
from torchrelay.state.tensors import NAMES

_Tensor = torch.Tensor
TYPES = frozenset((torch.Tensor, torch.nn.Parameter))

# What contiguous tensors of one dtype and shape have in common: name of the dtype, shape, strides,
# item size, bytes. None: such tensors are not plain.
Kind = tuple[str, tuple[int, ...], tuple[int, ...], int, int]
Kinds = dict[tuple[torch.dtype, torch.Size], "Kind | None"]


def glance(tensor: torch.Tensor, kinds: Kinds) -> tuple[Kind, int, int] | None:
    """Kind, address and flags of a tensor (its type is one of `TYPES`) if it is plain, else None.

    `kinds` remembers what is common to many. Memory that torch cannot show never passes: asked for
    its address, or a nested tensor for its shape, torch raises or says 0.
    """
    try:
        kind = kinds[key := (tensor.dtype, tensor.shape)]
        address = tensor.data_ptr()
    except RuntimeError:
        return None
    except KeyError:
        kinds[key] = _kind(tensor)
        return glance(tensor, kinds)
    if not (kind and address and tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
        return None
    flags = m.REQUIRES_GRAD if tensor.requires_grad else 0
    return kind, address, flags if type(tensor) is _Tensor else flags | m.PARAMETER


def _kind(tensor: torch.Tensor) -> Kind | None:
    # Complex tensors may be conjugated, quantized ones come with more than their bytes.
    name = NAMES.get(tensor.dtype)
    if name is None or tensor.is_complex() or tensor.is_quantized or not tensor.numel():
        return None
    shape, size = tuple(tensor.shape), tensor.element_size()
    return name, shape, contiguous_strides(shape), size, prod(shape) * size
