"""The record of a live state as a stream: the order of its images, and its chunks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from torchrelay.describing.description import Description, Indices
from torchrelay.geometry import chunks as cutting
from torchrelay.geometry.boxes import Numbers
from torchrelay.record.schema import ON_HOST, Record, VolumeRecord, column_of


class StatePlan(NamedTuple):
    """The `record` of a state, its `chunks`, and the place of each image of the description."""

    record: Record
    chunks: cutting.Chunks
    place: Indices

    @classmethod
    def build(
        cls, found: Description, step: int | None, receivers: int, chunk_bytes: int | None
    ) -> StatePlan:
        devices, on = _devices(found)
        place, storage_of = _order(found, on)
        device_of: Numbers | None = None
        if on is not None:
            device_of = np.empty(len(place), np.int64)
            device_of[place] = on
        record = found.record(
            place,
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
        return cls(replace(record, volumes=(volume,)), cutting.Chunks(sizes, cuts), place)


def _order(found: Description, on: Numbers | None) -> tuple[Indices, Indices | None]:
    """The place in the stream of each image. Images of one storage stay together; small storages
    come first, by device. `on` has the device of each image, unless all are on the host. Also
    returns the storage of each image in the stream, unless each has one of its own."""
    plain, images = found.plain, found.images
    origins = plain.origins
    storage: Indices = np.arange(len(origins))
    if not (origins[1:] > origins[:-1]).all():  # mostly tensors lie in the order of the state
        origins, storage = np.unique(origins, return_inverse=True)
    at, nbytes = plain.addresses, plain.nbytes
    if images:
        rows = [(image.storage, image.low, image.region.nbytes) for image in images]
        more = np.array(rows, np.uint64).T
        storage = np.append(storage, len(origins) + more[0].astype(np.intp))
        at, nbytes = np.append(at, more[1]), np.append(nbytes, more[2])
    totals = np.bincount(storage, nbytes)
    firsts = np.full(len(totals), plain.count)
    np.minimum.at(firsts, storage, found.owners)
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
    numbers: Indices = np.empty(len(storage), np.intp)
    numbers[order] = np.arange(len(order))
    return numbers, place[storage][order]


def _devices(found: Description) -> tuple[tuple[str, ...], Numbers | None]:
    """The kinds of devices, and of each image its number; None if all are on the host."""
    plain, others = found.plain, [image.device for image in found.images]
    if plain.on_host.all() and {"cpu"}.issuperset(others):
        return ON_HOST, None
    names = list(dict.fromkeys([*(kind.device for kind in plain.kinds), *others]))
    kinds = np.array([names.index(kind.device) for kind in plain.kinds], np.int64)
    numbers = np.array([names.index(device) for device in others], np.int64)
    return tuple(names), np.concatenate([kinds[plain.kind_of], numbers])
