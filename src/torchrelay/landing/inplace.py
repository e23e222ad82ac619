"""The caller's own tensors: staged and written at once (`atomic`), or written as bytes arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrelay.geometry.runs import Moves, Runs, moves
from torchrelay.geometry.strides import packed
from torchrelay.landing.checks.fit import ArrayFit, Fit, Found, fit
from torchrelay.landing.checks.ties import check_ties, host_spans
from torchrelay.landing.commit.ending import StateLanding
from torchrelay.landing.commit.handover import Handover
from torchrelay.landing.destination import Pair, Straight, split
from torchrelay.landing.held import HeldImages, only_device
from torchrelay.landing.leaves import (
    check_leaf,
    check_records,
    copy_late,
    make_leaf,
    strides_of,
)
from torchrelay.landing.missing import MadeLeaves
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.pairing import Pairing
from torchrelay.landing.places import ImageMemory, Landed, OwnTensor, Places, chunks_of, reaching
from torchrelay.landing.workspace import Workspace
from torchrelay.plan.region import Region, copy_boxes
from torchrelay.record import manifest as m
from torchrelay.record.manifest import parts
from torchrelay.record.pause import gc_paused
from torchrelay.record.rows import LeafRows
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.leaves import build
from torchrelay.state.paths import LeafPaths, Path
from torchrelay.state.tree import grafted, inside_records, unflatten

_HOST = torch.device("cpu")


class _Placed(NamedTuple):
    """A destination in image order: bytes [at, at + nbytes) of an image go to `region`."""

    at: int
    region: Region


class ExistingTensors(StateLanding):
    """The tensors of a destination that was paired with the record's tree.

    The leaves in `late` get their bytes by way of whole images, which are not written to the
    destination as they are. The images in `compared` are held, whether they go anywhere or not.
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
        self._put = partial(workspace.copy, alone=False)
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
        back = set() if options.staged else {index for index, _, _ in self._remade()} | late
        self._values: dict[int, tuple[int, Path]] = {}  # by leaf here, the one offered
        self._direct: dict[int, list[_Placed]] = {}
        self._own: list[Fit] = []
        self._late: list[Fit | ArrayFit] = []
        self._wholes: dict[int, tuple[m.SparseLeaf, Path]] = {}
        plain, rest = split(matched, rows, into.layout, self.chunks, back)
        fits = self._fits(rest)
        if fits and plain.meets(host_spans(fits, self.chunks)):
            # Plain tensors share memory with others: the check below has to see them all.
            plain = Straight.none()
            fits = self._fits(matched.pairs)
        check_ties(fits, self.chunks)
        # Plain tensors in host memory are known by address, others by region.
        self._plain = plain
        self._written = self._written_plain()
        self._plain_far = plain.some(~plain.on_host)
        if len(self._plain_far.image):
            plain = plain.some(plain.on_host)
        self._host = Runs(plain.at, plain.address, plain.nbytes)
        for found in fits:
            self._place(found, late=found.leaf in back)
        self._by_address = plain.image
        self._stage(compared)
        self.on_device = bool(len(self._plain_far.image) or self._held.far) or any(
            not region.keep.is_cpu for placed in self._direct.values() for _, region in placed
        )

    def _written_plain(self) -> list[torch.Tensor]:
        """The plain tensors that are written to; of distributed ones both the tensor and its local
        part, since autograd counts writes to each."""
        mine: list[Any] = self._into.flat.leaves
        whole = len(self._plain.leaf) == len(mine)
        sharded = self._into.layout.sharded.locals
        leaves = range(len(mine)) if whole else self._plain.leaf.tolist()
        found = [*mine] if whole else [mine[n] for n in leaves]
        return [*found, *(sharded[n] for n in leaves if n in sharded)] if sharded else found

    def _place(self, found: Found, late: bool) -> None:
        pair = found.pair
        if isinstance(pair, ArrayFit):
            self._late.append(pair)
            return
        self._written.append(pair.destination)
        mine = self._into.flat.leaves[found.here]
        if t.is_dtensor(mine):
            self._written.append(mine)
        placed = _in_image_order(pair)
        if placed is None or late:
            self._late.append(pair)
        else:
            self._direct.setdefault(pair.part.storage, []).append(placed)
            self._own.append(pair)
        if pair.whole is not None:
            self._wholes[id(pair.whole)] = (pair.whole, found.path)

    def _remade(self) -> list[Pair]:
        """The pairs that registered types are made of, but for distributed tensors: those are in
        them as they are."""
        leaves = self._into.flat.leaves
        return [pair for pair in self._inside if not t.is_distributed(leaves[pair[2]])]

    @cached_property
    def _near_images(self) -> set[int]:
        return set(self._plain_far.image.tolist())

    @cached_property
    def _elsewhere(self) -> set[int]:
        """Images that have places which are not known by address on the host."""
        return {*self._direct, *self._near_images}

    @cached_property
    def _regions(self) -> dict[int, list[_Placed]]:
        """By image, where it goes that is not known by address on the host."""
        found = {image: [*placed] for image, placed in self._direct.items()}
        plain, leaves = self._plain_far, self._into.layout.locals
        columns = (plain.image, plain.at - self.chunks.places[plain.image], plain.leaf)
        for image, at, leaf in zip(*(column.tolist() for column in columns), strict=True):
            mine: Any = leaves[leaf]
            found.setdefault(image, []).append(_Placed(at, Region.row_major(mine)))
        return found

    def _fits(self, pairs: list[Pair]) -> list[Found]:
        fits: list[Found] = []
        for index, path, here in pairs:
            leaf = self._rows[index]
            mine = self._into.flat.leaves[here]
            fits += [Found(pair, path, index, here) for pair in fit(leaf, mine, path)]
            if isinstance(leaf, (m.ValueLeaf, m.SizeLeaf)) or (
                isinstance(leaf, m.ArrayLeaf) and leaf.scalar
            ):
                check_leaf(leaf, path)
                self._values[here] = index, path
        return fits

    # Memory for the images that are held back until `commit`.

    def _stage(self, compared: Set[int]) -> None:
        read_back = {
            pair.leaf.storage if isinstance(pair, ArrayFit) else pair.part.storage
            for pair in self._late
        } | compared
        values = (index for index, _ in self._values.values())
        for index in (*values, *(index for index, _, _ in self._remade())):
            read_back |= {part.storage for part in parts(self._rows[index])} - {-1}
        filled: set[int] = set()
        if self._new.images:
            filled = {*self._by_address.tolist(), *self._elsewhere}
        read_back |= self._new.images & filled
        homes = self._new.take_memory(self.chunks, read_back | filled, self._workspace)
        self._held = held = HeldImages(self.record, self.chunks, self._workspace, homes)
        on_host = set(read_back)
        marks = np.zeros(self.record.images, bool)
        if self._options.staged:
            for device, images in self._by_device(read_back).items():
                if not held.put_on(device, images):
                    on_host |= images
            on_host |= (self._direct.keys() | self._near_images) - held.on_devices()
            marks[self._by_address] = True
        marks[list(on_host)] = True
        held.hold(marks)
        self._staged = held.host

    def _by_device(self, read_back: set[int]) -> dict[torch.device, set[int]]:
        """Images all of whose bytes go to one device: they are staged there."""
        leaves: Any = self._into.layout.locals
        far = [leaves[n] for n in self._plain_far.leaf.tolist()]
        if not self._direct and (alone := only_device(far)) is not None:
            return {alone: self._near_images - read_back}
        places = {
            image: {region.keep.device for _, region in placed}
            for image, placed in self._direct.items()
        }
        for image, one in zip(self._plain_far.image.tolist(), far, strict=True):
            places.setdefault(image, set()).add(one.device)
        found: dict[torch.device, set[int]] = {}
        for image, devices in places.items():
            if len(devices) == 1 and _HOST not in devices and image not in read_back:
                found.setdefault(devices.pop(), set()).add(image)
        return found

    # Bytes in

    def places(self) -> Places:
        held = self._held
        if self._options.staged:
            return Places([self._staged], held.device_memory())
        # Images that are written in several places, or also held back for something else.
        twice = self._near_images & self._direct.keys()
        if len(held.order):
            twice |= set(np.intersect1d(self._by_address, held.order).tolist())
            twice |= self._near_images & held.at.keys()
        device: list[tuple[int, int, int]] = []
        for image, placed in sorted(self._direct.items()):
            at, region = placed[0]
            run = region.run(0, region.nbytes)
            if len(placed) > 1 or run is None or image in held.at:
                twice.add(image)
            elif image not in twice:
                device.append((self.chunks.start_of(image) + at, run.data_ptr(), run.nbytes))
        host, near = self._host, self._plain_far
        if twice:
            near = near.some(~np.isin(near.image, list(twice)))
            twice |= held.at.keys() | held.homes.keys()
        elif len(self._staged.starts):
            host = Runs.merged(host, self._staged)
        far = Runs(near.at, near.address, near.nbytes)
        if device or held.far:
            far = Runs.merged(held.device_memory(), Runs.of(device), far)
        return Places([host], far, reaching(self.chunks, twice), live=bool(self._written))

    def own(self) -> Iterator[OwnTensor]:
        if self._options.staged:
            return
        leaves: Any = self._into.layout.locals
        columns = self._plain.image.tolist(), self._plain.leaf.tolist()
        for image, leaf in zip(*columns, strict=True):
            yield OwnTensor(image, leaves[leaf])
        for pair in self._own:
            yield OwnTensor(pair.part.storage, pair.destination)

    def held(self) -> Iterator[ImageMemory]:
        return self._held.memory()

    def memory_of(self, image: int) -> ImageMemory | None:
        return self._held.memory_of(image)

    def put(self, start: int, stop: int, data: torch.Tensor) -> None:
        if self._staged.reaches(start, stop) or self._host.reaches(start, stop):
            host = data.cpu()
            self._staged.scatter(start, stop, host.data_ptr(), self._put)
        for image, first, last, at in (
            self.chunks.within(start, stop) if self._held.far or self._held.slabs else ()
        ):
            if (far := self._held.far_bytes(image)) is not None:
                far[first:last].copy_(data[at : at + last - first])
        if self._options.staged:
            return
        if self._host.reaches(start, stop):
            self.torn = True
            self._host.scatter(start, stop, host.data_ptr(), self._put)
        for image, first, last, at in self.chunks.within(start, stop) if self._elsewhere else ():
            if image in self._elsewhere:
                self.torn = True
                for there, region in self._regions[image]:
                    low, high = max(first, there), min(last, there + region.nbytes)
                    if low < high:
                        region.write(low - there, high - there, data[at + low - first :])

    # The end

    @gc_paused()
    def make(self) -> None:
        leaves, held, rank = self._rows, self._held.part, self._options.rank
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

    def give(self) -> None:
        self._handover.give(written=self.torn)

    def take_back(self) -> list[Path]:
        return self._handover.take_back()

    @gc_paused()
    def finish(self) -> Landed:
        """Write what was held back, and put the rest in its place."""
        self.torn = self.torn or bool(self._written or self._copies)
        if self._options.staged:
            self._workspace.copy(self._last_copies, also=self._notes())
            self._write_regions()
        for destination, source in self._copies:
            copy_late(destination, source)
        for note in self._notes():
            note()
        state = self._handover.finish()
        if self._mine is not None:
            state = self._around()
        self.torn = False
        return Landed(state, self._pairing.missing, self._pairing.extra)

    def _around(self, inside: Mapping[int, object] | None = None) -> object:
        """With `make_missing`: a new tree of the offered containers, around the caller's tensors
        and objects and the leaves that were made."""
        objects = {path: one for path, one in self._into.objects.items() if not one.in_module}
        stubs = {path: -1 - number for number, path in enumerate(objects)}
        known = {**self._made, **(self._mine or {}), **(inside or {})}
        known.update((index, self._new_values[here]) for here, (index, _) in self._values.items())
        known.update((stub, objects[path].object) for path, stub in stubs.items())
        return unflatten(grafted(self._rows.tree, stubs), known)

    def arrived(self) -> None:
        if self._options.staged:
            self._last_copies  # noqa: B018
        else:
            for note in self._notes():
                note()

    @cached_property
    def _last_copies(self) -> Moves:
        return moves(self._staged, self._host)

    def _notes(self) -> list[Callable[[], None]]:
        """Calls that bump autograd's version counters, one for each block."""
        written, self._written = self._written, []
        return [partial(t.note_written, some) for some in t.blocks(written)]

    def _write_regions(self) -> None:
        boxes: list[tuple[torch.Tensor, torch.Tensor]] = []
        dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        for image in self._elsewhere - self._write_held():
            held = self._held.bytes(image)
            on_device = self._held.far_bytes(image) is not None
            for at, region in self._regions[image]:
                if on_device and (run := region.run(0, region.nbytes)) is not None:
                    dense.append((run, held[at : at + region.nbytes]))
                elif region.address:
                    region.write(0, region.nbytes, held[at:])
                else:
                    boxes += region.boxes(0, region.nbytes, held[at:])
        copy_boxes(boxes)
        self._workspace.copy_on_device(dense)

    def _write_held(self) -> set[int]:
        """Copy images that are held on a device to plain tensors there, all of them at once;
        returns which those were."""
        done: set[int] = set()
        near = self._plain_far
        apart = ~np.isin(near.image, list(self._direct)) if self._direct else None
        for held in self._held.slabs:
            rows = np.isin(near.image, held.images)
            some = near.some(rows if apart is None else rows & apart)
            copies = held.moves(some, self.chunks.places)
            if self._workspace.copy_by_address(copies, held.slab.device):
                done.update(some.image.tolist())
        return done

    def _owned_part(self, part: m.TensorLeaf) -> torch.Tensor:
        """A tensor over an image in memory of its own, which the caller may keep."""
        if part.storage < 0:
            return self._held.part(part)
        homes = self._held.homes
        home = homes.get(part.storage)
        if home is None:
            home = homes[part.storage] = self._held.bytes(part.storage).clone()
        return t.over_storage(home.untyped_storage(), part.offset, part, strides_of(part))


def _in_image_order(pair: Fit) -> _Placed | None:
    """The destination as a region in the order of the image, or None where it takes more."""
    part, mine, whole = pair
    strides = strides_of(part)
    layout = packed(part.shape, strides)
    here = tuple(mine.stride())
    if whole is not None or layout is None or layout.strides != strides:
        return None
    if (t.flags_of(mine) ^ part.flags) & (m.CONJ | m.NEG):
        return None
    if any(s > 1 and strides[d] == 0 and here[d] != 0 for d, s in enumerate(part.shape)):
        return None  # offered once and expanded, the destination has room for each
    return _Placed(part.offset, Region(mine, part.shape, here, layout.order))
