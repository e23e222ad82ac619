"""The caller's own tensors: staged and written at once (`atomic`), or written as bytes arrive.

Each byte of the stream has one place. Destinations that are one run of memory, in the order of the
bytes, are rows of a table. Rows whose image is held are copied from there by the commit; bytes of
the others go straight to the caller's memory. All other destinations are late: the commit copies
their elements from images that are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Moves, Runs
from torchrelay.geometry.strides import packed
from torchrelay.landing.checks.fit import ArrayFit, Fit, Found, fit
from torchrelay.landing.checks.ties import check_ties, host_spans
from torchrelay.landing.commit.ending import StateLanding
from torchrelay.landing.commit.handover import Handover
from torchrelay.landing.destination import Pair, Straight, split
from torchrelay.landing.held import HeldImages
from torchrelay.landing.leaves import (
    check_records,
    copy_late,
    make_leaf,
    strides_of,
    without_bytes,
)
from torchrelay.landing.missing import MadeLeaves
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import Pairing
from torchrelay.landing.places import Landed, chunks_of
from torchrelay.landing.workspace import Workspace
from torchrelay.plan.region import Stream
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.pause import gc_paused
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.leaves import build, check_buildable
from torchrelay.state.paths import LeafPaths, Path, naming
from torchrelay.state.tree import grafted, inside_records, unflatten


class ExistingTensors(StateLanding):
    """The tensors of a destination that was paired with the record's tree.

    Images of the leaves in `late` are not written to the destination as they arrive: they are held,
    and so are those in `compared`, whether they go anywhere or not.
    """

    def __init__(
        self,
        record: Record,
        pairing: Pairing,
        options: LandingOptions,
        workspace: Workspace,
        late: Set[int] = frozenset(),
        compared: Set[int] = frozenset(),
    ) -> None:
        self.record = record
        self._rows = rows = LeafRows(record)
        self._pairing = pairing
        self._into = into = pairing.into
        self._options = options
        self._workspace = workspace
        self._copy = partial(workspace.copy, alone=False)
        matched = pairing.matched
        self.chunks = chunks_of(record)
        self._new = MadeLeaves(rows, options)
        for one in pairing.given:
            self._new.add_given(one)
        self._mine: dict[int, object] | None = None
        if options.make_missing:
            self._mine = {index: into.flat.leaves[here] for index, _, here in matched.pairs[::-1]}
            paths = LeafPaths(rows.tree)
            for index in paths:
                if index not in self._mine and index not in self._new.paths:
                    self._new.add(index, paths[index])
        # Registered types are made before anything is written: of bytes that are held back.
        one_tree = matched.tree is not None
        inside = into.inside_records if one_tree else inside_records(rows.tree)
        self._inside = matched.some(inside) if inside else []
        if inside:
            wanted = {index for index, _, _ in self._inside} | self._new.paths.keys()
            check_records(rows.tree, rows, wanted)
        self._values: dict[int, tuple[int, Path]] = {}  # by leaf here, the one offered
        plain, rest = split(matched, rows, into.layout, self.chunks)
        fits = self._fits(rest)
        if fits and plain.meets(host_spans(fits, self.chunks)):
            # Plain tensors share memory with others: the check below has to see them all.
            plain = Straight.none()
            fits = self._fits(matched.pairs)
        check_ties(fits, self.chunks)
        self._table = self._placed(plain, fits)
        self.held = HeldImages(self.chunks)
        self._take_memory(compared, () if options.staged else late)
        straight = self._table.some(~self.held.marks[self._table.image])
        far = straight.some(~straight.on_host)
        near = straight.some(straight.on_host)
        self._straight = straight
        self.live = bool(len(straight.image))
        self.places = Stream(
            Runs.merged(self.held.runs(far=False), near.runs),
            [],
            self.chunks.stream_bytes,
            Runs.merged(self.held.runs(far=True), far.runs),
            # Nothing here refers to the landing: one that is given up goes at once.
            partial(_far_memory, self.held, far, self._tensors),
        )

    def _fits(self, pairs: list[Pair]) -> list[Found]:
        fits: list[Found] = []
        for index, path, here in pairs:
            leaf = self._rows[index]
            mine = self._into.flat.leaves[here]
            fits += [Found(pair, path, here) for pair in fit(leaf, mine, path)]
            if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
                isinstance(leaf, m.ArrayLeaf) and leaf.scalar
            ):
                with naming(path):
                    check_buildable(leaf)
                self._values[here] = index, path
        return fits

    def _placed(self, plain: Straight, fits: list[Found]) -> Straight:
        """The table of rows, whose leaves are numbers in `_tensors`; notes what is `_late`, and the
        tensors that are `_written` to, as autograd counts them: of distributed ones both the tensor
        and its local part."""
        mine: list[Any] = self._into.flat.leaves
        locals_: Sequence[Any] = self._into.layout.locals
        sharded = self._into.layout.sharded.locals
        whole = len(plain.leaf) == len(mine)
        leaves = range(len(mine)) if whole else plain.leaf.tolist()
        self._written = [*mine] if whole else [mine[n] for n in leaves]
        self._written += [sharded[n] for n in leaves if n in sharded] if sharded else []
        self._late: list[Fit | ArrayFit] = []
        self._wholes: dict[int, tuple[m.SparseLeaf, Path]] = {}
        rows: list[tuple[int, int, int, int, int, int]] = []
        more: list[torch.Tensor] = []
        for pair, path, here in fits:
            if isinstance(pair, ArrayFit):
                self._late.append(pair)
                continue
            self._written.append(pair.destination)
            if t.is_dtensor(mine[here]):
                self._written.append(mine[here])
            if pair.whole is not None:
                self._wholes[id(pair.whole)] = (pair.whole, path)
            nbytes = _run_bytes(pair)
            if not nbytes:
                self._late.append(pair)
                continue
            part, tensor = pair.part, pair.destination
            at = self.chunks.start_of(part.storage) + part.offset
            number = len(locals_) + len(more)
            rows.append((at, tensor.data_ptr(), nbytes, part.storage, number, gpu_of(tensor)))
            more.append(tensor)
        self._tensors = [*locals_, *more] if more else locals_
        return plain.joined(rows)

    def _remade(self) -> list[Pair]:
        """The pairs that registered types are made of, but for distributed tensors: those are in
        them as they are."""
        leaves = self._into.flat.leaves
        return [pair for pair in self._inside if not t.is_distributed(leaves[pair[2]])]

    # Memory for the images that are held until `commit`.

    def _take_memory(self, compared: Set[int], late: Iterable[int]) -> None:
        table, held, workspace = self._table, self.held, self._workspace
        filled, near = (np.zeros(self.record.images, bool) for _ in range(2))
        filled[table.image] = True
        near[list(compared)] = True
        values = [index for index, _ in self._values.values()]
        self._mark_images(near, [*values, *(index for index, _, _ in self._remade()), *late])
        for pair in self._late:
            near[pair.leaf.storage if isinstance(pair, ArrayFit) else pair.part.storage] = True
        made = np.array(sorted(self._new.images), np.int64)
        near[made[filled[made]]] = True
        alone = made[~near[made]].tolist()
        self._kept = set(alone)  # images in memory that becomes the caller's
        self._new.take_memory(alone, held, self.chunks, workspace)
        back = filled
        if not self._options.staged:
            back = np.zeros(self.record.images, bool)
            back[table.several] = True
        for device, images in self._by_device(near):
            with suppress(MismatchError):  # the host may have so much
                held.take(images[back[images]], workspace, device)
        near |= back & ~held.marks
        held.take(np.flatnonzero(near), workspace)

    def _mark_images(self, marks: Marks, leaves: Sequence[int]) -> None:
        """Mark the images of some of the leaves offered."""
        rows = self._rows
        marks[rows.images[np.isin(rows.leaves, leaves)]] = True
        for index in leaves:
            for part in parts(rows.others[index]) if index in rows.others else ():
                if part.storage >= 0:
                    marks[part.storage] = True

    def _by_device(self, near: Marks) -> Iterator[tuple[torch.device, Numbers]]:
        """Images all of whose bytes go to one device, and to the host in no other way: they are
        staged there."""
        table = self._table
        for number in np.unique(table.gpu[~table.on_host]).tolist():
            marks = np.zeros(self.record.images, bool)
            marks[table.image[table.gpu == number]] = True
            marks[table.image[table.gpu != number]] = False
            yield device_of(number), np.flatnonzero(marks & ~near)

    def own(self) -> HeldImages:
        rows, found = self._straight, HeldImages(self.chunks)
        found.memory = [self._tensors[number] for number in rows.leaf.tolist()]
        found.far = (~rows.on_host).tolist()
        found.numbers[rows.image] = np.arange(len(rows.image))
        return found

    # The end

    @gc_paused()
    def make(self) -> None:
        leaves, held, rank = self._rows, self._held_part, self._options.rank
        self._new_values = values = {
            here: make_leaf(leaves[index], path, held, rank)
            for here, (index, path) in self._values.items()
        }
        self._made = self._new.make(self._owned_part)
        for whole, path in self._wholes.values():
            make_leaf(whole, path, held, rank)  # indices that point nowhere end here
        self._copies = [
            (
                pair.destination,
                build(pair.leaf, held, 0) if isinstance(pair, ArrayFit) else held(pair.part),
            )
            for pair in self._late
        ]
        into = self._into
        inside = {index: into.flat.leaves[here] for index, _, here in self._inside}
        for index, path, _ in self._remade():
            inside[index] = make_leaf(leaves[index], path, held, rank)
        self._handover = Handover(
            into, leaves.tree, self._pairing.branches, self._inside, before=self._options.atomic
        )
        self._handover.make(values, {**self._pairing.filled, **self._made}, inside)
        if inside and self._mine is not None:
            self._around(inside)
        if self.torn:  # bytes have come to these tensors
            for note in self._notes():
                note()

    def _held_part(self, part: m.TensorLeaf) -> torch.Tensor:
        return without_bytes(part) if part.storage < 0 else self.held.part(part)

    def _owned_part(self, part: m.TensorLeaf) -> torch.Tensor:
        """A tensor over an image in memory of its own, which the caller may keep."""
        image = part.storage
        if image >= 0 and image not in self._kept:
            self.held.add(self.held.bytes(image).clone(), image, far=False)
            self._kept.add(image)
        return self._held_part(part)

    def give(self) -> None:
        self._handover.give(written=self.torn)

    def take_back(self) -> list[Path]:
        return self._handover.take_back()

    @gc_paused()
    def finish(self) -> Landed:
        """Write what was held back, and put the rest in its place."""
        self.torn = self.torn or bool(self._written or self._copies)
        rows = self._held_rows
        self._workspace.copy(self._moves(rows.some(rows.on_host)), also=self._notes())
        self._write_far(rows.some(~rows.on_host))
        for destination, source in self._copies:
            copy_late(destination, source)
        state = self._handover.finish()
        if self._mine is not None:
            state = self._around()
        self.torn = False
        return Landed(state, self._pairing.missing, self._pairing.extra)

    def _notes(self) -> list[Callable[[], None]]:
        """Calls that bump autograd's version counters, one for each block."""
        written, self._written = self._written, []
        return [partial(t.note_written, some) for some in t.blocks(written)]

    def _around(self, inside: Mapping[int, object] | None = None) -> object:
        """With `make_missing`: a new tree of the offered containers, around the caller's tensors
        and objects and the leaves that were made."""
        objects = {path: one for path, one in self._into.objects.items() if not one.in_module}
        stubs = {path: -1 - number for number, path in enumerate(objects)}
        known = {**self._made, **(self._mine or {}), **(inside or {})}
        known.update((index, self._new_values[here]) for here, (index, _) in self._values.items())
        known.update((stub, objects[path].object) for path, stub in stubs.items())
        return unflatten(grafted(self._rows.tree, stubs), known)

    @property
    def _held_rows(self) -> Straight:
        return self._table.some(self.held.marks[self._table.image])

    def _moves(self, rows: Straight) -> Moves:
        """From images that are held to rows."""
        sources = self.held.addresses(rows.image) + (rows.at - self.chunks.places[rows.image])
        return Moves(rows.at, sources, rows.address, rows.nbytes).joined()

    def _write_far(self, rows: Straight) -> None:
        """Copy images to tensors of devices: by address those that are held there."""
        held = self.held
        for number in np.unique(held.numbers[rows.image]).tolist():
            some = rows.some(held.numbers[rows.image] == number)
            device = held.memory[number].device
            if held.far[number] and self._workspace.copy_by_address(self._moves(some), device):
                continue
            skips = (some.at - self.chunks.places[some.image]).tolist()
            columns = some.image.tolist(), some.leaf.tolist(), skips, some.nbytes.tolist()
            for image, leaf, skip, nbytes in zip(*columns, strict=True):
                to = _run(self._tensors[leaf], nbytes)
                to.copy_(held.bytes(image)[skip : skip + nbytes])


def gpu_of(tensor: torch.Tensor) -> int:
    return tensor.get_device()


def device_of(number: int) -> torch.device:
    return torch.device("cuda", number)


def _run_bytes(pair: Fit) -> int:
    """The bytes of a destination that is one run of memory in the order of its image; else 0."""
    part, mine, whole = pair
    strides, here = strides_of(part), mine.stride()
    layout = packed(part.shape, strides)
    if whole is not None or layout is None or layout.strides != strides:
        return 0
    if (t.flags_of(mine) ^ part.flags) & (m.CONJ | m.NEG) or not (mine.is_cpu or mine.is_cuda):
        return 0
    if any(size > 1 and strides[d] != here[d] for d, size in enumerate(part.shape)):
        return 0
    return layout.numel * mine.element_size()


def _run(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The memory of a tensor that is one run of bytes."""
    return t.flat_bytes(tensor.untyped_storage(), t.byte_offset(tensor), nbytes)


def _far_memory(
    held: HeldImages, rows: Straight, tensors: Sequence[Any]
) -> list[tuple[int, torch.Tensor]]:
    """Memory of devices that takes bytes as they come, with positions in the stream."""
    columns = rows.at.tolist(), rows.leaf.tolist(), rows.nbytes.tolist()
    own = [(at, _run(tensors[n], nbytes)) for at, n, nbytes in zip(*columns, strict=True)]
    return [*held.far_bytes(), *own]
