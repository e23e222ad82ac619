"""Which memory of a destination takes which of the bytes that are offered.

Destinations that are one run of memory, in the order of the bytes, are pieces. To all others
elements are copied at the end, from images that are staged until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchrelay.describing.pieces import Pieces, device_number
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.strides import extent, packed
from torchrelay.landing.checks.fit import ArrayFit, Fit, Found, fit
from torchrelay.landing.checks.ties import check_ties
from torchrelay.landing.leaves import strides_of
from torchrelay.landing.workspace import Workspace
from torchrelay.planning.destination import Destination
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.state import tensors as t
from torchrelay.state.leaves import check_buildable
from torchrelay.state.matching import Matched, Pair
from torchrelay.state.objects import InPlaceObject
from torchrelay.state.paths import LeafPaths, Path, naming, show

Indices = np.ndarray[Any, np.dtype[np.intp]]


class Fitting:
    """Pairs of leaves, once every one is known to fit: `MismatchError` where one does not.

    - `pieces`: the memory of the destination that takes bytes as they are.
    - `copies`: other destinations, to which elements are copied at the end.
    - `values`: by leaf here, the leaf offered for a plain value, and its path.
    - `sparse`: sparse tensors whose indices have to hold.
    - `written`: the tensors that are written to, as autograd counts them: of distributed ones both
      the tensor and its local part.
    """

    def __init__(self, matched: Matched, rows: LeafRows, into: Destination, chunks: Chunks) -> None:
        self.copies: list[Found] = []
        self.values: dict[int, tuple[int, Path]] = {}
        self.sparse: dict[int, tuple[m.SparseLeaf, Path]] = {}
        self._into = into
        plain, rest = split(matched, rows, into, chunks)
        fits: list[Found] = []
        for index, path, here in rest:
            leaf = rows[index]
            fits += [Found(pair, path, here) for pair in fit(leaf, into.flat.leaves[here], path)]
            if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
                isinstance(leaf, m.ArrayLeaf) and leaf.scalar
            ):
                with naming(path):
                    check_buildable(leaf)
                self.values[here] = index, path
        writes = [
            (path, write)
            for path, stateful in into.objects.items()
            if isinstance(stateful.object, InPlaceObject)
            for write in stateful.object.own_writes()
            if write.memory.numel()
        ]
        check_ties(plain, fits, writes, chunks, self._path_of)
        self.written = _written(plain, into)
        self._leaf_of = list(range(len(into.layout.locals)))  # of each tensor in memory of `pieces`
        more = self._add_fits(fits, into.flat.leaves, chunks)
        self.pieces: Pieces = plain.joined(more).once() if len(more) else plain

    def _path_of(self, leaf: int) -> Path:
        return LeafPaths(self._into.flat.tree)[leaf]

    def _add_fits(self, fits: Sequence[Found], leaves: Sequence[Any], chunks: Chunks) -> Pieces:
        """Note everything that is fitted one by one. Returns the pieces among them."""
        memory: list[torch.Tensor] = []
        added: list[tuple[int, int, int, int, int, int]] = []
        for found in fits:
            pair, here = found.pair, found.here
            if isinstance(pair, ArrayFit):
                self.copies.append(found)
                continue
            part, tensor = pair.part, pair.destination
            self.written.append(tensor)
            if t.is_dtensor(leaves[here]):
                self.written.append(leaves[here])
            if pair.whole is not None:
                self.sparse[id(pair.whole)] = (pair.whole, found.path)
            nbytes = _run_bytes(pair)
            if not nbytes:
                self.copies.append(found)
                continue
            at, device = chunks.start_of(part.storage) + part.offset, device_number(tensor.device)
            added.append((at, tensor.data_ptr(), nbytes, device, part.storage, len(memory)))
            memory.append(tensor)
            self._leaf_of.append(here)
        return Pieces.of(added, memory)

    def check_writable(self, workspace: Workspace) -> None:
        """`MismatchError` for a tensor in memory that can only be read: a write to it would end the
        process."""
        pieces = self.pieces.some(self.pieces.on_host)
        copied: list[int] = []  # leaves here
        addresses, sizes = [pieces.address.astype(np.uint64)], [pieces.nbytes.astype(np.uint64)]
        for found in self.copies:
            pair = found.pair
            if isinstance(pair, Fit) and pair.destination.device.type == "cpu":
                reach = extent(pair.destination.shape, pair.destination.stride())
                addresses.append(np.array([pair.destination.data_ptr()], np.uint64))
                sizes.append(np.array([reach * pair.destination.element_size()], np.uint64))
                copied.append(found.here)
        first = workspace.first_read_only(np.concatenate(addresses), np.concatenate(sizes))
        if first >= 0:
            count = len(pieces)
            is_piece = first < count
            leaf = self._leaf_of[int(pieces.keep[first])] if is_piece else copied[first - count]
            raise MismatchError(
                "the destination cannot be written: its memory is mapped for reading alone; give a "
                "clone of it",
                path=show(self._path_of(leaf)),
            )

    def path_of(self, keep: int) -> str | None:
        """The path of a tensor in memory of `pieces`, if the destination has it at one."""
        leaf, paths = self._leaf_of[keep], LeafPaths(self._into.flat.tree)
        return show(paths[leaf]) if leaf in paths else None

    @property
    def copied_images(self) -> list[int]:
        """The images that `copies` are made from."""
        pairs = [found.pair for found in self.copies]
        return [
            pair.leaf.storage if isinstance(pair, ArrayFit) else pair.part.storage for pair in pairs
        ]


def _written(plain: Pieces, into: Destination) -> list[Any]:
    """The tensors that plain pieces are of."""
    leaves, sharded = into.flat.leaves, into.layout.sharded.locals
    if len(plain) == len(leaves):
        keep: Sequence[int] = range(len(leaves))
        found = [*leaves]
    else:
        keep = plain.keep.tolist()
        found = [leaves[n] for n in keep]
    return [*found, *(sharded[n] for n in keep if n in sharded)] if sharded else found


def split(
    matched: Matched, rows: LeafRows, into: Destination, chunks: Chunks
) -> tuple[Pieces, list[Pair]]:
    """The plain tensors that take bytes as they are, as pieces whose memory are the local tensors
    of the destination; and the pairs that are left to be fitted one by one.

    Offered: leaf 0 (float32, 4), leaf 1 (a plain value), leaf 2 (float32, 2 x 2, transposed). The
    destination has a plain tensor for each of them. Leaf 0 fits as it is; leaf 2 has other strides
    in its image, so it is left over, with leaf 1:

        pieces  at=0, address of tensor 0, nbytes=16, image=0, keep=0
        left    the pairs of leaves 1 and 2
    """
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
    pieces = Pieces(
        at=chunks.places[images] + rows.offsets[there].astype(np.uint64),
        address=plain.addresses[here],
        nbytes=plain.nbytes[here],
        device=plain.gpus[here],
        image=images,
        keep=plain.leaves[here],
        memory=into.layout.locals,
    )
    return pieces.in_order(), pairs


def _paired(
    matched: Matched, rows: LeafRows, into: Destination
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


def _fitting(rows: LeafRows, there: Indices, into: Destination, here: Indices) -> Marks:
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
