"""The tensors of a model as a step has them: what is exported without being loaded."""

from __future__ import annotations

from dataclasses import replace

from torchrelay.planning.stored import StoredTensor, stored_tensors
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import MeshSharding, Record
from torchrelay.state.paths import children_of


def stored_model(record: Record) -> dict[str, StoredTensor] | None:
    """The tensors of a step whose state is a flat dict of tensors, by name, each once: a tied one
    is there under its first name. None where a tensor is not in the step as it is exported, but for
    example as a view of another: such a model has to be loaded.

    {"w": 4 x 2, "tied": the same tensor, "none": 0 x 2} is {"w": image 0, "none": no boxes}.
    """
    if len(record.outlines) != 1 or record.differences:
        return None
    rows = LeafRows(record, at_rest=True)
    if not isinstance(rows.tree, m.DictNode):
        return None
    row_of = {leaf: row for row, leaf in enumerate(rows.leaves.tolist())}
    stored = stored_tensors(record)
    found: dict[str, StoredTensor] = {}
    seen: set[int] = set()
    for key, leaf in children_of(rows.tree):
        if not isinstance(leaf, int):
            return None
        row, name = row_of.get(leaf), str(key)
        if row is None:
            empty = _empty(rows.others[leaf])
            if empty is None:
                return None
            found[name] = replace(empty, name=name)
            continue
        image = int(rows.images[row])
        if not _is_whole(rows, row, stored[image]):
            return None
        if image not in seen:
            seen.add(image)
            found[name] = replace(stored[image], name=name)
    return found


def _empty(leaf: m.Leaf) -> StoredTensor | None:
    """A tensor without elements, which has no image."""
    whole = leaf.shape if isinstance(leaf, m.DTensorLeaf) else None
    if isinstance(leaf, m.DTensorLeaf):
        leaf = leaf.local
    if not isinstance(leaf, m.TensorLeaf) or 0 not in leaf.shape or leaf.flags & m.META:
        return None
    if whole is not None and 0 not in whole:
        return None
    return StoredTensor("", leaf.dtype, leaf.shape if whole is None else whole, ())


def _is_whole(rows: LeafRows, row: int, stored: StoredTensor) -> bool:
    """Whether the elements of a row are all of its image, in the dtype that the image has."""
    kind = rows.record.kinds[int(rows.kinds[row])]
    if kind.sharding >= 0:
        how = rows.record.shardings[kind.sharding]
        if not isinstance(how, MeshSharding) or kind.shape != stored.shape or rows.offsets[row]:
            return False
        if any(one.kind == "partial" for one in how.placements):
            return False
    elif not rows.is_image[row]:
        return False
    return kind.dtype == stored.dtype
