"""Which memory of a destination takes which of the bytes that are offered.

Destinations that are one run of memory, in the order of the bytes, are rows of a table. All others
are late: their elements are copied from images that are held until the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.strides import extent, packed
from torchrelay.landing.checks.fit import ArrayFit, Fit, Found, fit
from torchrelay.landing.checks.ties import check_ties
from torchrelay.landing.leaves import strides_of
from torchrelay.landing.pairing import PreparedDestination
from torchrelay.landing.straight import Indices, Straight, gpu_of
from torchrelay.landing.workspace import Workspace
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.state import tensors as t
from torchrelay.state.leaves import check_buildable
from torchrelay.state.matching import Matched, Pair
from torchrelay.state.objects import InPlaceObject
from torchrelay.state.paths import LeafPaths, Path, naming, show


class Fitting:
    """Pairs of leaves, once every one is known to fit: `MismatchError` where one does not.

    `table` has rows for `tensors`, by their numbers, and `late` the other destinations. `values`
    has the plain ones: by leaf here, the leaf offered. `wholes` are the sparse tensors in it, whose
    indices have to hold. `written` are the tensors that are written to, as autograd counts them: of
    distributed ones both the tensor and its local part.
    """

    def __init__(
        self, matched: Matched, rows: LeafRows, into: PreparedDestination, chunks: Chunks
    ) -> None:
        self.late: list[Fit | ArrayFit] = []
        self.values: dict[int, tuple[int, Path]] = {}
        self.wholes: dict[int, tuple[m.SparseLeaf, Path]] = {}
        mine = into.flat.leaves
        plain, rest = split(matched, rows, into, chunks)
        fits: list[Found] = []
        for index, path, here in rest:
            leaf = rows[index]
            fits += [Found(pair, path, here) for pair in fit(leaf, mine[here], path)]
            if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
                isinstance(leaf, m.ArrayLeaf) and leaf.scalar
            ):
                with naming(path):
                    check_buildable(leaf)
                self.values[here] = index, path
        writes = [
            (path, write)
            for path, held in into.objects.items()
            if isinstance(held.object, InPlaceObject)
            for write in held.object.own_writes()
            if write.memory.numel()
        ]
        check_ties(plain, fits, writes, chunks, lambda leaf: LeafPaths(into.flat.tree)[leaf])
        locals_: Sequence[Any] = into.layout.locals
        sharded = into.layout.sharded.locals
        whole = len(plain.leaf) == len(mine)
        leaves = range(len(mine)) if whole else plain.leaf.tolist()
        self.written: list[Any] = [*mine] if whole else [mine[n] for n in leaves]
        self.written += [sharded[n] for n in leaves if n in sharded] if sharded else []
        more: list[torch.Tensor] = []
        homes: list[int] = []  # of these, by leaf here
        late_homes: list[int] = []
        added: list[tuple[int, int, int, int, int, int]] = []
        for pair, path, here in fits:
            if isinstance(pair, ArrayFit):
                self.late.append(pair)
                late_homes.append(here)
                continue
            part, tensor = pair.part, pair.destination
            self.written.append(tensor)
            if t.is_dtensor(mine[here]):
                self.written.append(mine[here])
            if pair.whole is not None:
                self.wholes[id(pair.whole)] = (pair.whole, path)
            nbytes = _run_bytes(pair)
            if not nbytes:
                self.late.append(pair)
                late_homes.append(here)
                continue
            at = chunks.start_of(part.storage) + part.offset
            number, gpu = len(locals_) + len(more), gpu_of(tensor)
            added.append((at, tensor.data_ptr(), nbytes, part.storage, number, gpu))
            more.append(tensor)
            homes.append(here)
        self.tensors: Sequence[Any] = [*locals_, *more] if more else locals_
        self.table = plain.joined(added)
        self._homes, self._late_homes, self._locals = homes, late_homes, len(locals_)

    def check_writable(self, workspace: Workspace, path_of: Callable[[int], Path]) -> None:
        """`MismatchError` for a tensor in memory that can only be read: a write to it would end the
        process."""
        near = self.table.some(self.table.on_host)
        late: list[int] = []
        addresses, sizes = [near.address.astype(np.uint64)], [near.nbytes.astype(np.uint64)]
        for pair, here in zip(self.late, self._late_homes, strict=True):
            if isinstance(pair, Fit) and pair.destination.device.type == "cpu":
                reach = extent(pair.destination.shape, pair.destination.stride())
                addresses.append(np.array([pair.destination.data_ptr()], np.uint64))
                sizes.append(np.array([reach * pair.destination.element_size()], np.uint64))
                late.append(here)
        found = workspace.first_read_only(np.concatenate(addresses), np.concatenate(sizes))
        if found >= len(near.leaf):
            here = late[found - len(near.leaf)]
        elif found >= 0:
            number = int(near.leaf[found])
            here = number if number < self._locals else self._homes[number - self._locals]
        if found >= 0:
            raise MismatchError(
                "the destination cannot be written: its memory is mapped for reading alone; give a "
                "clone of it",
                path=show(path_of(here)),
            )

    @property
    def late_images(self) -> list[int]:
        return [
            pair.leaf.storage if isinstance(pair, ArrayFit) else pair.part.storage
            for pair in self.late
        ]


def split(
    matched: Matched, rows: LeafRows, into: PreparedDestination, chunks: Chunks
) -> tuple[Straight, list[Pair]]:
    """The bytes that go straight to plain tensors, in columns, and the pairs that are left to be
    fitted one by one."""
    plain = into.layout.plain
    here, there, numbers = _paired(matched, rows, into)
    fits = _fitting(rows, there, into, here)
    if not fits.all():
        here, there, numbers = here[fits], there[fits], numbers[fits]
    rest: Marks = np.ones(len(rows) if matched.tree is not None else len(matched.pairs), bool)
    rest[numbers] = False
    left = np.flatnonzero(rest).tolist()
    if matched.tree is not None:
        pairs = matched.some(set(left)) if left else []
    else:
        pairs = [matched.pairs[n] for n in left]
        # A tied tensor is there more than once.
        _, once = np.unique(here * len(rows.leaves) + there, return_index=True)
        here, there = here[once], there[once]
    images = rows.images[there]
    at = chunks.places[images] + rows.offsets[there].astype(np.uint64)
    columns = (plain.addresses[here], plain.nbytes[here], images, plain.leaves[here])
    return Straight(at, *columns, plain.gpus[here]).in_order(), pairs


def _paired(
    matched: Matched, rows: LeafRows, into: PreparedDestination
) -> tuple[Indices, Indices, Indices]:
    """Which of the plain tensors, which row it is offered, and the number of the pair: that of the
    leaf where both sides have one tree."""
    plain = into.layout.plain
    offered = mine = np.arange(len(rows))
    if matched.tree is not None and len(plain) == len(rows.leaves) == len(rows):
        return mine, mine, mine
    if matched.tree is None:
        offered = np.array([pair[0] for pair in matched.pairs], np.int64)
        mine = np.array([pair[2] for pair in matched.pairs], np.int64)
    there, here = _places(rows.leaves, len(rows), offered), _places(plain.leaves, plain.count, mine)
    numbers = np.flatnonzero((there >= 0) & (here >= 0))
    return here[numbers], there[numbers], numbers


def _places(leaves: Numbers, count: int, wanted: Numbers) -> Indices:
    """Where in a column of some of `count` leaves each of these is, or -1."""
    found: Indices = np.full(count, -1, np.intp)
    found[leaves] = np.arange(len(leaves))
    return found[wanted]


def _fitting(rows: LeafRows, there: Indices, into: PreparedDestination, here: Indices) -> Marks:
    """Whether what each plain tensor is offered can be copied to it as it is. The first tensor of
    each combination of kinds tells for all of them."""
    record, plain = rows.record, into.layout.plain
    count, images = len(record.kinds), len(record.image_kinds)
    combined = into.layout.kinds[here] * count + rows.kinds[there]
    combined = combined * images + record.image_kind[rows.images[there]]
    firsts, numbers = np.zeros(min(len(combined), 1), np.intp), np.zeros(len(combined), np.intp)
    if len(combined) and (combined != combined[0]).any():  # mostly not: that takes a sort to tell
        _, firsts, numbers = np.unique(combined, return_index=True, return_inverse=True)
    fine: Marks = np.zeros(len(firsts), bool)
    for number, first in enumerate(firsts.tolist()):
        leaf, mine = rows.row(int(there[first])), into.flat.leaves[int(plain.leaves[here[first]])]
        try:
            pairs = [*fit(leaf, mine, ())]
        except MismatchError:
            continue  # raised again, with its path
        sizes = [_run_bytes(pair) for pair in pairs if isinstance(pair, Fit)]
        fine[number] = sizes == [plain.nbytes[here[first]]]
    return fine[numbers]


def _run_bytes(pair: Fit) -> int:
    """The bytes of a destination that is one run of memory in the order of its image; else 0."""
    part, mine, whole = pair
    if whole is not None or any(t.lazy_bits(mine)):
        return 0
    if not (mine.is_cpu or mine.is_cuda):
        return 0
    strides, here = strides_of(part), mine.stride()
    if strides == here and mine.is_contiguous():
        return mine.nbytes
    layout = packed(part.shape, strides)
    if layout is None or layout.strides != strides:
        return 0
    if any(size > 1 and strides[d] != here[d] for d, size in enumerate(part.shape)):
        return 0
    return layout.numel * mine.element_size()
