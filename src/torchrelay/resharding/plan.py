"""A state put together of what several ranks have: one landing, and the parts that fill it.

`GatherPlan` works everything out that depends on the records and the destination. Each part is a
stream of its own: a transport asks its rank for `asked`, and writes what comes to the part as to
any landing. When all parts have arrived and hold, `commit` makes them the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch

from torchrelay.errors import MismatchError
from torchrelay.geometry.boxes import Numbers
from torchrelay.geometry.chunks import MAX_CHUNK_BYTES, chunk_size, stream_bytes
from torchrelay.geometry.strides import contiguous_strides
from torchrelay.landing.commit.landing import Landed, Landing
from torchrelay.landing.land import land
from torchrelay.landing.options import LandingOptions
from torchrelay.landing.workspace import Workspace
from torchrelay.pause import gc_paused
from torchrelay.plan.pieces import HOST, Pieces
from torchrelay.plan.region import copy_boxes
from torchrelay.planning.box_catalog import BoxCatalog
from torchrelay.planning.holder_reads import GatherReads, RankReads
from torchrelay.planning.reads import SCATTERED, ReadTable
from torchrelay.planning.union import Union
from torchrelay.record.dtypes import itemsize
from torchrelay.record.rank_reads import Reads
from torchrelay.record.schema import Record
from torchrelay.state import tensors as t
from torchrelay.state.local_parts import cut


class GatherPlan:
    """The reads of ranks, whose `records` these are, and where they go. `parts` are fetched from
    their ranks, by rank; all of them go to one landing.

    Values and plain tensors are those of the first rank that has them. Distributed tensors are put
    together of the boxes that ranks have, each taken from one of them. `into` and `options` are as
    for `land`, but that the state is always staged, and new tensors go to the host by default.
    `MismatchError` where the ranks do not have all of a tensor, do not agree on what it is, or the
    destination does not fit.

    Parts may be filled at the same time, on several threads; `without` and `commit` come after.
    """

    @gc_paused()
    def __init__(
        self,
        records: Mapping[int, Record],
        into: object = None,
        options: LandingOptions | None = None,
        workspace: Workspace | None = None,
        *,
        chunk_bytes: int | None = None,
    ) -> None:
        options = options or LandingOptions()
        device = options.device or torch.device("cpu")
        self._options = replace(options, device=device, atomic=True, unstaged=False)
        self._records, self._into = records, into
        self._workspace, self._chunk_bytes = workspace or Workspace(), chunk_bytes
        self._union = Union(records)
        self._landing = land(BoxCatalog(self._union.rows), into, self._options, self._workspace)
        self._lost: set[int] = set()
        self._all: list[PartReads] = []
        self.parts = self._asked()

    def part_of(self, rank: int) -> PartReads:
        """The part of a rank; an empty one if nothing is read of it."""
        no: Numbers = np.zeros(0, np.int64)
        return self.parts.get(rank) or self._part(rank, RankReads(no, ReadTable().reads()))

    def _part(self, rank: int, reads: RankReads) -> PartReads:
        size = self._chunk_bytes or chunk_size(stream_bytes(reads.filling.nbytes), 1)
        size = min(size, MAX_CHUNK_BYTES)
        return PartReads(rank, self._records[rank], reads, self._landing, self._workspace, size)

    def _asked(self, only: Numbers | None = None) -> dict[int, PartReads]:
        ranks = self._union.joined.ranks
        lost = [ranks.index(rank) for rank in self._lost]
        if only is None:  # images that the landing has no use for are not read
            only = np.flatnonzero(self._landing.memory.marks)
        found = GatherReads(self._union, self._landing.share, only, lost)
        known = {one for part in self._all for one in part.reads.filled()} if self._lost else set()
        parts = {}
        for place, reads in found.by_rank.items():
            if known:  # what other ranks give already is not asked for again
                rows = [n for n, one in enumerate(reads.filled()) if one not in known]
                reads = reads.some(np.array(rows, np.int64))
            if len(reads.images):
                parts[ranks[place]] = self._part(ranks[place], reads)
        self._all += parts.values()
        return parts

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that are fetched in all."""
        return sum(part.chunks.nbytes for part in self._all)

    @property
    def touched(self) -> bool:
        """Whether anything of the caller's has been written to."""
        return self._landing.touched

    def without(self, ranks: Iterable[int]) -> GatherPlan:
        """The plan after some ranks were lost: its `parts` replace theirs, and come from the
        others. Bytes from a lost rank do not count. Parts of the others stay as they were,
        unless values or plain tensors were those of a lost rank: then the state is planned again
        from the ranks that are left.

        `MismatchError` where they do not have all of it.
        """
        lost = {rank for rank in ranks if rank in self._records}
        left = {rank: one for rank, one in self._records.items() if rank not in lost}
        if not left:
            raise MismatchError("no rank is left that has the state")
        joined = self._union.joined
        homes = {joined.ranks[home.members[0]] for home in joined.homes}
        if lost & homes:
            how = (self._into, self._options, self._workspace)
            return GatherPlan(left, *how, chunk_bytes=self._chunk_bytes)
        gone = [part for part in self._all if part.rank in lost]
        self._all = [part for part in self._all if part.rank not in lost]
        self._records, self._lost = left, self._lost | lost
        shares = [part.reads.filling.share for part in gone]
        only = np.unique(np.concatenate(shares)) if shares else np.zeros(0, np.int64)
        self.parts = self._asked(only)
        return self

    def commit(self) -> Landed:
        """All parts have arrived and hold: make them the state."""
        for part in self._all:
            part.put_boxes()
        self._landing.check_equal(
            lambda one: "tied to another tensor here, and another value is offered for it"
        )
        return self._landing.commit()


class PartReads:
    """The reads of one rank, and the `target` that they fill.

    The rank is asked for `asked`; the chunks are those of the reads' own stream.
    """

    def __init__(
        self,
        rank: int,
        record: Record,
        reads: RankReads,
        landing: Landing,
        workspace: Workspace,
        chunk_bytes: int,
    ) -> None:
        self.rank, self.reads, self._landing = rank, reads, landing
        self.asked: Reads = reads.asked(chunk_bytes)
        self.chunks = chunks = self.asked.layout(record)
        filling, memory = reads.filling, landing.memory
        scattered = filling.at == SCATTERED
        addresses = memory.address[filling.share] + np.maximum(filling.at, 0).astype(np.uint64)
        devices, keep = memory.device[filling.share], memory.keep[filling.share]
        # Elements that do not lie together where they go wait in memory of their own.
        padded = chunks.padded[scattered]
        self._waiting = workspace.stage(int(padded.sum()))
        self._waits_at = np.cumsum(padded) - padded
        addresses[scattered] = np.uint64(self._waiting.data_ptr()) + self._waits_at
        devices[scattered], keep[scattered] = HOST, len(memory.memory)
        pieces = Pieces(
            at=chunks.places,
            address=addresses,
            nbytes=filling.nbytes.astype(np.uint64),
            device=devices,
            image=filling.share,
            keep=keep,
            memory=[*memory.memory, self._waiting],
        )
        self.target = landing.target(chunks, pieces)

    def put_boxes(self) -> None:
        """Put the elements that waited in their places."""
        filling, pairs = self.reads.filling, []
        waiting = np.flatnonzero(filling.at == SCATTERED)
        for read, at in zip(waiting.tolist(), self._waits_at.tolist(), strict=True):
            image, (_, _, to) = int(filling.share[read]), filling.cuts[int(filling.cut[read])]
            kind = self._landing.record.kind_of_image(image)
            place = cut(self._landing.memory.elements(image, kind), *to)
            storage, size = self._waiting.untyped_storage(), itemsize(kind.dtype)
            source = t.raw(storage, at, size, to[1], contiguous_strides(to[1]))
            pairs.append((t.raw_of(place), source))
        copy_boxes(pairs)
