"""The state below one key of a step, as a step of its own."""

from __future__ import annotations

from operator import itemgetter

import numpy as np
from msgspec.structs import replace

from torchrelay.describing.outline import renumbered
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.planning.stored import Names
from torchrelay.record import manifest as m
from torchrelay.record.schema import RankDifference, Record, StateOutline, column_of
from torchrelay.sources.source import Opened
from torchrelay.state.tree import children_of, text_of


class Subtree:
    """An opened step with the record of what is below `key`, a dotted path. See `Opened`."""

    def __init__(self, opened: Opened, key: str) -> None:
        self.record = below(opened.record, key)
        self.files, self.digest, self.close = opened.files, opened.digest, opened.close


def below(record: Record, key: str) -> Record:
    """The record of the state below a key; `MismatchError` where no rank has such a key."""
    nodes = [_find(outline.tree, key) for outline in record.outlines]
    if all(node is None for node in nodes):
        names = dict.fromkeys(
            text_of(name) for outline in record.outlines for name, _ in children_of(outline.tree)
        )
        raise MismatchError(
            f"the step has no key {key!r}; its keys: {', '.join(names)}", step=record.step
        )
    outlines, moves = [], []
    for outline, node in zip(record.outlines, nodes, strict=True):
        move = _Move(outline, m.DictNode("dict", (), ()) if node is None else node)
        outlines.append(move.outline)
        moves.append(move)
    own = tuple([moves[record.ranks[one.rank]].difference(one) for one in record.differences])
    # Tensors keep their names.
    listed = tuple(enumerate(Names(record).all()))
    return replace(record, outlines=tuple(outlines), differences=own, names=listed)


class _Move:
    """Leaves of an outline that are in a part of its tree, with new numbers."""

    def __init__(self, outline: StateOutline, node: m.Node) -> None:
        order: dict[int, int] = {}  # new numbers by those in the whole
        tree = renumbered(node, lambda number: order.setdefault(number, len(order)))
        new: Numbers = np.full(outline.leaves, -1, np.int64)
        new[np.array([*order], np.int64)] = np.arange(len(order))
        rows, others = (_chosen(new, c) for c in (outline.row_leaves, outline.other_leaves))
        self._leaves = new
        self._rows: Numbers = np.full(outline.rows, -1, np.int64)
        self._rows[rows] = np.arange(len(rows))
        self.outline = StateOutline(
            tree,
            len(order),
            tuple([outline.others[number] for number in others.tolist()]),
            column_of(new[outline.other_leaves[others]]),
            column_of(outline.row_kinds[rows]),
            outline.row_images[rows],
            column_of(outline.row_offsets[rows]),
        )

    def difference(self, own: RankDifference) -> RankDifference:
        leaves = [(int(self._leaves[leaf]), record) for leaf, record in own.leaves]
        images = [(int(self._rows[row]), image) for row, image in own.images]
        return RankDifference(
            own.rank,
            tuple(sorted((one for one in leaves if one[0] >= 0), key=itemgetter(0))),
            tuple(sorted(one for one in images if one[0] >= 0)),
        )


def _chosen(new: Numbers, leaves: Numbers) -> Numbers:
    """The places of leaves that have new numbers, in the order of those."""
    some = np.flatnonzero(new[leaves] >= 0)
    found: Numbers = some[np.argsort(new[leaves[some]], kind="stable")]
    return found


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
