"""An offered tree compared with that of a destination: which slots match, and how the two differ.

Items are paired by their keys. The offered tree is a peer's, and may be of any size: parts that
only it has are kept as nodes, and their paths become text only for an error or a report.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from torchrelay.errors import MismatchError
from torchrelay.record import manifest as m
from torchrelay.state.paths import Path, finder, items_of, key_of, names_of
from torchrelay.state.tree import show, slots

Pair = tuple[int, Path, int]

_SHOWN = 5  # paths that an error names
_LISTED = 1 << 23  # characters of the paths that a report names


class Matched:
    """Slots found on both sides (leaf offered, path, leaf here).

    `tree` is that of both sides where they are equal. Leaf for leaf the same then, and the slots
    are listed when they are asked for.
    """

    def __init__(self, pairs: list[Pair], tree: m.Node | None = None) -> None:
        self.tree = tree
        self._pairs = pairs

    @cached_property
    def pairs(self) -> list[Pair]:
        if self.tree is None:
            return self._pairs
        return [(index, path, index) for path, index in slots(self.tree)]

    def some(self, leaves: Container[int]) -> list[Pair]:
        """The pairs of these leaves of the offer."""
        if self.tree is None:
            return [pair for pair in self._pairs if pair[0] in leaves]
        return [(index, path, index) for path, index in slots(self.tree, leaves)]


class Unmatched(NamedTuple):
    """A part that only one side has: a node, or some items of one, by index."""

    path: Path
    node: m.Node
    indices: Sequence[int] | None = None

    def ends(self) -> Iterator[tuple[Path, m.Node]]:
        """Each leaf there, and each container that holds nothing."""
        if self.indices is None:
            yield from _ends(self.path, self.node)
            return
        for index in self.indices:
            path = (*self.path, key_of(self.node, index))
            yield from _ends(path, items_of(self.node)[index])


def _ends(path: Path, node: m.Node) -> Iterator[tuple[Path, m.Node]]:
    items = items_of(node)
    if not items:
        yield path, node
    for index, item in enumerate(items):
        yield from _ends((*path, key_of(node, index)), item)


class Difference(NamedTuple):
    """Containers of two kinds at one path."""

    path: Path
    offered: str
    here: str


class TreeComparison:
    """Two trees side by side."""

    def __init__(self, offered: m.Node, here: m.Node) -> None:
        self.pairs: list[Pair] = []
        self.missing: list[Unmatched] = []  # offered, not here
        self.extra: list[Unmatched] = []
        self.kinds: list[Difference] = []
        self._compare(offered, here, ())

    def _compare(self, offered: m.Node, here: m.Node, path: Path) -> None:
        if isinstance(offered, int) and isinstance(here, int):
            self.pairs.append((offered, path, here))
        elif isinstance(offered, int) or isinstance(here, int):
            self.missing.append(Unmatched(path, offered))
            self.extra.append(Unmatched(path, here))
        else:
            kinds = _kind(offered), _kind(here)
            if kinds[0] != kinds[1]:
                self.kinds.append(Difference(path, *kinds))
            self._pair(offered, here, path)

    def _pair(self, offered: m.Node, here: m.Node, path: Path) -> None:
        theirs, ours = items_of(offered), items_of(here)
        find = finder(offered)
        taken = bytearray(len(theirs))
        lacking = array("q")
        for index, name in enumerate(names_of(here)):
            there = find(name)
            if there is None:
                lacking.append(index)
                continue
            taken[there] = 1
            self._compare(theirs[there], ours[index], (*path, key_of(here, index)))
        if lacking:
            self.extra.append(Unmatched(path, here, lacking))
        if not all(taken):
            left = array("q", (index for index, mark in enumerate(taken) if not mark))
            self.missing.append(Unmatched(path, offered, left))


def _kind(node: m.Node) -> str:
    """The kind of a container as far as it matters. Dicts are taken for each other, whichever they
    are, and namedtuples by their fields: the destination keeps its own."""
    if isinstance(node, m.DictNode):
        return "a dict"
    if isinstance(node, m.NamedTupleNode):
        return "a namedtuple"
    if isinstance(node, m.RecordNode):
        return "a registered type"
    return f"a {node.kind}" if isinstance(node, m.SequenceNode) else "a leaf"


def ends_of(unmatched: Iterable[Unmatched]) -> Iterator[tuple[Path, m.Node]]:
    return (end for one in unmatched for end in one.ends())


def refuse_differences(
    missing: Iterable[Path], extra: Iterable[Path], kinds: Iterable[Difference] = ()
) -> None:
    """Raise `MismatchError` if there is any of these. It names the first of each."""
    lacking, more = (list(islice(paths, _SHOWN + 1)) for paths in (missing, extra))
    differing = list(islice(kinds, _SHOWN + 1))
    sides = (
        ("offered but not in the destination", list(map(show, lacking))),
        ("in the destination but not offered", list(map(show, more))),
        (
            "of another kind",
            [f"{show(x.path)} ({x.offered} offered, {x.here} here)" for x in differing],
        ),
    )
    text = [
        f"{what}: {', '.join(texts[:_SHOWN])}{' ...' if len(texts) > _SHOWN else ''}"
        for what, texts in sides
        if texts
    ]
    if text:
        first = (*lacking, *more, *(x.path for x in differing))[0]
        raise MismatchError(f"paths differ: {'; '.join(text)}", path=show(first))


def listed(paths: Iterable[Path]) -> list[str]:
    """Paths as text, as many as fit; the last entry says so where there are more."""
    found: list[str] = []
    room = _LISTED
    for path in paths:
        text = show(path)
        room -= len(text)
        if room < 0:
            found.append("... and more")
            break
        found.append(text)
    return found
