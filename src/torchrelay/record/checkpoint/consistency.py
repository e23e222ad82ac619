"""Whether all parts of a record agree with each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torchrelay.errors import ManifestError
from torchrelay.geometry import DIGEST_BYTES
from torchrelay.geometry.strides import extent, packed
from torchrelay.record.checkpoint.places import ALIGN, LARGE, check_tensors
from torchrelay.record.checkpoint.schema import Checkpoint, DataFile, Outline, Own
from torchrelay.record.checkpoint.stored import Tensors
from torchrelay.record.dtypes import itemsize
from torchrelay.record.manifest import parts
from torchrelay.record.validation import check_filled, check_outline, last_byte, reach_of

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def check(checkpoint: Checkpoint, *, part: bool = False) -> None:
    """Raise `ManifestError` unless all parts of the record agree with each other.

    One of a rank's `part` of a state may have some boxes of a tensor or none, and no digests yet.
    """
    check_files(checkpoint.files, hashed=not part)
    sizes = [file.nbytes for file in checkpoint.files]
    check_tensors(checkpoint.tensors, sizes, whole=not part)
    for blob in checkpoint.blobs:
        if blob.kind not in ("state", "raw"):
            raise ManifestError(f"blob of kind {blob.kind[:40]!r}")
        _check_range(checkpoint.files, blob.file, blob.start, blob.nbytes)
    if not checkpoint.ranks:
        raise ManifestError("a step of no rank")
    if not all(0 <= index < len(checkpoint.outlines) for index in checkpoint.ranks):
        raise ManifestError("a rank has no outline")
    named = _Named(checkpoint.tensors)
    for outline in checkpoint.outlines:
        _check_outline(outline, named)
    _check_own(checkpoint, named)


def check_files(files: Sequence[DataFile], *, hashed: bool = True) -> None:
    """Raise `ManifestError` unless these can be files of one step, each with its digests; or
    without, where they need not be `hashed`."""
    names = set()
    for file in files:
        if not PLAIN_NAME.fullmatch(file.name) or file.name in names:
            raise ManifestError(f"file name {file.name[:80]!r}")
        names.add(file.name)
        if not 0 < file.nbytes < LARGE or file.chunk_bytes < 1:
            raise ManifestError(f"{file.name}: {file.nbytes} bytes in chunks of {file.chunk_bytes}")
        if file.chunk_bytes % ALIGN and file.chunks > 1:
            raise ManifestError(f"{file.name}: chunks of {file.chunk_bytes} bytes cut elements")
        if len(file.digests) != DIGEST_BYTES * file.chunks and (hashed or file.digests):
            raise ManifestError(f"{file.name}: {len(file.digests)} bytes of digests")


def _check_range(files: Sequence[DataFile], file: int, start: int, nbytes: int) -> None:
    if not 0 <= file < len(files):
        raise ManifestError(f"file {file} of {len(files)}")
    if start < 0 or nbytes < 0 or start + nbytes > files[file].nbytes:
        raise ManifestError(f"{files[file].name}: bytes {start} to {start + nbytes} not in it")


class _Named:
    """Bytes and shapes of tensors by name."""

    def __init__(self, tensors: Tensors) -> None:
        tilings = [tensors.tilings[number] for number in tensors.which.tolist()]
        sizes = {id(one): prod(one.shape) * itemsize(one.dtype) for one in tensors.tilings}
        self.sizes = {
            name: sizes[id(one)] for name, one in zip(tensors.names, tilings, strict=True)
        }
        self.shapes = {name: one.shape for name, one in zip(tensors.names, tilings, strict=True)}

    def check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.sizes:
                raise ManifestError(f"no tensor {name[:80]!r}")


def _check_outline(outline: Outline, named: _Named) -> None:
    named.check(outline.names)
    _check_indices([index for index, _ in outline.strides], len(outline.names), "strides")
    for index, strides in outline.strides:
        _check_strides(named.shapes[outline.names[index]], strides)
    sizes = [named.sizes[name] for name in outline.names]
    check_outline(outline.tree, outline.leaves, sizes)


def _check_indices(indices: Sequence[int], stop: int, what: str) -> None:
    """They ascend from 0 on and end before `stop`."""
    last = -1
    for index in indices:
        if not last < index < stop:
            raise ManifestError(f"{what} that have no place: {index} after {last}, of {stop}")
        last = index


def _check_own(checkpoint: Checkpoint, named: _Named) -> None:
    """What ranks have of their own; no more of an outline is looked at than it changes."""
    _check_indices([own.rank for own in checkpoint.own], checkpoint.world, "leaves of a rank")
    needs: dict[int, _Needs] = {}  # by outline
    for own in checkpoint.own:
        number = checkpoint.ranks[own.rank]
        shared = checkpoint.outlines[number]
        _check_indices([index for index, _ in own.leaves], len(shared.leaves), "own leaves")
        _check_indices([index for index, _ in own.names], len(shared.names), "own names")
        named.check(name for _, name in own.names)
        for index, name in own.names:
            if index in shared.layouts:
                _check_strides(named.shapes[name], shared.layouts[index])
        if number not in needs and (own.names or own.leaves):
            needs[number] = _needs(shared)
        _check_own_leaves(own, shared, needs.get(number, {}), named)


def _check_own_leaves(own: Own, shared: Outline, needs: _Needs, named: _Named) -> None:
    """Leaves of a rank fill the tensors that they lie in, together with those that it shares."""
    sizes = _OwnSizes(shared.names, dict(own.names), named.sizes)
    reach = dict(reach_of([leaf for _, leaf in own.leaves], sizes))
    replaced = {index for index, _ in own.leaves}
    changed = {part.storage for at in replaced for part in parts(shared.leaves[at])} - {-1}
    for index in changed.union(reach, (index for index, _ in own.names)):
        last = next((end for end, at in needs.get(index, ()) if at not in replaced), 0)
        end = max(last, reach.get(index, 0))
        if end:
            check_filled(index, end, sizes[index])


class _OwnSizes(Sequence[int]):
    """The bytes of each tensor that an outline names, for a rank that has some names of its own."""

    def __init__(self, shared: Sequence[str], own: Mapping[int, str], sizes: Mapping[str, int]):
        self._shared, self._own, self._sizes = shared, own, sizes

    def __len__(self) -> int:
        return len(self._shared)

    def __getitem__(self, index: Any) -> Any:
        return self._sizes[self._own.get(index, self._shared[index])]


_Needs = dict[int, list[tuple[int, int]]]


def _needs(outline: Outline) -> _Needs:
    """By name, the last byte of it that each leaf reaches, and the leaf; those that reach furthest
    first."""
    found: _Needs = {}
    for at, leaf in enumerate(outline.leaves):
        for part in parts(leaf):
            if part.storage >= 0:
                found.setdefault(part.storage, []).append((last_byte(part), at))
    for leaves in found.values():
        leaves.sort(reverse=True)
    return found


def _check_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Strides are those of a tensor without holes: they take no more memory than its elements."""
    if len(strides) == len(shape) and all(0 <= stride < 1 << 62 for stride in strides):
        layout = packed(shape, strides)
        if layout is not None and layout.numel == extent(shape, strides) == prod(shape):
            return
    raise ManifestError(f"strides {strides[:8]} of a tensor of shape {shape[:8]}")
