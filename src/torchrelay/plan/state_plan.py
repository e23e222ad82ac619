"""The record of a live state, and where in memory and in the stream its bytes are.

Records and numbers alone: a plan holds none of the plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch

from torchrelay.geometry import chunks as cutting
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Column, Runs
from torchrelay.plan.description import Others, taken_apart
from torchrelay.plan.images import LEAF, SHARDED, Image, stored_dtype
from torchrelay.plan.pieces import Indices, Pieces
from torchrelay.plan.region import Region
from torchrelay.plan.sharded import ShardedKind, ShardedLeaves, find_sharded
from torchrelay.plan.stream import Stream
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import (
    ON_HOST,
    ImageKind,
    LeafKind,
    StateOutline,
    VolumeRecord,
    column_of,
)
from torchrelay.state.leaves import finished
from torchrelay.state.tree import Flat


class StatePlan:
    """The `record` of a state, its `chunks`, and the memory behind its images.

    Images are numbered as in the record: `piece_images` has those of the pieces, `other_numbers`
    those of `others`, which `describe` found one by one.
    """

    def __init__(
        self,
        flat: Flat,
        pieces: Pieces,
        some: Others,
        sharded: ShardedLeaves,
        step: int | None,
        receivers: int,
        chunk_bytes: int | None,
    ) -> None:
        self.pieces = pieces
        self.others: list[Image] = some.images.resolve(some.roles, sharded.kinds)
        kinds = KindTable()
        odd = _OddRows(some, self.others, sharded.kinds, kinds)
        count, empties = len(pieces.plain), len(odd.empties)
        devices, on = self._devices(odd)
        order = self._order(some, empties, on)
        self.piece_images: Indices = order[:count]
        self.other_numbers: list[int] = order[count : len(order) - empties].tolist()
        # Kinds and images.
        row_kinds, image_kinds = _kinds_of_pieces(pieces, sharded, kinds)
        kind_of: Numbers = np.empty(len(order), np.int64)
        kind_of[order] = np.concatenate(
            [image_kinds, np.array([*map(kinds.image, odd.image_kinds)], np.int64)]
        )
        device_of: Numbers | None = None
        if on is not None:
            device_of = np.empty(len(order), np.int64)
            device_of[order] = on
        outline = self._outline(flat, some, odd, row_kinds, order)
        record = kinds.record(
            (outline,),
            kind_of,
            step=step,
            devices=devices,
            device_of=None if device_of is None else column_of(device_of),
            storage_of=self._storage_of,
        )
        sizes = record.box_bytes
        total = cutting.stream_bytes(sizes)
        chunk_bytes = chunk_bytes or cutting.chunk_size(
            total, receivers, on_device=devices != ON_HOST
        )
        used = None if device_of is None else device_of[sizes > 0]
        cuts = cutting.cut(sizes[sizes > 0], chunk_bytes, used)
        self.chunks = cutting.Chunks(sizes, cuts)
        column = np.array(cuts, np.int64) if cuts else None
        volume = VolumeRecord("", total, cuts=column)
        self.record = msgspec.structs.replace(record, volumes=(volume,))

    @classmethod
    def build(
        cls,
        flat: Flat,
        versions: list[int],
        *,
        step: int | None,
        receivers: int,
        chunk_bytes: int | None,
    ) -> tuple[StatePlan, Others, ShardedLeaves]:
        """Plan a state, and say what it consists of besides its pieces.

        `versions` receives the version counters of the pieces.
        """
        sharded = find_sharded(flat.leaves)
        pieces, some = taken_apart(flat, versions, sharded=sharded)
        planned = cls(flat, pieces, some, sharded, step, receivers, chunk_bytes)
        return planned, some, sharded

    def _order(self, some: Others, empties: int, on: Numbers | None) -> Indices:
        """The place in the stream of each image: those of pieces, of other tensors, and those
        without bytes. Images of one storage stay together; small storages come first, by device.
        `on` has the device of each image, unless all are on the host."""
        pieces, images = self.pieces, self.others
        firsts, sizes = pieces.firsts, pieces.sizes.astype(np.int64)
        storage, at = pieces.storage, pieces.at.astype(np.int64)
        if images or empties:
            tickets = some.images.firsts
            ends = np.zeros(len(tickets), np.int64)
            for image in images:
                ends[image.storage] = image.at + image.region.nbytes
            last = pieces.plain.count
            more = [some.owners[ticket] for ticket in tickets] + [last] * empties
            firsts = np.append(firsts, np.array(more, np.intp))
            numbers = [image.storage for image in images]
            numbers += range(len(tickets), len(tickets) + empties)
            storage = np.append(storage, np.array(numbers, np.intp) + len(sizes))
            sizes = np.concatenate([sizes, ends, np.zeros(empties, np.int64)])
            places = [image.at for image in images] + [0] * empties
            at = np.append(at, np.array(places, np.int64))
        used: Indices = np.arange(len(firsts))
        if images or empties:  # those of pieces alone are in order
            used = np.argsort(firsts, kind="stable")
        place: Indices = np.empty(len(used), np.intp)
        if on is not None:
            devices: Numbers = np.zeros(len(sizes), np.int64)
            devices[storage] = on
            on = devices[used]
        place[used[cutting.stream_order(sizes[used], on)]] = np.arange(len(used))
        self._storage_of: Numbers | None = None
        if len(storage) == len(sizes):
            return place[storage]
        found: Indices = np.empty(len(storage), np.intp)
        order = np.lexsort((at, place[storage]))
        found[order] = np.arange(len(order))
        self._storage_of = place[storage][order]
        return found

    def _devices(self, odd: _OddRows) -> tuple[tuple[str, ...], Numbers | None]:
        """The kinds of devices, and of each image its number; None if all are on the host."""
        plain = self.pieces.plain
        if plain.on_host.all() and {"cpu"}.issuperset(odd.devices):
            return ON_HOST, None
        names = list(dict.fromkeys([*(kind.device for kind in plain.kinds), *odd.devices]))
        kinds = np.array([names.index(kind.device) for kind in plain.kinds], np.int64)
        numbers = np.array([names.index(device) for device in odd.devices], np.int64)
        return tuple(names), np.concatenate([kinds[plain.kind_of], numbers])

    def _outline(
        self, flat: Flat, some: Others, odd: _OddRows, kinds: Numbers, order: Indices
    ) -> StateOutline:
        images: Numbers = self.piece_images.astype(np.int64)
        offsets = None
        if odd.leaves:
            count = len(self.pieces.plain)
            leaves = np.concatenate([self.pieces.plain.leaf_of, np.array(odd.leaves, np.int64)])
            by_leaf = np.argsort(leaves, kind="stable")
            kinds = np.concatenate([kinds, np.array(odd.kinds, np.int64)])[by_leaf]
            more = order[count:][np.array(odd.images, np.intp)]
            images = np.concatenate([images, more])[by_leaf]
            zeros = np.zeros(count, np.int64)
            offsets = column_of(np.concatenate([zeros, np.array(odd.offsets, np.int64)])[by_leaf])
        in_order = len(images) <= len(order) and bool((images == np.arange(len(images))).all())

        def part(ticket: int) -> m.TensorLeaf:
            return some.images.leaf(ticket, self.other_numbers)

        others = tuple([finished(item, part) for _, item in odd.records])
        return StateOutline(
            flat.tree,
            len(flat.leaves),
            others,
            column_of(np.array([leaf for leaf, _ in odd.records], np.int64)),
            column_of(kinds),
            None if in_order else images,
            offsets,
        )

    def stream(self, plain: Sequence[Any]) -> Stream:
        """The bytes, as they lie in memory now. `plain` are the tensors of the pieces."""
        runs: list[tuple[int, int, int]] = []
        regions: list[tuple[int, Region]] = []  # not in host memory, or not in one run
        for number, image in sorted(zip(self.other_numbers, self.others, strict=True), key=_first):
            start, region = self.chunks.start_of(number), image.region
            if region.address:
                runs.append((start, region.address, region.nbytes))
            else:
                regions.append((start, region))
        far = _TensorsAt(self._far, plain)
        return Stream(self._host(runs), regions, self.chunks.stream_bytes, self._device, far)

    @cached_property
    def _starts(self) -> Column:
        """Where in the stream each piece stands."""
        return self.chunks.places[self.piece_images]

    @cached_property
    def _far(self) -> list[tuple[int, int]]:
        """Positions in the stream of pieces on devices, ascending, and their numbers."""
        rows = np.flatnonzero(~self.pieces.plain.on_host)
        rows = rows[np.argsort(self._starts[rows])]
        return list(zip(self._starts[rows].tolist(), rows.tolist(), strict=True))

    @cached_property
    def _device(self) -> Runs:
        """Pieces on devices, by address."""
        plain = self.pieces.plain
        columns = (self._starts, plain.address_of, plain.nbytes)
        return Runs.unordered(*(column[~plain.on_host] for column in columns))

    def _host(self, runs: list[tuple[int, int, int]]) -> Runs:
        plain = self.pieces.plain
        columns: list[Column] = [self._starts, plain.address_of, plain.nbytes]
        if not plain.on_host.all():
            columns = [column[plain.on_host] for column in columns]
        if runs:
            more = np.array(runs, np.uint64).T
            columns = [np.concatenate(pair) for pair in zip(columns, more, strict=True)]
        order = np.argsort(columns[0])
        return Runs(*(column[order] for column in columns))

    @cached_property
    def large(self) -> dict[int, int]:
        """By image, the pieces that are large."""
        large = np.flatnonzero(self.pieces.plain.nbytes >= cutting.MIB)
        return dict(zip(self.piece_images[large].tolist(), large.tolist(), strict=True))


def _kinds_of_pieces(
    pieces: Pieces, sharded: ShardedLeaves, kinds: KindTable
) -> tuple[Numbers, Numbers]:
    """Of each piece, the kind of its leaf and that of its image."""
    plain = pieces.plain
    # Pieces that are not distributed have these kinds, the others those of `sharded`.
    of: Numbers = plain.kind_of
    if sharded.numbers:
        leaves = np.array([*sharded.numbers], np.int64)
        rows = np.searchsorted(plain.leaf_of, leaves)
        there = rows < len(plain)
        there[there] = plain.leaf_of[rows[there]] == leaves[there]
        numbers = np.array([*sharded.numbers.values()], np.int64)
        of = of.copy()
        of[rows[there]] = len(plain.kinds) + numbers[there]
    count = len(plain.kinds)
    found: Numbers = np.zeros((2, count + len(sharded.kinds)), np.int64)
    for number in np.flatnonzero(np.bincount(of, minlength=1)).tolist() if len(of) else ():
        if number < count:
            kind = plain.kinds[number]
            leaf = kinds.leaf(LeafKind(kind.dtype, kind.shape, None, kind.flags))
            image = ImageKind(stored_dtype(kind.dtype), kind.shape)
        else:
            part = sharded.kinds[number - count]
            leaf, image = part.number_in(kinds), part.image
        found[:, number] = leaf, kinds.image(image)
    return found[0][of], found[1][of]


class _OddRows:
    """Tensor leaves that are not pieces, as rows, and all other leaves as `records`.

    Images are numbered from the first that is not a piece's on; those without bytes, the `empties`,
    come after all others.
    """

    def __init__(
        self,
        some: Others,
        images: Sequence[Image],
        sharded: Sequence[ShardedKind],
        kinds: KindTable,
    ) -> None:
        self.leaves: list[int] = []
        self.kinds: list[int] = []
        self.images: list[int] = []
        self.offsets: list[int] = []
        self.records: list[tuple[int, Any]] = []
        self.empties: list[tuple[ImageKind, str]] = []
        self._some, self._first_empty = some, len(images)
        self._sharded, self._kinds = sharded, kinds
        tickets = {owner: ticket for ticket, owner in enumerate(some.owners)}
        for leaf, item in zip(some.leaves, some.described, strict=True):
            ticket = item if isinstance(item, int) else tickets.get(leaf, -1)
            role = some.roles[ticket] if ticket >= 0 else LEAF - 1
            if role < LEAF or not self._add(leaf, ticket, role):
                self.records.append((leaf, item))
        self.image_kinds = [*(image.kind for image in images), *(kind for kind, _ in self.empties)]
        self.devices = [*(image.device for image in images), *(name for _, name in self.empties)]

    def _add(self, leaf: int, ticket: int, role: int) -> bool:
        """Have a leaf in a row; whether it can be."""
        view, place = self._some.images.view(ticket), self._some.images.place(ticket)
        if view.flags & m.META or (role >= SHARDED and place.image >= 0 and not place.whole):
            return False
        image = place.image
        if image < 0:
            kind = ImageKind(stored_dtype(view.dtype), view.shape, view.kept_strides)
            if role >= SHARDED:
                kind = self._sharded[role].image
            image = self._first_empty + len(self.empties)
            self.empties.append((kind, view.tensor.device.type))
        if role >= SHARDED:
            number = self._sharded[role].number_in(self._kinds)
        else:
            strides = None if place.whole else place.strides
            flags = view.flags & ~m.ON_DEVICE
            number = self._kinds.leaf(LeafKind(view.dtype, view.shape, strides, flags))
        self.leaves.append(leaf)
        self.kinds.append(number)
        self.images.append(image)
        self.offsets.append(place.offset)
        return True


class _TensorsAt(Sequence[tuple[int, torch.Tensor]]):
    """Tensors with their positions, paired only when they are asked for."""

    def __init__(self, rows: list[tuple[int, int]], tensors: Sequence[Any]) -> None:
        self._rows, self._tensors = rows, tensors

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        at, row = self._rows[index]
        return at, self._tensors[row]


def _first(pair: tuple[int, Image]) -> int:
    return pair[0]
