"""States in types that `torch.load(weights_only=True)` reads, so that every reader takes them."""

from __future__ import annotations

import collections
import io
import pathlib
from typing import Any

import numpy as np
import torch

from torchrelay.errors import UnsupportedLeafError
from torchrelay.state.paths import Path
from torchrelay.state.tree import is_namedtuple, show

_AS_THEY_ARE = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(torch.Size, torch.dtype, torch.device),
)
_NUMBERS = (np.bool_, np.integer, np.floating, np.complexfloating)


def torch_values(value: Any, path: Path = ()) -> Any:
    """The state with each value in the nearest of those types: arrays are tensors, numpy's scalars
    Python's, deques lists, namedtuples tuples, paths text, buffers bytes.

    `UnsupportedLeafError` names the path of anything else.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) or kind in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        made = {key: torch_values(item, (*path, key)) for key, item in value.items()}
        keeps = kind in (collections.OrderedDict, collections.Counter)
        return kind(made) if keeps else made
    if kind in (list, tuple, collections.deque) or is_namedtuple(kind):
        items = [torch_values(item, (*path, place)) for place, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if kind is set and all(type(item) in _AS_THEY_ARE for item in value):
        return value
    if kind is np.ndarray:
        return _tensor(value, path)
    if isinstance(value, (np.str_, np.bytes_)) or (
        isinstance(value, _NUMBERS) and not isinstance(value, (np.longdouble, np.clongdouble))
    ):
        return value.item()
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if kind is io.BytesIO:
        return value.getvalue()
    raise _refused(f"a leaf of type {kind.__name__}", path)


def _tensor(array: np.ndarray[Any, Any], path: Path) -> torch.Tensor:
    try:
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        return torch.from_numpy(native.reshape(array.shape).copy())
    except TypeError:
        raise _refused(f"a numpy array of dtype {array.dtype}", path) from None


def _refused(what: str, path: Path) -> UnsupportedLeafError:
    return UnsupportedLeafError(
        f"{what} is not written, because torch.load(weights_only=True) would not read it: put "
        "tensors and plain values in its place",
        path=show(path),
    )
