"""Why a value cannot travel, and the line of code that lets it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import inspect
import pathlib

# A subclass of one of these can be encoded as that one, by a call of the type that follows.
_BASES: dict[type, type] = {
    **{kind: kind for kind in (int, float, complex, str, bytes)},
    **{kind: kind for kind in (dict, list, tuple, set, frozenset)},
    collections.deque: list,
    pathlib.PurePath: str,
}

QUANTIZED = (
    "torch's quantized tensors are not supported: dequantize it, or put int_repr() and its scales "
    "and zero points there as tensors (torchao's subclasses are supported)"
)


def refusal(leaf: object, part: object | None = None) -> str:
    """The text for a leaf of a type that is not supported, or one that has a `part` of such."""
    if part is not None and part is not leaf:
        return (
            f"a {type(leaf).__name__} with a {_named(part)} in it cannot travel: what sets, slices "
            "and times hold are plain values, tuples and frozensets of those, dates, times, paths, "
            "UUIDs, Decimals, Fractions and ranges; put a list in place of a set of others"
        )
    return f"a leaf of type {_named(leaf)} cannot travel: {_remedy(leaf)}"


def _named(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _remedy(leaf: object) -> str:
    if isinstance(leaf, type):
        return "it is a class; put an instance, or its name as text, in its place"
    if inspect.isroutine(leaf) or inspect.ismodule(leaf):
        return "it is code; put its name as text in its place"
    if callable(inspect.getattr_static(leaf, "state_dict", None)):
        return (
            "put its state_dict() in its place (objects with state_dict and load_state_dict are "
            "taken as they are in dicts, lists and tuples, not inside of other types)"
        )
    name = type(leaf).__name__
    if dataclasses.is_dataclass(leaf) or isinstance(leaf, enum.Enum):
        return f"call torchrelay.register({name}) on every rank"
    return f"call {_snippet(leaf, name)} on every rank"


def _snippet(leaf: object, name: str) -> str:
    base = next((_BASES[one] for one in type(leaf).__mro__ if one in _BASES), None)
    if base is not None:
        return f"torchrelay.register({name}, encode={base.__name__}, decode={name})"
    if hasattr(leaf, "__dict__"):
        return (
            f"torchrelay.register({name}, encode=vars, decode=lambda fields: {name}(**fields)), "
            "with the functions that turn one into a state and back,"
        )
    return (
        f"torchrelay.register({name}, encode=str, decode={name}), with the functions that turn one "
        "into a state and back,"
    )
