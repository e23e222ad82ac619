"""The record of a live state, and which of its tensors each image is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from torchrelay.geometry import chunks as cutting
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import ALIGN
from torchrelay.plan.description import TakenApart
from torchrelay.plan.images import PART, SHARDED, stored_dtype
from torchrelay.plan.outline import TensorRows, outline
from torchrelay.plan.plain import PlainTensors
from torchrelay.plan.sharded import ShardedLeaves
from torchrelay.record import manifest as m
from torchrelay.record.kinds import KindTable
from torchrelay.record.schema import (
    ON_HOST,
    ImageKind,
    LeafKind,
    VolumeRecord,
    column_of,
)

Indices = np.ndarray[Any, np.dtype[np.intp]]


class StatePlan:
    """The `record` of a state, its `chunks`, and the tensors behind its images.

    Images are numbered as in the record: `plain_images` has those of plain tensors,
    `other_numbers` those of other tensors.
    """

    def __init__(
        self, apart: TakenApart, step: int | None, receivers: int, chunk_bytes: int | None
    ) -> None:
        self._apart = apart
        kinds = KindTable()
        odd = OddRows(apart, kinds)
        count, empties = len(apart.plain), len(odd.empties)
        devices, on = self._devices(odd)
        order = self._order(empties, on)
        self.plain_images: Indices = order[:count]
        self.other_numbers: list[int] = order[count : len(order) - empties].tolist()
        # Kinds and images.
        row_kinds, image_kinds = kinds_of_plain(apart.plain, apart.sharded, kinds)
        kind_of: Numbers = np.empty(len(order), np.int64)
        kind_of[order] = np.concatenate(
            [image_kinds, np.array([*map(kinds.image, odd.image_kinds)], np.int64)]
        )
        device_of: Numbers | None = None
        if on is not None:
            device_of = np.empty(len(order), np.int64)
            device_of[order] = on
        images, zeros = order.astype(np.int64), np.zeros(count, np.int64)
        rows = [TensorRows(apart.plain.leaves, row_kinds, images[:count], zeros)]
        if odd.rows:
            leaves, row_kinds, numbers, offsets = np.array(odd.rows, np.int64).T
            rows.append(TensorRows(leaves, row_kinds, images[count:][numbers], offsets))
        others = odd.finished(self.other_numbers)
        record = kinds.record(
            (outline(apart.flat.tree, len(apart.flat.leaves), others, *rows),),
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

    def _order(self, empties: int, on: Numbers | None) -> Indices:
        """The place in the stream of each image: those of plain tensors, of others, and those
        without bytes. Images of one storage stay together; small storages come first, by device.
        `on` has the device of each image, unless all are on the host."""
        apart, images = self._apart, self._apart.resolved
        storage, at, firsts, sizes = _storages(apart.plain)
        if images or empties:
            tickets = apart.images.firsts
            ends = np.zeros(len(tickets), np.int64)
            for image in images:
                ends[image.storage] = image.at + image.region.nbytes
            last = apart.plain.count
            more = [apart.owners[ticket] for ticket in tickets] + [last] * empties
            firsts = np.append(firsts, np.array(more, np.intp))
            numbers = [image.storage for image in images]
            numbers += range(len(tickets), len(tickets) + empties)
            storage = np.append(storage, np.array(numbers, np.intp) + len(sizes))
            sizes = np.concatenate([sizes, ends, np.zeros(empties, np.int64)])
            places = [image.at for image in images] + [0] * empties
            at = np.append(at, np.array(places, np.int64))
        used: Indices = np.arange(len(firsts))
        if images or empties:  # those of plain tensors alone are in order
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

    def _devices(self, odd: OddRows) -> tuple[tuple[str, ...], Numbers | None]:
        """The kinds of devices, and of each image its number; None if all are on the host."""
        plain = self._apart.plain
        if plain.on_host.all() and {"cpu"}.issuperset(odd.devices):
            return ON_HOST, None
        names = list(dict.fromkeys([*(kind.device for kind in plain.kinds), *odd.devices]))
        kinds = np.array([names.index(kind.device) for kind in plain.kinds], np.int64)
        numbers = np.array([names.index(device) for device in odd.devices], np.int64)
        return tuple(names), np.concatenate([kinds[plain.kind_of], numbers])


class _Storages(NamedTuple):
    """The storages of plain tensors, numbered in order of first use."""

    number: Indices  # of each tensor
    at: Numbers  # where each lies in its storage, without what no tensor reaches
    firsts: Indices  # of each storage, the first leaf in it
    sizes: Numbers  # of each storage


def _storages(plain: PlainTensors) -> _Storages:
    """Lay plain tensors that do not overlap out by their storages."""
    starts, addresses = plain.origins, plain.addresses
    nbytes = plain.nbytes.astype(np.int64)
    if starts is addresses or len(np.unique(starts)) == len(starts):  # each has its own
        zeros = np.zeros(len(starts), np.int64)
        return _Storages(np.arange(len(starts)), zeros, plain.leaves, nbytes)
    order = np.lexsort((addresses, starts))
    _, first, storage = np.unique(starts, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.intp)
    rank[np.argsort(first)] = np.arange(len(first))
    storage = rank[storage]
    aligned = -(-nbytes // ALIGN) * ALIGN
    begins = np.cumsum(aligned[order]) - aligned[order]
    opens = np.ones(len(order), bool)  # the first piece of a storage
    opens[1:] = starts[order][1:] != starts[order][:-1]
    at = np.empty(len(order), np.int64)
    at[order] = begins - np.maximum.accumulate(np.where(opens, begins, 0))
    sizes = np.zeros(len(first), np.int64)
    np.maximum.at(sizes, storage, at + nbytes)
    return _Storages(storage, at, plain.leaves[np.sort(first)], sizes)


def kinds_of_plain(
    plain: PlainTensors, sharded: ShardedLeaves, kinds: KindTable, boxes: int = 1
) -> tuple[Numbers, Numbers]:
    """Of each plain tensor, the kind of its leaf and that of its image. `boxes` is the number of
    boxes of an image that is not distributed."""
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


class OddRows:
    """Tensor leaves that are not plain, as `rows`, and all other leaves as records.

    Images are numbered from the first that is not a plain tensor's on; those without bytes, the
    `empties`, come after all others. At rest a tensor without bytes has no image.
    """

    def __init__(self, apart: TakenApart, kinds: KindTable) -> None:
        self._apart, self._kinds = apart, kinds
        self.rows: list[tuple[int, int, int, int]] = []  # leaf, kind, image and offset
        self.empties: list[tuple[ImageKind, str]] = []
        self._records: list[tuple[int, m.Leaf]] = []
        images = apart.resolved
        tickets = {owner: ticket for ticket, owner in enumerate(apart.owners)}
        for leaf, item in zip(apart.others, apart.described, strict=True):
            ticket = item.storage if isinstance(item, m.TensorLeaf) else tickets.get(leaf, -1)
            role = apart.roles[ticket] if ticket >= 0 else PART
            if role == PART or not self._add(leaf, ticket, role):
                self._records.append((leaf, item))
        self.image_kinds = [*(image.kind for image in images), *(kind for kind, _ in self.empties)]
        self.devices = [*(image.device for image in images), *(name for _, name in self.empties)]

    def _add(self, leaf: int, ticket: int, role: int) -> bool:
        """Have a leaf in a row; whether it can be."""
        apart = self._apart
        view, place = apart.images.views[ticket], apart.images.places[ticket]
        if view.flags & m.META or (role >= SHARDED and place.image >= 0 and not place.whole):
            return False
        image = place.image
        if image < 0:
            if apart.at_rest:
                return False
            kind = ImageKind(stored_dtype(view.dtype), view.shape, view.kept_strides)
            if role >= SHARDED:
                kind = apart.sharded.kinds[role].image
            image = len(apart.resolved) + len(self.empties)
            self.empties.append((kind, view.tensor.device.type))
        if role >= SHARDED:
            number = apart.sharded.kinds[role].number_in(self._kinds)
        else:
            strides = None if place.whole else place.strides
            flags = view.flags & ~m.ON_DEVICE
            number = self._kinds.leaf(LeafKind(view.dtype, view.shape, strides, flags))
        self.rows.append((leaf, number, image, place.offset))
        return True

    def finished(self, numbers: Sequence[int]) -> dict[int, m.Leaf]:
        """The records by leaf. `numbers` has the number of each image in the state's record."""

        def part(ticket: m.TensorLeaf) -> m.TensorLeaf:
            found = self._apart.images.leaf(ticket.storage, numbers)
            if not self._apart.at_rest:
                return found
            return msgspec.structs.replace(found, flags=found.flags & ~m.ON_DEVICE)

        return {leaf: m.with_parts(item, part) for leaf, item in self._records}
