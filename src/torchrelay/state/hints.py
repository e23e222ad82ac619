"""Advice for a destination that does not fit: the usual reasons, checked afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torchrelay.errors import MismatchError
from torchrelay.record import manifest as m
from torchrelay.state.paths import Path
from torchrelay.state.tree import show, subtree
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
        dicts = list(_dicts(offered, here, ()))
        # An optimizer whose state is not named receives it as an object, or is left out.
        for path in (path for path, *both in dicts if _is_fresh_optimizer(*both)):
            if show((*path, "state")) in fault.message:
                fault.message += (
                    f"; {show(path)} is the state dict of an optimizer that has made no step on "
                    "one of the two sides: pass the optimizer itself, which takes whatever is "
                    "offered"
                )
                break
        for path, part in ((path, _wrapper(*both)) for path, *both in dicts):
            if part is not None:
                fault.message += (
                    f"; the keys of {show(path)} differ by {part!r}, as of a module in a wrapper "
                    f"of {WRAPPERS[part]}: pass the module itself in place of its state dict"
                )
                break
        raise


def _dicts(
    offered: m.Node, here: m.Node, path: Path
) -> Iterator[tuple[Path, m.DictNode, m.DictNode]]:
    """The dicts that both trees have at one path of text."""
    if isinstance(offered, m.DictNode) and isinstance(here, m.DictNode):
        yield path, offered, here
        pairs = zip(offered.keys, offered.items, strict=True)
        theirs = {key: item for key, item in pairs if isinstance(key, str)}
        for key, child in zip(here.keys, here.items, strict=True):
            if isinstance(key, str) and key in theirs:
                yield from _dicts(theirs[key], child, (*path, key))


def _is_fresh_optimizer(offered: m.DictNode, here: m.DictNode) -> bool:
    """Whether both are the state dict of an optimizer, and the state of one alone is empty."""
    if "param_groups" not in offered.keys or "param_groups" not in here.keys:
        return False
    states = [subtree(side, ("state",)) for side in (offered, here)]
    sizes = [len(state.items) for state in states if isinstance(state, m.DictNode)]
    return len(sizes) == 2 and (sizes[0] == 0) != (sizes[1] == 0)


def _wrapper(offered: m.DictNode, here: m.DictNode) -> str | None:
    """The part of a wrapper by which alone the keys of two dicts differ."""
    theirs, ours = set(map(str, offered.keys)), set(map(str, here.keys))
    if theirs == ours or set(map(bare_name, theirs)) != set(map(bare_name, ours)):
        return None
    parts = {part for key in theirs ^ ours for part in key.split(".")}
    return next((part for part in WRAPPERS if part in parts), None)
