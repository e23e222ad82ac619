"""The record of a live state, and which of its tensors each image is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from torchrelay.geometry import chunks as cutting
from torchrelay.geometry.boxes import Numbers
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
        order, storage_of = self._order(empties, on)
        self.plain_images: Indices = order[:count]
        self.other_numbers: list[int] = order[count : len(order) - empties].tolist()
        # Kinds and images.
        row_kinds, image_kinds = kinds_of_plain(apart.plain, apart.sharded, kinds)
        kind_of: Numbers = np.empty(len(order), np.int64)
        kind_of[order] = np.concatenate([image_kinds, kinds.images.numbers(odd.image_kinds)])
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
            storage_of=storage_of,
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

    def _order(self, empties: int, on: Numbers | None) -> tuple[Indices, Indices | None]:
        """The place in the stream of each image: those of plain tensors, of others, and those
        without bytes. Images of one storage stay together; small storages come first, by device.
        `on` has the device of each image, unless all are on the host. Also returns the storage of
        each image in the stream, unless each has one of its own."""
        apart, plain, images = self._apart, self._apart.plain, self._apart.resolved
        origins, storage = np.unique(plain.origins, return_inverse=True)
        owners, at, nbytes = plain.leaves, plain.addresses, plain.nbytes
        if images or empties:
            numbers = [image.storage for image in images]
            first = images[-1].storage + 1 if images else 0
            numbers += range(first, first + empties)
            leaves = [apart.owners[image.ticket] for image in images] + [plain.count] * empties
            storage = np.append(storage, len(origins) + np.array(numbers, np.intp))
            owners = np.append(owners, np.array(leaves, np.int64))
            extents = [(image.at, image.region.nbytes) for image in images] + [(0, 0)] * empties
            more = np.array(extents, np.uint64).T
            at, nbytes = np.append(at, more[0]), np.append(nbytes, more[1])
        totals = np.bincount(storage, nbytes)
        firsts = np.full(len(totals), plain.count)
        np.minimum.at(firsts, storage, owners)
        used = np.argsort(firsts, kind="stable")
        if on is not None:
            devices: Numbers = np.zeros(len(totals), np.int64)
            devices[storage] = on
            on = devices[used]
        place: Indices = np.empty(len(used), np.intp)
        place[used[cutting.stream_order(totals[used], on)]] = np.arange(len(used))
        if len(storage) == len(totals):
            return place[storage], None
        order = np.lexsort((at, place[storage]))
        found: Indices = np.empty(len(storage), np.intp)
        found[order] = np.arange(len(order))
        return found, place[storage][order]

    def _devices(self, odd: OddRows) -> tuple[tuple[str, ...], Numbers | None]:
        """The kinds of devices, and of each image its number; None if all are on the host."""
        plain = self._apart.plain
        if plain.on_host.all() and {"cpu"}.issuperset(odd.devices):
            return ON_HOST, None
        names = list(dict.fromkeys([*(kind.device for kind in plain.kinds), *odd.devices]))
        kinds = np.array([names.index(kind.device) for kind in plain.kinds], np.int64)
        numbers = np.array([names.index(device) for device in odd.devices], np.int64)
        return tuple(names), np.concatenate([kinds[plain.kind_of], numbers])


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
            leaf = kinds.leaves.number(LeafKind(kind.dtype, kind.shape, None, kind.flags))
            image = ImageKind(stored_dtype(kind.dtype), kind.shape, None, boxes)
        else:
            part = sharded.kinds[number - count]
            leaf, image = part.number_in(kinds), part.image
        found[:, number] = leaf, kinds.images.number(image)
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
            number = self._kinds.leaves.number(LeafKind(view.dtype, view.shape, strides, flags))
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
