"""The record of a live state, and which of its tensors each image is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from torchrelay.geometry import chunks as cutting
from torchrelay.geometry.boxes import Numbers
from torchrelay.plan.description import Indices, Others, Pieces
from torchrelay.plan.images import LEAF, SHARDED, Image, stored_dtype
from torchrelay.plan.outline import TensorRows, outline
from torchrelay.plan.plain import PlainTensors
from torchrelay.plan.sharded import ShardedKind, ShardedLeaves
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
    """The `record` of a state, its `chunks`, and the tensors behind its images.

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
        row_kinds, image_kinds = kinds_of_pieces(pieces.plain, sharded, kinds)
        kind_of: Numbers = np.empty(len(order), np.int64)
        kind_of[order] = np.concatenate(
            [image_kinds, np.array([*map(kinds.image, odd.image_kinds)], np.int64)]
        )
        device_of: Numbers | None = None
        if on is not None:
            device_of = np.empty(len(order), np.int64)
            device_of[order] = on
        rows = self._outline(flat, some, odd, row_kinds, order)
        record = kinds.record(
            (rows,),
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
        def part(ticket: int) -> m.TensorLeaf:
            return some.images.leaf(ticket, self.other_numbers)

        others = {leaf: finished(item, part) for leaf, item in odd.records}
        count, images = len(self.pieces.plain), self.piece_images.astype(np.int64)
        zeros = np.zeros(count, np.int64)
        rows = [TensorRows(self.pieces.plain.leaf_of, kinds, images, zeros)]
        if odd.rows:
            leaves, kinds, numbers, offsets = np.array(odd.rows, np.int64).T
            rows.append(TensorRows(leaves, kinds, order[count:][numbers].astype(np.int64), offsets))
        return outline(flat.tree, len(flat.leaves), others, *rows)


def kinds_of_pieces(
    plain: PlainTensors, sharded: ShardedLeaves, kinds: KindTable, boxes: int = 1
) -> tuple[Numbers, Numbers]:
    """Of each piece, the kind of its leaf and that of its image. `boxes` is the number of boxes of
    an image that is not distributed."""
    of = sharded.kinds_of(plain)
    count = len(plain.kinds)
    found: Numbers = np.zeros((2, count + len(sharded.kinds)), np.int64)
    for number in np.flatnonzero(np.bincount(of, minlength=1)).tolist() if len(of) else ():
        if number < count:
            kind = plain.kinds[number]
            leaf = kinds.leaf(LeafKind(kind.dtype, kind.shape, None, kind.flags))
            image = ImageKind(stored_dtype(kind.dtype), kind.shape, None, boxes)
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
        self.rows: list[tuple[int, int, int, int]] = []  # leaf, kind, image and offset
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
        view, place = self._some.images.views[ticket], self._some.images.places[ticket]
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
        self.rows.append((leaf, number, image, place.offset))
        return True
