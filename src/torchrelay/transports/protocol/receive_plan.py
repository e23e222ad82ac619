"""The reads of a receive, by holder, and the memory that they fill. Pure: records in, pieces out.

`recv(0)` takes all of what one rank offers, as it lies there: its reads are the record's own
stream. `recv([0, 1])` puts the boxes of several ranks together: what is read of each is a stream of
its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from torchrelay.describing.pieces import HOST, Pieces
from torchrelay.describing.region import copy_boxes
from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Box, Numbers
from torchrelay.geometry.chunks import MAX_CHUNK_BYTES, chunk_size, stream_bytes
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.landing.commit.landing import Landed, Landing
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.read_target import ReadTarget
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.planning.box_catalog import BoxCatalog
from torchrelay.planning.holder_reads import GatherReads, RankReads
from torchrelay.planning.reads import SCATTERED, ReadTable
from torchrelay.planning.union import Union
from torchrelay.record.dtypes import itemsize
from torchrelay.record.rank_reads import Reads
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import cut


class ScatteredBox(NamedTuple):
    """Elements that do not lie together in their image: they come to byte `at` of a buffer, and are
    copied to a box of the image at the end."""

    image: int
    box: Box
    at: int


@dataclass(frozen=True)
class HolderReads:
    """The reads of one holder, and the `target` that they fill. `request` has the reads as
    the holder receives them; None: all of its state, as it lies there."""

    rank: int
    target: ReadTarget
    request: Reads | None = None
    reads: RankReads | None = None
    buffer: torch.Tensor | None = None
    scattered: tuple[ScatteredBox, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.target.chunks.nbytes

    def put_boxes(self, landing: Landing) -> None:
        """Copy scattered elements to their images."""
        if self.buffer is None:
            return
        storage, pairs = self.buffer.untyped_storage(), []
        for image, box, at in self.scattered:
            kind = landing.record.kind_of_image(image)
            to = cut(landing.memory.elements(image, kind), *box)
            source = t.raw(storage, at, itemsize(kind.dtype), box[1], contiguous_strides(box[1]))
            pairs.append((t.raw_of(to), source))
        copy_boxes(pairs)


def _reads_of(
    rank: int,
    record: Record,
    reads: RankReads,
    landing: Landing,
    workspace: Workspace,
    chunk_bytes: int,
) -> HolderReads:
    """The reads of a rank, each with the piece of staged memory that it fills."""
    request = reads.request(chunk_bytes)
    chunks = request.layout(record)
    filling, memory = reads.filling, landing.memory
    scattered = filling.at == SCATTERED
    addresses = memory.address[filling.share] + np.maximum(filling.at, 0).astype(np.uint64)
    devices, keep = memory.device[filling.share], memory.keep[filling.share]
    padded = chunks.padded[scattered]
    buffer, at = workspace.stage(int(padded.sum())), np.cumsum(padded) - padded
    addresses[scattered] = np.uint64(buffer.data_ptr()) + at
    devices[scattered], keep[scattered] = HOST, len(memory.memory)
    pieces = Pieces(
        at=chunks.places,
        address=addresses,
        nbytes=filling.nbytes.astype(np.uint64),
        device=devices,
        image=filling.share,
        keep=keep,
        memory=[*memory.memory, buffer],
    )
    columns = (column[scattered].tolist() for column in (filling.share, filling.cut))
    boxes = [
        ScatteredBox(image, filling.cuts[number].to, begin)
        for image, number, begin in zip(*columns, at.tolist(), strict=True)
    ]
    target = landing.target(chunks, pieces)
    return HolderReads(rank, target, request, reads, buffer, tuple(boxes))


class ReceivePlan:
    """The plan of a receive from ranks that have offered these `records`. `reads` are fetched from
    their holders; all of them go to one landing.

    With `reshard`, values and plain tensors are those of the first rank that has them. Distributed
    tensors are put together of the boxes that ranks have, each taken from one of them. The state is
    always staged, and new tensors go to the host by default. Without it there is one rank, whose
    state is taken as it is.

    `MismatchError` where the ranks do not have all of a tensor, do not agree on what it is, or the
    destination does not fit. Targets may be filled at the same time, on several threads; `without`,
    `make` and `commit` come after.
    """

    @gc_paused()
    def __init__(
        self,
        records: Mapping[int, Record],
        into: object = None,
        options: LandingOptions | None = None,
        workspace: Workspace | None = None,
        *,
        reshard: bool = True,
        chunk_bytes: int | None = None,
    ) -> None:
        self._records, self._into, self._chunk_bytes = records, into, chunk_bytes
        self._workspace, self._options = workspace or Workspace(), options or LandingOptions()
        self._union: Union | None = None
        self._lost: set[int] = set()
        self._all: list[HolderReads] = []
        if reshard:
            device = self._options.device or torch.device("cpu")
            self._options = replace(self._options, device=device, atomic=True, unstaged=False)
            self._union = Union(records)
            catalog = BoxCatalog(self._union.rows)
            self.landing = land(catalog, into, self._options, self._workspace)
            # Images that the landing has no use for are not read.
            self.reads = self._share_out(self._union, np.flatnonzero(self.landing.memory.marks))
        else:
            ((rank, record),) = records.items()
            self.landing = land(record, into, self._options, self._workspace)
            self.reads = {rank: HolderReads(rank, self.landing.target())}
        self._all += self.reads.values()

    def reads_of(self, rank: int) -> HolderReads:
        """The reads of a rank; none if it has nothing that is wanted."""
        if rank in self.reads:
            return self.reads[rank]
        return self._reads_of(rank, RankReads(np.zeros(0, np.int64), ReadTable().reads()))

    def _reads_of(self, rank: int, reads: RankReads) -> HolderReads:
        size = self._chunk_bytes or chunk_size(stream_bytes(reads.filling.nbytes), 1)
        how = (self.landing, self._workspace, min(size, MAX_CHUNK_BYTES))
        return _reads_of(rank, self._records[rank], reads, *how)

    def _share_out(self, union: Union, only: Numbers) -> dict[int, HolderReads]:
        """The reads that fill images of the share, `only` these, by rank: each box from one of
        those that have it, but for what others give already."""
        ranks = union.joined.ranks
        lost = [ranks.index(rank) for rank in self._lost]
        known = {one for each in self._all if each.reads for one in each.reads.read()}
        found = {}
        for place, reads in GatherReads(union, self.landing.share, only, lost).by_rank.items():
            if known:
                rows = [n for n, one in enumerate(reads.read()) if one not in known]
                reads = reads.some(np.array(rows, np.int64))
            if len(reads.images):
                found[ranks[place]] = self._reads_of(ranks[place], reads)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are fetched in all."""
        return sum(one.nbytes for one in self._all)

    def without(self, ranks: Iterable[int]) -> ReceivePlan:
        """The plan after some ranks were lost: its `reads` replace theirs, and come from the
        others. Bytes from a lost rank do not count. Reads of the others stay as they were,
        unless values or plain tensors were those of a lost rank: then the state is planned again
        from the ranks that are left.

        `MismatchError` where they do not have all of it.
        """
        lost = {rank for rank in ranks if rank in self._records}
        left = {rank: one for rank, one in self._records.items() if rank not in lost}
        if not left or self._union is None:
            raise MismatchError("no rank is left that has the state")
        if lost & self._union.joined.first_ranks:
            how = (self._into, self._options, self._workspace)
            return ReceivePlan(left, *how, chunk_bytes=self._chunk_bytes)
        gone = [one.reads for one in self._all if one.rank in lost and one.reads is not None]
        self._all = [one for one in self._all if one.rank not in lost]
        self._records, self._lost = left, self._lost | lost
        shares = [reads.filling.share for reads in gone]
        only = np.unique(np.concatenate(shares)) if shares else np.zeros(0, np.int64)
        self.reads = self._share_out(self._union, only)
        self._all += self.reads.values()
        return self

    def make(self) -> None:
        """All bytes are here and hold: work everything out that can fail. Nothing of the caller's
        has changed by then."""
        for one in self._all:
            one.put_boxes(self.landing)
        self.landing.check_equal(
            lambda one: "tied to another tensor here, and another value is offered for it"
        )
        self.landing.make()

    def commit(self) -> Landed:
        """After `make`: the state."""
        return self.landing.end()
