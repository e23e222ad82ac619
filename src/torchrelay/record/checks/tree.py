"""Whether a tree is one that can be made: every leaf in it once or more, in order of first use."""

from __future__ import annotations

import keyword
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m
from torchrelay.record.keys import KeyLimits

MAX_CLASSES = 512  # of namedtuples, which may have to be made
MAX_FIELDS = 1 << 14  # of those classes together
_NOW_AND_THEN = 1024  # containers between two looks at the clock


class TreeLimits:
    """Limits on expensive items, for all trees of a record together."""

    def __init__(self, in_time: Callable[[], None] | None = None) -> None:
        self.keys = KeyLimits()
        self._classes: dict[tuple[str, ...], int] = {}
        self._in_time = in_time  # called now and then; raises when the caller's time is over
        self._seen = 0

    def note(self, node: m.Node) -> None:
        """Count a container."""
        self._seen += 1
        if self._in_time is not None and self._seen % _NOW_AND_THEN == 0:
            self._in_time()
        if isinstance(node, m.NamedTupleNode):
            key = (node.module, node.name, *node.fields)
            if key not in self._classes:
                self._classes[key] = len(node.fields)
                classes, fields = len(self._classes), sum(self._classes.values())
                if classes > MAX_CLASSES or fields > MAX_FIELDS:
                    raise ManifestError(
                        f"namedtuples of more than {MAX_CLASSES} classes, or with more than "
                        f"{MAX_FIELDS} fields in all"
                    )


def check_tree(tree: m.Node, leaves: int, limits: TreeLimits | None = None) -> None:
    """Raise `ManifestError` unless every leaf is in the tree, first seen in order of its index."""
    limits = limits or TreeLimits()
    seen = 0
    stack: list[Iterator[m.Node]] = [iter((tree,))]
    while stack:
        for node in stack[-1]:
            if isinstance(node, int):
                if not 0 <= node <= seen or node >= leaves:
                    raise ManifestError(f"leaf {node} out of order or of range")
                seen += node == seen
            else:
                items = _node_children(node, limits.keys)
                limits.note(node)
                # Most containers hold leaves alone, none of them seen before.
                fresh = seen + len(items)
                shallow = len(stack) <= m.MAX_DEPTH
                if shallow and fresh <= leaves and items == tuple(range(seen, fresh)):
                    seen = fresh
                    continue
                stack.append(iter(items))
                break
        else:
            stack.pop()
        if len(stack) > m.MAX_DEPTH + 1:
            raise ManifestError(f"tree deeper than {m.MAX_DEPTH}")
    if seen != leaves:
        raise ManifestError(f"{leaves} leaves, {seen} of them in the tree")


def _node_children(node: m.Container, keys: KeyLimits) -> tuple[m.Node, ...]:
    if isinstance(node, m.RecordNode):
        return (node.body,)
    if isinstance(node, m.DictNode):
        if node.factory is not None and node.kind != "defaultdict":
            raise ManifestError(f"a {node.kind} has no factory")
        if len(node.keys) != len(node.items):
            raise ManifestError(f"{len(node.keys)} keys for {len(node.items)} items")
        keys.check(node.keys)
    if isinstance(node, m.NamedTupleNode):
        fields = _spoken(node.fields)
        names = [*_spoken([node.name.lstrip("_")])]  # a class may be private, a field may not
        names += [name for place, name in enumerate(fields) if name != f"_{place}"]
        if len(fields) != len(node.items) or len(set(fields)) != len(fields):
            raise ManifestError(f"namedtuple {node.name[:40]!r} with odd fields")
        if not all(map(_is_name, names)):
            raise ManifestError("a namedtuple's names are identifiers")
    return node.items


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
