"""The record of a live state as a stream: the order of its images, and its chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from torchrelay.describing.description import Description, Indices
from torchrelay.geometry import chunks as cutting
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.runs import Column
from torchrelay.record.schema import ON_HOST, Record, VolumeRecord, column_of


class StatePlan(NamedTuple):
    """The `record` of a state, its `chunks`, and the number in the record of each image of the
    description."""

    record: Record
    chunks: cutting.Chunks
    numbers: Indices

    @classmethod
    def build(
        cls, found: Description, step: int | None, receivers: int, chunk_bytes: int | None
    ) -> StatePlan:
        devices, device = _devices(found)
        numbers, storage_of = _order(found, device)
        device_of: Numbers | None = None
        if device is not None:
            device_of = np.empty(len(numbers), np.int64)
            device_of[numbers] = device
        record = found.record(
            numbers,
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
        volume = VolumeRecord("", total, cuts=np.array(cuts, np.int64) if cuts else None)
        return cls(replace(record, volumes=(volume,)), cutting.Chunks(sizes, cuts), numbers)


def _order(found: Description, devices: Numbers | None) -> tuple[Indices, Indices | None]:
    """The position of each image in the stream; and the storage of each image of the stream, unless
    each has one of its own. `devices` has the device of each image, unless all are on the host.

    Small storages come first, by device, so that they share chunks; then large ones. Within these,
    storages are in the order of the state, and the images of one storage in that of memory. Four
    tensors of a state: `a` and `c` are views of one small storage, and `b` is large:

        image of the description    0 (a)   1 (b)   2 (c)   3 (d)
        storage                     0       1       0       2
        its turn                    0       2       0       1
        address                     0x140   0x900   0x100   0x700
        position in the stream      1       3       0       2        c, a, d, b
        storage in the stream       by position: 0 (c), 0 (a), 1 (d), 2 (b)
    """
    storage, addresses, nbytes = _memory_of(found)
    count = int(storage.max(initial=-1)) + 1
    large = np.bincount(storage, nbytes, count) >= cutting.SMALL_BYTES
    first_leaf = np.full(count, found.plain.count)
    np.minimum.at(first_leaf, storage, found.owners)
    device: Numbers = np.zeros(count, np.int64)
    if devices is not None:
        device[storage] = devices
    turn = _inverse(np.lexsort((first_leaf, np.where(large, 0, device), large)))[storage]
    if len(storage) == count:
        return turn, None
    order = np.lexsort((addresses, turn))
    return _inverse(order), turn[order]


def _memory_of(found: Description) -> tuple[Indices, Column, Column]:
    """Of each image, the number of its storage, its address and its bytes."""
    origins, storage = np.unique(found.plain.origins, return_inverse=True)
    rows = [(image.storage, image.low, image.region.nbytes) for image in found.images]
    more = np.array(rows, np.uint64).reshape(-1, 3).T
    return (
        np.append(storage, len(origins) + more[0].astype(np.intp)),
        np.append(found.plain.addresses, more[1]),
        np.append(found.plain.nbytes, more[2]),
    )


def _inverse(order: Indices) -> Indices:
    """Of each item, its position in an order of them."""
    found: Indices = np.empty(len(order), np.intp)
    found[order] = np.arange(len(order))
    return found


def _devices(found: Description) -> tuple[tuple[str, ...], Numbers | None]:
    """The kinds of devices, and of each image its number; None if all are on the host."""
    plain, others = found.plain, [image.device for image in found.images]
    if plain.on_host.all() and {"cpu"}.issuperset(others):
        return ON_HOST, None
    names = list(dict.fromkeys([*(kind.device for kind in plain.kinds), *others]))
    kinds = np.array([names.index(kind.device) for kind in plain.kinds], np.int64)
    numbers = np.array([names.index(device) for device in others], np.int64)
    return tuple(names), np.concatenate([kinds[plain.kind_of], numbers])
