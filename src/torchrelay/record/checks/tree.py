"""Whether a tree is one that can be made: every leaf in it once or more, in order of first use."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Callable, Sequence

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m
from torchrelay.record.keys import check_keys
from torchrelay.record.probing import MoreTries

MAX_CLASSES = 512  # of namedtuples, which may have to be made
MAX_FIELDS = 1 << 14  # of those classes together
_NOW_AND_THEN = 1024  # containers between two looks at the clock


class TreeLimits:
    """Limits on expensive items, for all trees of a record together."""

    def __init__(self, in_time: Callable[[], None] | None = None) -> None:
        self._classes: set[tuple[str, ...]] = set()
        self._fields = 0
        self._more = MoreTries()
        self._in_time = in_time  # called now and then; raises when the caller's time is over
        self._seen = 0

    def items(self, node: m.Container) -> tuple[m.Node, ...]:
        """The items of a container, which is counted, and is one that can be made."""
        self._seen += 1
        if self._in_time is not None and self._seen % _NOW_AND_THEN == 0:
            self._in_time()
        if isinstance(node, m.DictNode):
            if node.factory is not None and node.kind != "defaultdict":
                raise ManifestError(f"a {node.kind} has no factory")
            if len(node.keys) != len(node.items):
                raise ManifestError(f"{len(node.keys)} keys for {len(node.items)} items")
            check_keys(node.keys, self._more)
        elif isinstance(node, m.RecordNode):
            return (node.body,)
        elif isinstance(node, m.NamedTupleNode):
            _check_fields(node)
            self._count_class((node.module, node.name, *node.fields))
        return node.items

    def _count_class(self, key: tuple[str, ...]) -> None:
        if key not in self._classes:
            self._classes.add(key)
            self._fields += len(key) - 2
            if len(self._classes) > MAX_CLASSES or self._fields > MAX_FIELDS:
                raise ManifestError(
                    f"namedtuples of more than {MAX_CLASSES} classes, or with more than "
                    f"{MAX_FIELDS} fields in all"
                )


def check_tree(tree: m.Node, leaves: int, limits: TreeLimits) -> None:
    """Raise `ManifestError` unless every leaf is in the tree, first seen in order of its index."""
    seen = _visited(m.SequenceNode("list", (tree,)), 0, leaves, limits, 0)
    if seen != leaves:
        raise ManifestError(f"{leaves} leaves, {seen} of them in the tree")


def _visited(node: m.Container, seen: int, leaves: int, limits: TreeLimits, depth: int) -> int:
    """The leaves that were seen after those in a container too."""
    if depth > m.MAX_DEPTH:
        raise ManifestError(f"tree deeper than {m.MAX_DEPTH}")
    items = limits.items(node)
    # Most containers hold leaves alone, none of them seen before.
    fresh = seen + len(items)
    if fresh <= leaves and items == tuple(range(seen, fresh)):
        return fresh
    for item in items:
        if not isinstance(item, int):
            seen = _visited(item, seen, leaves, limits, depth + 1)
        elif not 0 <= item <= seen or item >= leaves:
            raise ManifestError(f"leaf {item} out of order or of range")
        else:
            seen += item == seen
    return seen


def _check_fields(node: m.NamedTupleNode) -> None:
    fields = _spoken(node.fields)
    names = [*_spoken([node.name.lstrip("_")])]  # a class may be private, a field may not
    names += [name for place, name in enumerate(fields) if name != f"_{place}"]
    if len(fields) != len(node.items) or len(set(fields)) != len(fields):
        raise ManifestError(f"namedtuple {node.name[:40]!r} with other fields than items")
    if not all(map(_is_name, names)):
        raise ManifestError("a namedtuple's names are identifiers")


def _spoken(names: Sequence[str]) -> Sequence[str]:
    """Identifiers as Python takes them: those that it normalises to one are one."""
    if "".join(names).isascii():
        return names
    return [unicodedata.normalize("NFKC", name) for name in names]


def _is_name(name: str) -> bool:
    return (
        name.isidentifier()
        and len(name) < 256
        and not name.startswith("_")
        and not keyword.iskeyword(name)
    )
