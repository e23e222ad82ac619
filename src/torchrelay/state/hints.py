"""What to do about a destination that does not fit: the usual reasons, looked for afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.errors import MismatchError
from torchrelay.record import manifest as m
from torchrelay.state.paths import Path
from torchrelay.state.tree import show
from torchrelay.state.wrappers import WRAPPERS, bare_name

SHARDED_TO_WHOLE = (
    "the sender's tensor is sharded over the ranks of its mesh, and this one is whole: receive "
    "into a model that is sharded the same way, or name all of the sender's ranks as sources, "
    "which puts the parts together"
)
WHOLE_TO_SHARDED = (
    "the sender's tensor is whole, and this one is sharded over the ranks of its mesh: send from a "
    "model that is sharded the same way, or receive from a list of sources, which reshards it"
)
CUT_OTHERWISE = (
    "receive from the rank with the same coordinate in a mesh of the same shape, or name all of "
    "the sender's ranks as sources, which reshards it"
)
WITHOUT_MEMORY = (
    "a meta tensor has no memory to be filled: make some first, as by module.to_empty(device=...)"
)
UNINITIALIZED = "the parameter of a lazy module has no shape yet: run the module once before"


@contextmanager
def with_hints(offered: m.Node, here: m.Node) -> Iterator[None]:
    """Add to a `MismatchError` of two trees what probably is the reason, and the remedy."""
    try:
        yield
    except MismatchError as fault:
        for path in _fresh_optimizers(offered, here, ()):
            if show((*path, "state")) not in fault.message:
                continue  # it receives its state as an object, or is left out
            fault.message += (
                f"; {show(path)} is the state dict of an optimizer that has made no step on one "
                "of the two sides: pass the optimizer itself, which takes whatever is offered"
            )
            break
        for path, part in _wrapped(offered, here, ()):
            fault.message += (
                f"; the keys of {show(path)} differ by {part!r}, as of a module in a wrapper of "
                f"{WRAPPERS[part]}: pass the module itself in place of its state dict"
            )
            break
        raise


def _fresh_optimizers(offered: m.Node, here: m.Node, path: Path) -> Iterator[Path]:
    """Where both sides have the state dict of an optimizer, and one of them is empty."""
    if not isinstance(offered, m.DictNode) or not isinstance(here, m.DictNode):
        return
    ours = dict(zip(here.keys, here.items, strict=True))
    theirs = dict(zip(offered.keys, offered.items, strict=True))
    states = [side.get("state") for side in (ours, theirs)]
    if "param_groups" in ours and "param_groups" in theirs:
        sizes = [len(state.items) for state in states if isinstance(state, m.DictNode)]
        if len(sizes) == 2 and (sizes[0] == 0) != (sizes[1] == 0):
            yield path
    for key, child in ours.items():
        if key in theirs and isinstance(key, str):
            yield from _fresh_optimizers(theirs[key], child, (*path, key))


def _wrapped(offered: m.Node, here: m.Node, path: Path) -> Iterator[tuple[Path, str]]:
    """Where two dicts have keys that differ by the prefix of a wrapper alone, and which it is."""
    if not isinstance(offered, m.DictNode) or not isinstance(here, m.DictNode):
        return
    theirs, ours = set(map(str, offered.keys)), set(map(str, here.keys))
    if theirs != ours and set(map(bare_name, theirs)) == set(map(bare_name, ours)):
        parts = {part for key in theirs ^ ours for part in key.split(".")}
        yield from ((path, part) for part in WRAPPERS if part in parts)
        return
    below = dict(zip(offered.keys, offered.items, strict=True))
    for key, child in zip(here.keys, here.items, strict=True):
        if key in below and isinstance(key, str):
            yield from _wrapped(below[key], child, (*path, key))
