"""The state below one key of a step, as a step of its own."""

from __future__ import annotations

from msgspec.structs import replace

from torchrelay.errors import MismatchError
from torchrelay.plan.overlay import renumbered
from torchrelay.record import manifest as m
from torchrelay.record.checkpoint.schema import Checkpoint, Outline, Own, pairs
from torchrelay.sources.seam import Opened
from torchrelay.state.tree import children_of, text_of


class Subtree:
    """An opened step with the record of what is below `key`, a dotted path. See `seam.Opened`."""

    def __init__(self, opened: Opened, key: str) -> None:
        self.record = below(opened.record, key)
        self.files, self.digest, self.close = opened.files, opened.digest, opened.close


def below(record: Checkpoint, key: str) -> Checkpoint:
    """The record of the state below a key; `MismatchError` where no rank has such a key."""
    nodes = [_find(outline.tree, key) for outline in record.outlines]
    if all(node is None for node in nodes):
        names = dict.fromkeys(
            text_of(name) for outline in record.outlines for name, _ in children_of(outline.tree)
        )
        raise MismatchError(
            f"the step has no key {key!r}; its keys: {', '.join(names)}", step=record.step
        )
    outlines, numbers = [], []
    for outline, node in zip(record.outlines, nodes, strict=True):
        order: dict[int, int] = {}  # leaves of the subtree, by their numbers in the whole
        empty = m.DictNode("dict", (), ())
        tree = renumbered(
            empty if node is None else node,
            lambda n, o=order: o.setdefault(n, len(o)),  # type: ignore[misc]
        )
        leaves = tuple(outline.leaves[number] for number in order)
        outlines.append(Outline(tree, leaves, outline.names, outline.strides))
        numbers.append(order)
    own = tuple(_moved(one, numbers[record.ranks[one.rank]]) for one in record.own)
    return replace(record, outlines=tuple(outlines), own=own)


def _moved(own: Own, order: dict[int, int]) -> Own:
    leaves = {order[number]: leaf for number, leaf in own.leaves if number in order}
    return Own(own.rank, pairs(leaves), own.names)


def _find(tree: m.Node, key: str) -> m.Node | None:
    """The node at a dotted path. A key may have dots in it."""
    if isinstance(tree, int):
        return None
    for name, child in children_of(tree):
        text = text_of(name)
        if key == text:
            return child
        if key.startswith(f"{text}.") and (found := _find(child, key[len(text) + 1 :])) is not None:
            return found
    return None
