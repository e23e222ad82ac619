"""Leaves other than tensors in a pickle: plain values, and arrays and scalars of numpy."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from torchrelay.dropin._pickles.unpickler import (
    DTYPES,
    MAX_DIMS,
    Global,
    PickledCall,
    count,
    counts,
    device,
    made,
    refuse,
    size,
    typed,
)

_AS_THEY_ARE = (type(None), bool, int, float, str, bytes, bytearray)
_MODULES = ("numpy._core.multiarray.", "numpy.core.multiarray.")  # since numpy 2, and before
_NUMBERS = "?biufc"  # kinds of dtypes


def plain(value: Any) -> object:
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is Global and value.name in DTYPES:
        return DTYPES[value.name]
    if type(value) is PickledCall and value.name in _MAKERS:
        return _MAKERS[value.name](value)
    refuse("a leaf is neither a tensor nor a plain value")


def _complex(value: PickledCall) -> complex:
    real, imag = made(value, value.name)
    return complex(typed(real, float), typed(imag, float))


def _bytearray(value: PickledCall) -> bytearray:
    args = made(value, value.name)
    return bytearray(typed(args[0], bytes)) if args else bytearray()


def _buffer(value: PickledCall) -> io.BytesIO:
    data, position, _ = typed(value.state, tuple)
    buffer = io.BytesIO(typed(data, bytes))
    buffer.seek(count(position))
    return buffer


def _array(value: PickledCall) -> np.ndarray[Any, Any]:
    """An array of numbers, in memory of its own."""
    _, shape, described, fortran, data = typed(value.state, tuple)
    sizes, kind = counts(shape, MAX_DIMS), _dtype(described)
    if len(typed(data, bytes)) != math.prod(sizes) * kind.itemsize:
        refuse("an array has another size than its bytes")
    found: np.ndarray[Any, Any] = np.ndarray(
        sizes, kind, bytearray(data), order="F" if fortran else "C"
    )
    return found


def _scalar(value: PickledCall) -> Any:
    described, data = made(value, value.name)
    kind = _dtype(described)
    if len(typed(data, bytes)) != kind.itemsize:
        refuse("a scalar has another size than its bytes")
    return np.frombuffer(data, kind)[0]


def _dtype(value: object) -> np.dtype[Any]:
    if type(value) is not PickledCall or value.name != "numpy.dtype":
        refuse("a dtype of numpy was expected")
    text, order = typed(value.args[0], str), typed(value.state, tuple)[1]
    if len(text) > 3 or order not in ("<", ">", "|", "="):
        refuse("a dtype of numpy is malformed")
    found: np.dtype[Any] = np.dtype(text).newbyteorder("=" if order == "|" else order)
    if found.kind not in _NUMBERS:
        refuse(f"an array of dtype {found} in torch's protocol")
    return found


_MAKERS: dict[str, Callable[[PickledCall], object]] = {
    **{module + "_reconstruct": _array for module in _MODULES},
    **{module + "scalar": _scalar for module in _MODULES},
    "_io.BytesIO": _buffer,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "torch.Size": size,
    "torch.device": device,
}
NAMES = (*_MAKERS, "numpy.dtype", "numpy.ndarray")
