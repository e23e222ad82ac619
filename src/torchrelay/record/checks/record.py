"""Whether all parts of a record agree with each other.

A record that passes can be landed without another look at its sizes: every leaf is all of its
image, or a view inside of an image of bytes; every box lies in its image and in its volume; and
time and memory to get there are bounded by the length of the encoded record. The types of fields
say which numbers and words may stand there, and a decoder has checked them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrelay.errors import ManifestError
from torchrelay.record import manifest as m
from torchrelay.record.checks.images import Mode, check_ascending, check_images
from torchrelay.record.checks.leaves import check_leaf
from torchrelay.record.checks.rows import check_rows
from torchrelay.record.checks.tree import TreeLimits, check_tree
from torchrelay.record.meshes import check_meshes
from torchrelay.record.schema import Record

MAX_RANKS = 1 << 20


def check(record: Record, mode: Mode, in_time: Callable[[], None] | None = None) -> None:
    """Raise `ManifestError`, or what the functions that this calls raise, unless a record whose
    fields are in range is valid. `in_time` is called now and then."""
    limits = TreeLimits(in_time)
    if mode == "stream":
        _check_one_rank(record)
    leaves = sum(outline.leaves for outline in record.outlines)
    if leaves > m.MAX_LEAVES:
        raise ManifestError(f"{leaves} leaves, the cap is {m.MAX_LEAVES}")
    for outline in record.outlines:
        if outline.leaves < len(outline.others):
            raise ManifestError(f"{outline.leaves} leaves, {len(outline.others)} of them no rows")
        check_tree(outline.tree, outline.leaves, limits)
    _check_ranks(record, mode)
    others = [leaf for outline in record.outlines for leaf in outline.others]
    own = [leaf for one in record.differences for _, leaf in one.leaves]
    for leaf in (*others, *own):
        check_leaf(leaf, limits)
    check_meshes(others, record.meshes)
    check_meshes(own)
    parts = [part for leaf in (*others, *own) for part in m.parts(leaf)]
    _check_count(record, mode, len(parts))
    sizes = check_images(record, mode)
    check_rows(record, mode, sizes, parts)
    _check_rest(record)
    if mode == "whole" and record.origin is None:
        raise ManifestError("a step that does not say what saved it")


def _check_one_rank(record: Record) -> None:
    if (
        len(record.outlines) != 1
        or len(record.volumes) != 1
        or record.ranks != (0,)
        or record.starts is not None
        or record.volume_of is not None
        or record.differences
        or record.names
        or record.objects
    ):
        raise ManifestError("not the record of one live rank")


def _check_count(record: Record, mode: Mode, parts: int) -> None:
    """The number of images is one that something in the record stands for."""
    most = sum(outline.rows for outline in record.outlines) + parts
    if mode != "stream":
        known = (record.kind_of, record.starts)
        most = max(most, *(0 if column is None else len(column) for column in known))
    if record.images > most:
        raise ManifestError(f"{record.images} images, and places of {most}")


def _check_ranks(record: Record, mode: Mode) -> None:
    # A part of boxes alone is of no rank's state.
    least = 0 if mode == "part" and not record.outlines else 1
    if not least <= len(record.ranks) <= MAX_RANKS:
        raise ManifestError(f"a state of {len(record.ranks)} ranks")
    if not all(0 <= number < len(record.outlines) for number in record.ranks):
        raise ManifestError("a rank has no outline")
    check_ascending([one.rank for one in record.differences], len(record.ranks), "ranks")
    for one in record.differences:
        outline = record.outlines[record.ranks[one.rank]]
        check_ascending([leaf for leaf, _ in one.leaves], outline.leaves, "own leaves")
        check_ascending([row for row, _ in one.images], outline.rows, "own images")


def _check_rest(record: Record) -> None:
    if record.names:
        images, names = zip(*record.names, strict=True)
        check_ascending(images, record.images, "names of images")
        _check_different(names, "name")
    _check_different([one.name for one in record.objects], "object")
    for one in record.objects:
        if one.volume >= len(record.volumes):
            raise ManifestError(f"volume {one.volume} of {len(record.volumes)}")
        if one.start + one.nbytes > record.volumes[one.volume].nbytes:
            raise ManifestError(f"object {one.name[:80]!r} is not in its volume")


def _check_different(names: Sequence[str], what: str) -> None:
    if len(set(names)) != len(names):
        raise ManifestError(f"a {what} stands there twice")
