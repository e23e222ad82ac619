"""What planning a state found out, to be used again while the state stays as it was.

A blueprint holds records, addresses and sizes, and none of the tensors: it keeps no memory of a
state alive. Whether it still holds is asked of the tensors themselves each time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch

from torchrelay.geometry import chunks as plan
from torchrelay.geometry.runs import Column, Runs
from torchrelay.plan.description import Others, others, taken_apart
from torchrelay.plan.images import Image
from torchrelay.plan.pieces import Indices, Pieces
from torchrelay.plan.region import Region
from torchrelay.plan.stream import Stream
from torchrelay.record import codec, compact
from torchrelay.record import manifest as m
from torchrelay.record.columns import Kind, Leaves, Storages, Table
from torchrelay.record.compact import manifest_of
from torchrelay.state.leaves import finished
from torchrelay.state.tree import Flat

# Tree, receivers and chunk size: what a blueprint was asked to be for.
Order = tuple[bytes, int, int | None]
_encode = msgspec.msgpack.Encoder().encode


def order_of(flat: Flat, receivers: int, chunk_bytes: int | None) -> Order:
    # Encoded trees are compared: in Python, a key 1 is equal to a key True.
    return _encode(flat.tree), receivers, chunk_bytes


Drawn = tuple["Blueprint", Others]


class Blueprint:
    """The records of a state, and where in memory and in the stream its bytes are."""

    def __init__(self, order: Order, flat: Flat, pieces: Pieces, some: Others) -> None:
        self.order = order
        self.tree = flat.tree
        self.pieces = pieces
        self.facts = some.facts
        # Host memory of the last stream, and what it had besides pieces. Replaced as one: threads
        # may share a blueprint.
        self._last: tuple[list[tuple[int, int, int]], Runs] | None = None
        self._arrange(some)
        self._describe(some, self._records(some))

    @classmethod
    def draw(cls, order: Order, flat: Flat, versions: list[int]) -> Drawn:
        """Plan a state from the beginning. `versions` is given what autograd counts of its pieces,
        where it is known without asking again."""
        pieces, some = taken_apart(flat, versions)
        return cls(order, flat, pieces, some), some

    def again(self, order: Order, flat: Flat, versions: list[int]) -> Drawn | None:
        """This blueprint for a state that differs in plain values at most, and what it consists of
        besides its pieces. None where there may be another difference.

        The same object if no value differs either. `versions`: as `Plains.hold` takes it.
        """
        if order != self.order:
            return None
        some = others(flat, self.pieces.plains)
        if some.facts != self.facts or not self.pieces.hold(flat.leaves, some.images, versions):
            return None
        records = self._records(some)
        if _encode(records) == _encode(self._other_records):
            return self, some
        other = copy.copy(self)
        other._describe(some, records)
        return other, some

    def _arrange(self, some: Others) -> None:
        """Where each image stands in the stream, and how that is cut."""
        _, receivers, chunk_bytes = self.order
        firsts, sizes = self.pieces.firsts, self.pieces.sizes
        if some.facts:
            firsts = np.append(firsts, np.array([fact[0] for fact in some.facts], np.intp))
            sizes = np.append(sizes, np.array([fact[1] for fact in some.facts], np.uint64))
        used = np.argsort(firsts, kind="stable")
        order = used[plan.stream_order(sizes[used])]
        # Of each image, those of pieces first, its place in the stream.
        self.places: Indices = np.empty(len(order), np.intp)
        self.places[order] = np.arange(len(order))
        sizes = sizes[order]
        self.storages = self._on_devices(sizes, some)
        size = chunk_bytes or plan.chunk_size(
            plan.stream_bytes(sizes), receivers, on_device=self.storages.numbers is not None
        )
        self.chunks = plan.Chunks(sizes, plan.cut(sizes, size))

    def _on_devices(self, sizes: Column, some: Others) -> Storages:
        devices, on = ["cpu"], np.zeros(len(sizes), np.int64)

        def number(device: str) -> int:
            if device not in devices:
                devices.append(device)
            return devices.index(device)

        plains = self.pieces.plains
        if not plains.on_host.all():
            sorts = np.array([number(sort.device) for sort in plains.sorts], np.int64)
            on[self.places[self.pieces.image]] = sorts[plains.sort_of_each]
        for place, (_, _, device) in zip(self.others_at, some.facts, strict=True):
            on[place] = number(device)
        return Storages(sizes.astype(np.int64), devices, on if on.any() else None)

    @property
    def others_at(self) -> list[int]:
        """The places of images that are not made up of pieces."""
        places: list[int] = self.places[len(self.pieces.sizes) :].tolist()
        return places

    def _describe(self, some: Others, records: list[m.Leaf]) -> None:
        self._other_records = records
        self._encoded: bytes | None = None
        self.leaves = Leaves.of(self._table, dict(zip(some.leaves, records, strict=True)))

    @cached_property
    def _table(self) -> Table:
        """The pieces, as leaves."""
        plains = self.pieces.plains
        return Table(
            plains.leaf_of_each,
            [Kind(sort.dtype, sort.shape, None, sort.flags) for sort in plains.sorts],
            plains.sort_of_each,
            self.places[self.pieces.image],
            self.pieces.at.astype(np.int64),
        )

    def _records(self, some: Others) -> list[m.Leaf]:
        places = self.others_at

        def part(ticket: int) -> m.TensorLeaf:
            return some.images.leaf(ticket, places)

        return [finished(item, part) for item in some.described]

    def manifest(self, step: int | None) -> m.Manifest:
        return manifest_of(step, self.tree, self.leaves, self.storages, self.chunks.sizes)

    def encoded(self, step: int | None) -> bytes:
        """The manifest in columns (`compact.encode`), remembered."""
        if self._encoded is None:
            self._encoded = compact.encode(self.manifest(None), self.order[0])
        return codec.with_step(self._encoded, step)

    def stream(self, some: Others, plain: Sequence[Any]) -> Stream:
        """The bytes, as they lie in memory now. `plain` are the tensors of the pieces."""
        runs: list[tuple[int, int, int]] = []
        regions: list[tuple[int, Region]] = []  # not in host memory, or not in one run
        for place, image in sorted(
            zip(self.others_at, some.images.resolved, strict=True), key=_first
        ):
            start = self.chunks.starts[place]
            if image.address:
                runs.append((start, image.address, image.nbytes))
                continue
            for at, region in image.placed:
                if region.address:
                    runs.append((start + at, region.address, region.nbytes))
                else:
                    regions.append((start + at, region))
        last = self._last
        if last is not None and last[0] == runs:
            host = last[1]
        else:
            host = self._host(runs)
            self._last = runs, host
        far = _Lazily(self._far, plain)
        return Stream(host, regions, self.chunks.stream_bytes, self._device, far)

    @cached_property
    def _starts(self) -> Column:
        """Where in the stream each piece stands."""
        return self.chunks.places[self.places[self.pieces.image]] + self.pieces.at

    @cached_property
    def _far(self) -> list[tuple[int, int]]:
        """Where pieces on devices stand in the stream, in that order, and which they are."""
        rows = np.flatnonzero(~self.pieces.plains.on_host)
        rows = rows[np.argsort(self._starts[rows])]
        return list(zip(self._starts[rows].tolist(), rows.tolist(), strict=True))

    @cached_property
    def _device(self) -> Runs:
        """Pieces on devices, by address."""
        there = ~self.pieces.plains.on_host
        columns = (self._starts, self.pieces.plains.places, self.pieces.nbytes)
        return Runs.unordered(*(column[there] for column in columns))

    def _host(self, runs: list[tuple[int, int, int]]) -> Runs:
        here = self.pieces.plains.on_host
        columns: list[Column] = [
            self._starts[here],
            self.pieces.plains.places[here],
            self.pieces.nbytes[here],
        ]
        if runs:
            more = np.array(runs, np.uint64).T
            columns = [np.concatenate(pair) for pair in zip(columns, more, strict=True)]
        order = np.argsort(columns[0])
        return Runs(*(column[order] for column in columns))

    @cached_property
    def large(self) -> dict[int, int]:
        """By place, the one piece of each large image that has one."""
        pieces = self.pieces
        whole = pieces.nbytes == pieces.sizes[pieces.image]
        alone = np.flatnonzero(whole & (pieces.nbytes >= plan.MIB))
        places = self.places[pieces.image[alone]]
        return dict(zip(places.tolist(), alone.tolist(), strict=True))


class _Lazily(Sequence[tuple[int, torch.Tensor]]):
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
