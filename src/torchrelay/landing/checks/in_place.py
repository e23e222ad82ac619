"""Objects that are filled in place see what is offered for them, and may leave some of it out."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from torchrelay.plan.selection import Selection
from torchrelay.record import manifest as m
from torchrelay.state.objects import InPlaceObject, Objects, OfferedTensor
from torchrelay.state.paths import Path, key_of, text_of
from torchrelay.state.tree import grafted, subtree

TensorOf = Callable[[int], OfferedTensor | None]  # of an offered leaf


def checked_in_place(
    tree: m.Node, objects: Objects, tensor_of: TensorOf, choice: Selection | None, *, strict: bool
) -> m.Node:
    """The offered tree without the names that objects leave out. `MismatchError` where one refuses
    what is offered for it."""
    choice = choice or Selection()
    for path, held in objects.items():
        if isinstance(held.object, InPlaceObject):
            tree = _checked(tree, path, held.object, tensor_of, choice, strict=strict)
    return tree


def _checked(
    tree: m.Node,
    path: Path,
    mine: InPlaceObject,
    tensor_of: TensorOf,
    choice: Selection,
    *,
    strict: bool,
) -> m.Node:
    branch = subtree(tree, path)
    if not isinstance(branch, m.DictNode):
        branch = m.DictNode("dict", (), ())
    names = [text_of(key_of(branch, place)) for place in range(len(branch.items))]
    offered = {
        name: tensor_of(item) if isinstance(item, int) else None
        for name, item in zip(names, branch.items, strict=True)
    }
    # Ranks whose trees differ may each have their own part of the names.
    exact = strict and choice.exact
    left_out = set(mine.check(offered, lambda name: choice.takes((*path, name)), strict=exact))
    kept = [place for place, name in enumerate(names) if name not in left_out]
    if len(kept) == len(names):
        return tree
    keys, items = ([column[place] for place in kept] for column in (branch.keys, branch.items))
    return grafted(tree, {path: replace(branch, keys=tuple(keys), items=tuple(items))})
