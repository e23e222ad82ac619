"""The landing of a whole state, whoever brings its bytes: one rank, several of them, or a store.

In the end objects take their new state, the caller's tensors are written, and the rest is handed
over. Up to the first write there is a way back; after it the state is new, or said to be torn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrelay.errors import MismatchError, RelayError, TornStateError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Moves, Runs
from torchrelay.landing.checks.fit import ArrayFit
from torchrelay.landing.commit.handover import Handover
from torchrelay.landing.fitting import Fitting
from torchrelay.landing.held import HeldImages
from torchrelay.landing.leaves import check_records, copy_late, images_of, make_leaf, without_bytes
from torchrelay.landing.new_leaves import Filled, NewLeaves
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import Pairing
from torchrelay.landing.places import Landed, Landing, chunks_of
from torchrelay.landing.straight import Straight, device_of
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.plan.region import Stream
from torchrelay.record import manifest as m
from torchrelay.record.rows import LeafRows, Marks
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.backing import missing_memory
from torchrelay.state.leaves import build
from torchrelay.state.matching import Pair
from torchrelay.state.paths import LeafPaths, Path
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


class StateLanding(Landing):
    """A landing of a whole state: what a destination was paired with is written to it, and the rest
    of what it gets is made. It ends by `make`, then `end`; `commit` does both.

    Each byte of the stream has one place. Rows whose image is held are copied from there by the
    commit; bytes of the others go straight to the caller's memory.

    A source that has boxes of tensors and no stream asks for images by number. It fills the memory
    that is held before `make`, and the caller's own tensors in the `bring` of `end`, which sets
    `torn` when it begins.

    Images of the leaves in `late` are not written to the destination as they arrive: they are held,
    and so are those in `compared`, whether they go anywhere or not. `filled` may have memory that
    has the bytes of an image already, for new leaves to keep.
    """

    _finishing = False

    def __init__(
        self,
        record: Record,
        pairing: Pairing,
        options: LandingOptions,
        workspace: Workspace,
        late: Collection[int] = (),
        compared: Collection[int] = (),
        filled: Filled | None = None,
    ) -> None:
        self.record, self._pairing, self._into = record, pairing, pairing.into
        self._rows = rows = LeafRows(record)
        self._options, self._workspace = options, workspace
        self._copy = partial(workspace.copy, alone=False)
        matched = pairing.matched
        self.chunks = chunks_of(record)
        self._new = NewLeaves(rows, options)
        for one in pairing.given:
            self._new.add_given(one)
        if options.make_missing:
            self._new.add_all_but({pair[0] for pair in matched.pairs})
        # Registered types are made before anything is written: of bytes that are held back.
        one_tree = matched.tree is not None
        inside = self._into.inside_records if one_tree else inside_records(rows.tree)
        self._inside = matched.some(inside) if inside else []
        if inside:
            made = np.flatnonzero(self._new.marks).tolist()
            check_records(rows.tree, rows, {pair[0] for pair in self._inside}.union(made))
        self._fitting = Fitting(matched, rows, self._into, self.chunks)
        tree = self._into.flat.tree
        self._fitting.check_writable(workspace, lambda leaf: LeafPaths(tree)[leaf])
        self.held = HeldImages(self.chunks)
        self._hold(compared, () if options.staged else late, filled)
        table = self._fitting.table
        self._straight = straight = table.some(~self.held.marks[table.image])
        far, near = straight.some(~straight.on_host), straight.some(straight.on_host)
        self.live = bool(len(straight.image))
        self.places = Stream(
            Runs.merged(self.held.runs(far=False), near.runs),
            [],
            self.chunks.stream_bytes,
            Runs.merged(self.held.runs(far=True), far.runs),
            # Nothing here refers to the landing: one that is given up goes at once.
            partial(_far_memory, self.held, far, self._fitting.tensors),
        )

    # Memory for the images that are held until `commit`.

    def _hold(
        self, compared: Collection[int], late: Collection[int], filled: Filled | None
    ) -> None:
        table, held, workspace = self._fitting.table, self.held, self._workspace
        written, near = (np.zeros(self.record.images, bool) for _ in range(2))
        written[table.image] = True
        near[[*compared, *self._fitting.late_images]] = True
        leaves = np.zeros(len(self._rows), bool)
        values = [index for index, _ in self._fitting.values.values()]
        leaves[[*values, *(index for index, _, _ in self._remade()), *late]] = True
        near |= images_of(self._rows, leaves)
        made = self._new.images
        near |= made & written
        self._kept: Marks = made & ~near  # images in memory that becomes the caller's
        alone = np.flatnonzero(self._kept)
        self._new.take_memory(alone, held, self.chunks, workspace, filled)
        back = written
        if not self._options.staged:
            back = np.zeros(self.record.images, bool)
            back[table.several] = True
        for device, images in self._by_device(near):
            with suppress(MismatchError):  # the host may have so much
                held.take(images[back[images]], workspace, device)
        near |= back & ~held.marks
        held.take(np.flatnonzero(near), workspace)

    def _remade(self) -> list[Pair]:
        """The pairs that registered types are made of, but for distributed tensors: those are in
        them as they are."""
        leaves = self._into.flat.leaves
        return [pair for pair in self._inside if not t.is_distributed(leaves[pair[2]])]

    def _by_device(self, near: Marks) -> Iterator[tuple[torch.device, Numbers]]:
        """Images all of whose bytes go to one device, and to the host in no other way: they are
        staged there."""
        table = self._fitting.table
        for number in np.unique(table.gpu[~table.on_host]).tolist():
            marks = np.zeros(self.record.images, bool)
            marks[table.image[table.gpu == number]] = True
            marks[table.image[table.gpu != number]] = False
            yield device_of(number), np.flatnonzero(marks & ~near)

    def own(self) -> HeldImages:
        """The caller's tensors and local parts that take images as they are; none where all images
        are held."""
        rows, found = self._straight, HeldImages(self.chunks)
        memory = [self._fitting.tensors[number] for number in rows.leaf.tolist()]
        numbers = np.arange(len(memory))
        columns = (rows.nbytes, ~rows.on_host, rows.image)
        found.add(memory, *columns, numbers, bases=rows.address)
        return found

    def are_equal(self, one: int, other: int) -> bool:
        """Whether two images that are held have the same bytes."""
        return torch.equal(self.held.bytes(one).cpu(), self.held.bytes(other).cpu())

    # The end.

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
        rows, held, rank, fitting = self._rows, self._held_part, self._options.rank, self._fitting
        self._values = {
            here: make_leaf(rows[index], path, held, rank)
            for here, (index, path) in fitting.values.items()
        }
        self._made = self._new.make(self._owned_part)
        for whole, path in fitting.wholes.values():
            make_leaf(whole, path, held, rank)  # indices that point nowhere end here
        self._copies = [
            (
                pair.destination,
                build(pair.leaf, held, 0) if isinstance(pair, ArrayFit) else held(pair.part),
            )
            for pair in fitting.late
        ]
        leaves = self._into.own
        inside = {index: leaves[here] for index, _, here in self._inside}
        for index, path, _ in self._remade():
            inside[index] = make_leaf(rows[index], path, held, rank)
        given = [*self._made]
        for index, _, here in self._pairing.filled:
            if not self._new.marks[index]:
                given[index] = leaves[here]
        before = self._options.atomic
        what = (self._pairing, rows.tree, self._values, given, self._inside, inside)
        self._handover = Handover(*what, before=before)
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
            self._handover.give(written=self.torn)

        def take_back() -> None:
            lost.extend(self._handover.take_back())

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
        table, tensors = self._fitting.table, self._fitting.tensors
        for leaf, address in zip(table.leaf.tolist(), table.address.tolist(), strict=True):
            tensor = tensors[leaf]
            if tensor.data_ptr() != address or missing_memory(tensor) is not None:
                paths = LeafPaths(self._into.flat.tree)
                raise MismatchError(
                    "load_state_dict of an object gave this tensor other memory: leave one of the "
                    "two out of the state",
                    path=show(paths[leaf]) if leaf in paths else None,
                )

    def _held_part(self, part: m.TensorLeaf) -> torch.Tensor:
        return without_bytes(part) if part.storage < 0 else self.held.part(part)

    def _owned_part(self, part: m.TensorLeaf) -> torch.Tensor:
        """A tensor in memory that the caller may keep."""
        image = part.storage
        if image < 0:
            return without_bytes(part, self._new.place_of_empty(part.flags))
        if not self._kept[image]:
            clone = self.held.bytes(image).clone()
            self.held.add([clone], [clone.nbytes], [False], image)
            self._kept[image] = True
        return self.held.part(part)

    @gc_paused()
    def _finish(self) -> Landed:
        """Write what was held back, and put the rest in its place."""
        table, held = self._fitting.table, self.held
        self.torn = self.torn or bool(self._fitting.written or self._copies)
        rows = table.some(held.marks[table.image])
        self._workspace.copy(self._moves(rows.some(rows.on_host)), also=self._notes())
        self._write_far(rows.some(~rows.on_host))
        for destination, source in self._copies:
            copy_late(destination, source)
        state = self._handover.finish()
        if self._options.make_missing:
            state = self._around({}) if self._inside else self._state
        self.torn = False
        return Landed(state, self._pairing.missing, self._pairing.extra)

    def _notes(self) -> list[Callable[[], None]]:
        """Calls that bump autograd's version counters, one for each block."""
        written, self._fitting.written = self._fitting.written, []
        return [partial(t.note_written, some) for some in t.blocks(written)]

    def _around(self, inside: Mapping[int, object]) -> object:
        """With `make_missing`: a new tree of the offered containers, around the caller's tensors
        and objects and the leaves that were made."""
        known, leaves = [*self._made], self._into.own
        pairs = self._pairing.matched.pairs
        for index, _, here in reversed(pairs):
            known[index] = leaves[here]
        # Tensors that are tied there may be separate here.
        apart: dict[Path, Any] = {
            path: leaves[here]
            for index, path, here in pairs
            if leaves[here] is not known[index] and isinstance(leaves[here], _IN_PLACE)
        }
        for here, (index, _) in self._fitting.values.items():
            known[index] = self._values[here]
        for index, leaf in inside.items():
            known[index] = leaf
        objects = {path: one for path, one in self._into.objects.items() if not one.in_module}
        placed = apart | {path: one.object for path, one in objects.items()}
        stubs = {path: len(known) + number for number, path in enumerate(placed)}
        known += placed.values()
        return unflatten(grafted(self._rows.tree, stubs), known)

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
                to = _run(self._fitting.tensors[leaf], nbytes)
                to.copy_(held.bytes(image)[skip : skip + nbytes])


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
