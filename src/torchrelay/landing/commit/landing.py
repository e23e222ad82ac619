"""The landing of a whole state, whoever brings its bytes: one rank, several of them, or a store.

In the end objects take their new state, the caller's tensors are written, and the rest is handed
over. Up to the first write there is a way back; after it the state is new, or said to be torn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.describing.pieces import HOST, Pieces
from torchrelay.errors import MismatchError, RelayError, TornStateError
from torchrelay.geometry.chunks import Chunks
from torchrelay.geometry.runs import Moves
from torchrelay.landing.checks.fit import ArrayFit
from torchrelay.landing.commit.object_states import ObjectStates
from torchrelay.landing.fitting import Fitting
from torchrelay.landing.image_memory import ImageMemory
from torchrelay.landing.leaves import (
    check_records,
    copy_elements,
    images_of,
    make_leaf,
    without_bytes,
)
from torchrelay.landing.new_leaves import NewLeaves, StoredImages
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import Pairing
from torchrelay.landing.read_target import ReadTarget, Writes, chunks_of
from torchrelay.landing.staging import Staging, purposes
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.planning.catalog import EqualImages, RankShare
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.state import tensors as t
from torchrelay.state.backing import missing_memory
from torchrelay.state.leaves import build
from torchrelay.state.matching import Pair
from torchrelay.state.paths import Path
from torchrelay.state.tree import grafted, inside_records, show, unflatten

_IN_PLACE = (torch.Tensor, np.ndarray)
TORN = "the destination is part old, part new; load again, or receive into it again"

Act = Callable[[], None]
Together = Callable[[str, Act], None]  # has an act done on every rank, by the name of its phase
Watch = Callable[[str], AbstractContextManager[Any]]


def alone(phase: str, act: Act) -> None:
    """For one rank."""
    act()


def at_once(act: Act) -> None:
    """For a caller that lets nothing interrupt all of the end, or does not mind."""
    act()


class Landed(NamedTuple):
    """The received state, and the paths that one side alone has (with `strict=False`)."""

    state: object
    missing: list[str]
    extra: list[str]


class Landing:
    """A share of what is offered, on its way into a destination: what the destination was paired
    with is written to it, and the rest of what it gets is made. It ends by `make`, then `end`;
    `commit` does both.

    Bytes come to the pieces of a `target`, or to `memory` and `own()`: a source that has boxes of
    tensors and no stream asks for images by number. It fills `memory` before `make`, and the
    caller's own tensors in the `bring` of `end`, and calls `note_write` when it begins.
    """

    _finishing = False

    def __init__(
        self,
        share: RankShare,
        pairing: Pairing,
        options: LandingOptions,
        workspace: Workspace,
        stored: StoredImages | None = None,
    ) -> None:
        self.record, self.share = share.record, share
        self._pairing, self._into = pairing, pairing.into
        self._rows = rows = LeafRows(share.record)
        self._options, self._workspace = options, workspace
        matched = share.pairs
        self.chunks = chunks_of(share.record)
        self._new = NewLeaves(rows, options)
        for one in pairing.for_objects:
            self._new.add_for_object(one)
        if options.make_missing:
            self._new.add_all_but({pair[0] for pair in matched.pairs})
        # Registered types are made before anything is written: of bytes that are staged.
        one_tree = matched.tree is not None
        inside = self._into.inside_records if one_tree else inside_records(rows.tree)
        self._inside = matched.some(inside) if inside else []
        if inside:
            made = np.flatnonzero(self._new.marks).tolist()
            check_records(rows.tree, rows, {pair[0] for pair in self._inside}.union(made))
        self._fitting = Fitting(matched, rows, self._into, self.chunks)
        self._fitting.check_writable(workspace)
        pieces, staged = self._fitting.pieces, options.staged
        found = purposes(pieces, self._new.images, self._needed_on_host(), staged=staged)
        self._staging = Staging(pieces, found, self.chunks)
        self._staging.allocate(self._new, workspace, stored)
        self.memory = self._staging.memory
        self._writes = Writes(live=bool(len(self._staging.direct)))

    def _needed_on_host(self) -> Marks:
        """Marks the images that plain values are made of, and copies and comparisons."""
        needed: Marks = np.zeros(self.record.images, bool)
        needed[[n for one in self.share.equal for n in (one.first, one.second)]] = True
        needed[self._fitting.copied_images] = True
        leaves = np.zeros(len(self._rows), bool)
        leaves[[index for index, _ in self._fitting.values.values()]] = True
        leaves[[index for index, _, _ in self._remade()]] = True
        leaves[[] if self._options.staged else [*self.share.deferred]] = True
        return needed | images_of(self._rows, leaves)

    def _remade(self) -> list[Pair]:
        """The pairs that registered types are made of, but for distributed tensors: those are in
        them as they are."""
        leaves = self._into.flat.leaves
        return [pair for pair in self._inside if not t.is_distributed(leaves[pair[2]])]

    def target(self, chunks: Chunks | None = None, pieces: Pieces | None = None) -> ReadTarget:
        """Where the bytes of a holder go: those of the record's own stream, unless the stream of
        its reads has other `chunks`, which go to these `pieces`."""
        copy = partial(self._workspace.copy, alone=False)
        if chunks is None or pieces is None:
            chunks, pieces = self.chunks, self._staging.target_pieces()
        return ReadTarget(chunks, pieces, self._writes, copy)

    def own(self) -> ImageMemory:
        """The caller's tensors and local parts that take images as they are; none where all images
        are staged."""
        return self._staging.in_place()

    def note_write(self) -> None:
        """Bytes have been written to the caller's tensors."""
        self._writes.torn = True

    def check_equal(self, message: Callable[[EqualImages], str]) -> None:
        """`MismatchError` where images differ that go to the same memory."""
        for one in self.share.equal:
            first, second = (self.memory.bytes(n).cpu() for n in (one.first, one.second))
            if not torch.equal(first, second):
                raise MismatchError(message(one), path=one.path)

    # The end.

    @property
    def live(self) -> bool:
        """Whether bytes go to the caller's own tensors as they come."""
        return self._writes.live

    @property
    def torn(self) -> bool:
        """Whether the caller's tensors have been written to, but not all of them."""
        return self._writes.torn

    @property
    def touched(self) -> bool:
        """Whether anything of the caller's has been written to, but for objects."""
        return not self._pairing.all_new and (self._finishing or self.torn)

    def commit(self) -> Landed:
        """All chunks have arrived and hold: make them the state."""
        self.make()
        return self.end()

    @gc_paused()
    def make(self) -> None:
        """Work everything out that can fail. Nothing of the caller's has changed by then."""
        rows, fitting = self._rows, self._fitting
        staged, rank = self._staged_part, self._options.rank
        self._values = {
            here: make_leaf(rows[index], path, staged, rank)
            for here, (index, path) in fitting.values.items()
        }
        self._made = self._new.make(self._owned_part)
        for whole, path in fitting.sparse.values():
            make_leaf(whole, path, staged, rank)  # indices that point nowhere end here
        self._copies = [
            (
                pair.destination,
                build(pair.leaf, staged, 0) if isinstance(pair, ArrayFit) else staged(pair.part),
            )
            for pair, _, _ in fitting.copies
        ]
        leaves = self._into.own
        inside = {index: leaves[here] for index, _, here in self._inside}
        for index, path, _ in self._remade():
            inside[index] = make_leaf(rows[index], path, staged, rank)
        for_objects = [*self._made]
        for index, _, here in self._pairing.in_objects:
            if not self._new.marks[index]:
                for_objects[index] = leaves[here]
        self._objects = ObjectStates(
            self._pairing,
            rows.tree,
            values=self._values,
            leaves=for_objects,
            inside=self._inside,
            trial=inside,
            before=self._options.atomic,
        )
        if self._options.make_missing:
            self._state = self._around(inside)
        if self.torn:  # bytes have come to these tensors
            for note in self._notes():
                note()

    def end(
        self,
        bring: Act = lambda: None,
        together: Together = alone,
        watch: Watch = nullcontext,
        unbroken: Callable[[Act], None] = at_once,
    ) -> Landed:
        """After `make`: the state. `bring` fills the caller's own tensors, where they take bytes as
        they are. `together` raises on all ranks what one of them raises. Objects get their state,
        or their old one back, within `unbroken`, which lets no interrupt come up in between. Where
        it fails before a tensor was written, all objects have their old state again; after that, an
        error that is not the library's own becomes a `TornStateError`.
        """
        landed: list[Landed] = []
        lost: list[Path] = []

        def give() -> None:
            self._objects.give(written=self.torn)

        def take_back() -> None:
            lost.extend(self._objects.take_back())

        def write() -> None:
            try:
                self._check_in_place()
                with watch("land"):
                    bring()
                with watch("commit"):
                    self._finishing = True
                    landed.append(self._finish())
            except RelayError:
                raise
            except Exception as fault:  # of a planner of the user's, or of a device
                if not self.touched:
                    raise
                raise TornStateError(f"{TORN}: {fault!r}", phase="land") from fault

        try:
            together("give", lambda: unbroken(give))
            together("land", write)
        except BaseException as fault:
            if not self.touched:
                unbroken(take_back)
            if lost:
                raise TornStateError(
                    f"not every object took its old state back: {', '.join(map(show, lost))} may "
                    "be part new, the rest is old; land a state in it again, or make a new one",
                    phase="give",
                ) from fault
            raise
        return landed[0]

    def _check_in_place(self) -> None:
        """Raise `MismatchError` if an object that was given its state has replaced memory that is
        written to by address: it may have been freed."""
        if not self._pairing.branches:
            return
        pieces = self._fitting.pieces
        for keep, address in zip(pieces.keep.tolist(), pieces.address.tolist(), strict=True):
            tensor = pieces.memory[keep]
            if tensor.data_ptr() != address or missing_memory(tensor) is not None:
                raise MismatchError(
                    "load_state_dict of an object gave this tensor other memory: leave one of the "
                    "two out of the state",
                    path=self._fitting.path_of(keep),
                )

    def _staged_part(self, part: m.TensorLeaf) -> torch.Tensor:
        return without_bytes(part) if part.storage < 0 else self.memory.part(part)

    def _owned_part(self, part: m.TensorLeaf) -> torch.Tensor:
        """A tensor in memory that the caller may keep."""
        if part.storage < 0:
            return without_bytes(part, self._new.place_of_empty(part.flags))
        self._staging.keep(part.storage)
        return self.memory.part(part)

    @gc_paused()
    def _finish(self) -> Landed:
        """Write what was held back, and put the rest in its place."""
        pieces = self._fitting.pieces
        self._writes.torn = self.torn or bool(self._fitting.written or self._copies)
        staged = pieces.some(self.memory.marks[pieces.image])
        self._workspace.copy(self._moves(staged.some(staged.on_host)), also=self._notes())
        self._write_to_devices(staged.some(~staged.on_host))
        for destination, source in self._copies:
            copy_elements(destination, source)
        state = self._objects.finish()
        if self._options.make_missing:
            state = self._around({}) if self._inside else self._state
        self._writes.torn = False
        return Landed(state, self._pairing.missing, self._pairing.extra)

    def _notes(self) -> list[Callable[[], None]]:
        """Calls that bump autograd's version counters, one for each block."""
        written, self._fitting.written = self._fitting.written, []
        return [partial(t.note_written, some) for some in t.blocks(written)]

    def _around(self, inside: Mapping[int, object]) -> object:
        """With `make_missing`: a new tree of the offered containers, around the caller's tensors
        and objects and the leaves that were made."""
        known, leaves = [*self._made], self._into.own
        pairs = self.share.pairs.pairs
        for index, _, here in reversed(pairs):
            known[index] = leaves[here]
        # Tensors that are tied there may be separate here.
        untied: dict[Path, Any] = {
            path: leaves[here]
            for index, path, here in pairs
            if leaves[here] is not known[index] and isinstance(leaves[here], _IN_PLACE)
        }
        for here, (index, _) in self._fitting.values.items():
            known[index] = self._values[here]
        for index, leaf in inside.items():
            known[index] = leaf
        objects = {path: one for path, one in self._into.objects.items() if not one.in_module}
        placed = untied | {path: one.object for path, one in objects.items()}
        stubs = {path: len(known) + number for number, path in enumerate(placed)}
        known += placed.values()
        return unflatten(grafted(self._rows.tree, stubs), known)

    def _moves(self, pieces: Pieces) -> Moves:
        """From images that are staged to pieces of the caller's tensors."""
        skip = pieces.at - self.chunks.places[pieces.image]
        sources = self.memory.address[pieces.image] + skip
        return Moves(pieces.at, sources, pieces.address, pieces.nbytes).joined()

    def _write_to_devices(self, pieces: Pieces) -> None:
        """Copy images to tensors of devices: by address those that are staged there."""
        memory = self.memory
        keep = memory.keep[pieces.image]
        for number in np.unique(keep).tolist():
            some = pieces.some(keep == number)
            on_device = memory.device[some.image[0]] != HOST
            device = memory.memory[number].device
            if on_device and self._workspace.copy_by_address(self._moves(some), device):
                continue
            skips = (some.at - self.chunks.places[some.image]).tolist()
            for row, (image, skip) in enumerate(zip(some.image.tolist(), skips, strict=True)):
                to = some.bytes_of(row)
                to.copy_(memory.bytes(image)[skip : skip + to.nbytes])
