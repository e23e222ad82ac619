"""numpy arrays and scalars of a pickle, made of inert values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from torchrelay.dropin._pickles.fields import MAX_DIMS, counts, made, typed
from torchrelay.dropin._pickles.unpickler import PickledCall, refuse

_MODULES = ("numpy._core.multiarray.", "numpy.core.multiarray.")  # since numpy 2, and before
ARRAYS = tuple(module + "_reconstruct" for module in _MODULES)
SCALARS = tuple(module + "scalar" for module in _MODULES)
NAMES = (*ARRAYS, *SCALARS, "numpy.dtype", "numpy.ndarray")
_KINDS = "?biufc"  # of dtypes that are numbers


def array(value: PickledCall) -> np.ndarray[Any, Any]:
    """An array of numbers, in memory of its own."""
    _, shape, described, fortran, data = typed(value.state, tuple)
    sizes, kind = counts(shape, MAX_DIMS), _dtype(described)
    if len(typed(data, bytes)) != math.prod(sizes) * kind.itemsize:
        refuse("an array has another size than its bytes")
    found: np.ndarray[Any, Any] = np.ndarray(
        sizes, kind, bytearray(data), order="F" if fortran else "C"
    )
    return found


def scalar(value: PickledCall) -> Any:
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
    if found.kind not in _KINDS:
        refuse(f"an array of dtype {found} in torch's protocol")
    return found
