"""A state as it is kept: the record of its outline, and a tensor with a name for each image.

A tensor at rest has a name (its path, dotted), a dtype, a shape and its elements in row-major
order, whichever ranks held how much of it: so any program finds it, and any number of ranks can
load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.describing.description import Description
from torchrelay.describing.images import stored_dtype
from torchrelay.errors import UnsupportedLeafError
from torchrelay.pause import gc_paused
from torchrelay.record import manifest as m
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.checkpointable import with_boxes
from torchrelay.state.leaves import distributed_parts
from torchrelay.state.objects import Objects, flatten_objects
from torchrelay.state.paths import LeafPaths, Path, dotted, show, slots

# Makes of the leaves of a state those that are described; the other argument shows their paths.
ChangeLeaves = Callable[[Sequence[Any], Callable[[int], str]], list[Any]]


class Described(NamedTuple):
    """The outline of a state, as a record whose images have no boxes, and by image its name, the
    tensor (strided, DTensor or ShardedTensor), and the path of its first leaf. `objects` are those
    whose state is in it.

    Nothing is copied but views that overlap in more than one way: those share a tensor of bytes.
    """

    record: Record
    names: list[str]
    tensors: list[torch.Tensor]
    paths: list[Path]
    objects: Objects


def describe(state: object, change: ChangeLeaves | None = None) -> Described:
    """Take a state apart, after a `change` of its leaves. `UnsupportedLeafError` names the leaf
    that cannot be kept exactly."""
    with gc_paused():
        bare, objects = flatten_objects(state)
        flat = with_boxes(bare)
        if change is not None:
            by_leaf = LeafPaths(flat.tree)
            leaves = change(flat.leaves, lambda leaf: show(by_leaf[leaf]))
            flat = flat._replace(leaves=leaves)
        return _described(Description(flat, at_rest=True), objects)


def _described(found: Description, objects: Objects) -> Described:
    """Images are in the order of the state."""
    owners = found.owners
    order = np.argsort(owners, kind="stable")
    numbers = np.empty(len(order), np.intp)
    numbers[order] = np.arange(len(order))
    by_leaf: dict[int, Path] = {}
    for path, leaf in slots(found.flat.tree):
        by_leaf.setdefault(leaf, path)
    paths = [by_leaf[leaf] for leaf in owners[order].tolist()]
    names, named = _names(paths)
    record = found.record(numbers, names=named)
    outline = record.outlines[0]
    for leaf, other in zip(outline.other_leaves.tolist(), outline.others, strict=True):
        if isinstance(other, m.SubclassLeaf) and any(distributed_parts(other)):
            why = "a tensor subclass around a DTensor"
            raise UnsupportedLeafError(why, path=show(by_leaf[leaf]))
    tensors = [*_plain_tensors(found), *map(found.flat.leaves.__getitem__, found.wholes)]
    tensors += [_bare(image.region.keep) for image in found.images]
    return Described(record, names, [tensors[n] for n in order.tolist()], paths, objects)


def _names(paths: Iterable[Path]) -> tuple[list[str], tuple[tuple[int, str], ...]]:
    """The names of images, and those that are not the path of their first leaf."""
    found: dict[str, None] = {}
    named = []
    for image, path in enumerate(paths):
        base = name = dotted(path)
        count = 0
        while name in found:
            count += 1
            name = f"{base}.{count}"
        found[name] = None
        if count:
            named.append((image, name))
    return list(found), tuple(named)


def _plain_tensors(found: Description) -> list[torch.Tensor]:
    """Plain tensors without gradients, in dtypes that torch's planners know the size of, and
    distributed ones as they are."""
    plain, sharded = found.plain, found.sharded.numbers
    tensors = list(plain.of(found.flat.leaves))
    if not sharded:
        tensors = [tensor.detach() for tensor in tensors]
    else:
        pairs = zip(plain.leaves.tolist(), tensors, strict=True)
        tensors = [one if leaf in sharded else one.detach() for leaf, one in pairs]
    opaque = [stored_dtype(kind.dtype) != kind.dtype for kind in plain.kinds]
    if any(opaque):
        marks = np.array(opaque, bool)[plain.kind_of]
        for number in np.flatnonzero(marks).tolist():
            if int(plain.leaves[number]) not in sharded:
                tensors[number] = t.raw_of(tensors[number])
    return tensors


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a plain tensor: no gradient, and a dtype that torch's planners know
    the size of."""
    if tensor.dtype in t.OPAQUE:
        return t.raw_of(tensor)
    return tensor.detach()
