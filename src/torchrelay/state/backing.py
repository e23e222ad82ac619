"""Whether the elements of a strided tensor are in memory: before an address is used, the tensor's
storage is known to have an address and to reach that far.

A storage may be resized under its tensors, and forward-mode AD makes zero tensors, whose storage
has a size and no address.
"""

from __future__ import annotations

import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.geometry.strides import extent
from torchrelay.state import torch_private as private
from torchrelay.state.tensors import byte_offset


def missing_memory(tensor: torch.Tensor) -> str | None:
    """Why a strided tensor's elements are not all in memory; None if they are, or if it is a meta
    tensor or has no elements."""
    if tensor.is_meta or not tensor.numel():
        return None
    offset, has = byte_offset(tensor), tensor.untyped_storage().nbytes()
    end = offset + extent(tensor.shape, tensor.stride()) * tensor.element_size()
    if end > has:
        return (
            f"its memory has been freed or made smaller: its storage has {has} bytes, and its "
            f"elements reach to byte {end}"
        )
    if tensor.data_ptr() == offset:
        return "it has no memory, as the zero tensors of forward-mode AD: give a clone of it"
    return None


def check_memory(tensor: torch.Tensor) -> None:
    """Raise `UnsupportedLeafError` for a tensor whose elements are not all in memory."""
    if (why := missing_memory(tensor)) is not None:
        raise UnsupportedLeafError(why)


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or zeros like it in the place of a zero tensor. `UnsupportedLeafError` for
    another whose elements are not all in memory."""
    if private.is_zero_tensor_of(tensor)():
        shape, strides = tensor.shape, tensor.stride()
        made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
        return made.zero_()
    check_memory(tensor)
    return tensor
