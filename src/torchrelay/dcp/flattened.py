"""The outline of a state that only its planner has seen: containers by the planner's paths.

torch's planner takes dicts and lists apart and spreads the parts over the ranks: the metadata has
them in the order of the ranks that write them, `planner_data` in that of the state. It turns keys
into text. Keys of an optimizer's state are known all the same: its `param_groups` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchrelay.describing.outline import in_rows, renumbered, shifted
from torchrelay.errors import CheckpointError, ManifestError
from torchrelay.planning.stored import Names
from torchrelay.record import manifest as m
from torchrelay.record.schema import ImageKind, Record
from torchrelay.record.values import encode_key
from torchrelay.state.paths import Path
from torchrelay.state.tensors import NAMES

GROUPS, PARAMS, STATE = "param_groups", "params", "state"
_NOTHING = m.DictNode("dict", (), ())


class Key(NamedTuple):
    """A step of a path that is a key of a dict and no text: a bare 0 is a place in a list."""

    value: object


_Keys = dict[str, Key]


class ValueTree(msgspec.Struct, array_like=True, frozen=True):
    """An object of plain values alone."""

    tree: m.Node
    leaves: tuple[m.Leaf, ...]


def outline_of(
    metadata: Metadata, shares: Sequence[Record], values: Mapping[str, ValueTree]
) -> Record:
    """The outline of everything that the metadata names and the ranks have written: boxes in
    `shares`, and objects that are `values`.

    `CheckpointError` names what no rank has written.
    """
    stored: dict[str, ImageKind] = {}
    for share in shares:
        for image, name in share.names:
            kind = share.image_kinds[int(share.image_kind[image])]
            stored.setdefault(name, kind.without_boxes)
    objects = {one.name for share in shares for one in share.objects}
    places = {name: place for place, name in enumerate(stored)}
    paths = _paths(metadata)
    optimizers = _optimizers(paths, values)
    leaves: list[m.Leaf] = []
    placed: list[tuple[Path, m.Node]] = []
    for name, text_path in paths.items():
        path = _with_keys(text_path, optimizers)
        entry = metadata.state_dict_metadata[name]
        if name in stored:
            tensor = stored[name]
            placed.append((path, len(leaves)))
            leaves.append(m.TensorLeaf(tensor.dtype, tensor.shape, None, places[name]))
        elif name in values:
            placed.append((path, shifted(values[name].tree, len(leaves))))
            leaves += values[name].leaves
        elif isinstance(entry, TensorStorageMetadata) and not prod(entry.size):
            placed.append((path, len(leaves)))
            leaves.append(m.TensorLeaf(NAMES[entry.properties.dtype], tuple(entry.size), None, -1))
        elif name not in objects:
            raise CheckpointError("no rank has written it", phase="commit", path=name)
    placed += [(path, _NOTHING) for path in _empty(paths, optimizers)]
    tree, order = tree_of_paths(placed)
    record = in_rows(tree, [leaves[index] for index in order], list(stored.values()))
    derived = Names(record)
    planned = [(place, name) for name, place in places.items() if derived[place] != name]
    return msgspec.structs.replace(record, names=tuple(planned))


def _paths(metadata: Metadata) -> dict[str, Path]:
    """The path of each part of the state, in the order of the state."""
    entries: dict[str, Any] = metadata.state_dict_metadata
    facts = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    paths: dict[str, Path] = {name: tuple(path) for name, path in facts.items() if name in entries}
    return paths | {name: (name,) for name in entries if name not in paths}


def _optimizers(paths: Mapping[str, Path], values: Mapping[str, ValueTree]) -> dict[Path, _Keys]:
    """Where states of optimizers are, and the numbers by which each knows its parameters."""
    found: dict[Path, _Keys] = {}
    for name, path in paths.items():
        if path[-3:-2] == (GROUPS,) and path[-1] == PARAMS and name in values:
            numbers = [leaf.value for leaf in values[name].leaves if isinstance(leaf, m.ValueLeaf)]
            keys = {str(number): Key(number) for number in numbers if type(number) is int}
            found.setdefault(path[:-3], {}).update(keys)
    return found


def _empty(paths: Mapping[str, Path], optimizers: Mapping[Path, _Keys]) -> list[Path]:
    """Where optimizers without any state yet have an empty dict, which leaves no path behind."""
    steps: dict[Path, set[object]] = {root: set() for root in optimizers}
    for path in paths.values() if steps else ():
        for depth, step in enumerate(path):
            if path[:depth] in steps:
                steps[path[:depth]].add(step)
    return [(*root, STATE) for root, found in steps.items() if found == {GROUPS}]


def _with_keys(path: Path, optimizers: Mapping[Path, _Keys]) -> Path:
    for depth, step in enumerate(path[:-1] if optimizers else ()):
        if step == STATE and path[:depth] in optimizers:
            key: Any = path[depth + 1]
            return (*path[: depth + 1], optimizers[path[:depth]].get(key, key), *path[depth + 2 :])
    return path


class _Branch(dict[Any, Any]):
    pass


def tree_of_paths(placed: Iterable[tuple[Path, m.Node]]) -> tuple[m.Node, list[int]]:
    """The containers that have these nodes at these paths, their leaves counted in tree order;
    and for each leaf, in that order, the index it had in the nodes.

    Paths may come in any order. A container whose keys are 0, 1, 2 ... is a list, any other a dict.
    """
    root = _Branch()
    for path, node in placed:
        branch = root
        for step in path[:-1]:
            branch = branch.setdefault(step, _Branch())
            if not isinstance(branch, _Branch):
                raise ManifestError(f"{path} leads through a leaf")
        if not path or path[-1] in branch:
            raise ManifestError(f"two leaves at {path}")
        branch[path[-1]] = node
    order: dict[int, int] = {}
    tree = renumbered(_node(root, root=True), lambda index: order.setdefault(index, len(order)))
    return tree, list(order)


def _node(branch: Any, root: bool = False) -> m.Node:
    if not isinstance(branch, _Branch):
        node: m.Node = branch
        return node
    items = {key: _node(child) for key, child in branch.items()}
    if items and not root and set(items) == set(range(len(items))):
        return m.SequenceNode("list", tuple([items[index] for index in range(len(items))]))
    keys = tuple([encode_key(key.value if isinstance(key, Key) else key) for key in items])
    return m.DictNode("dict", keys, tuple(items.values()))
