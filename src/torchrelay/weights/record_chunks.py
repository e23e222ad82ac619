"""Which chunks of a record packed volumes have whole, and the bytes of one. Pure.

A digest of the record covers a chunk of a volume, so it can only be compared where all bytes of the
chunk are here. A few bytes more complete chunks that are nearly whole: the head of a file, and the
ends of tensors that are not wanted.

    chunk     0         1         2         3
    wanted    ..########+#########+.#.#.#.#.+########..
    read      ##########+#########+.#.#.#.#.+##########

Chunks 0, 1 and 3 are compared with the record. Chunk 2 has rows of a tensor that is cut by columns:
to complete it would double what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from torchrelay.parts.runs import Bytes, PartBox, PartRuns, StridedRun, runs_of
from torchrelay.record.schema import Record

MORE = 64  # wanted bytes for each byte that is read to complete chunks
LACKS = 4  # of a chunk at most this part is read to complete it


class VolumeLayout(NamedTuple):
    """How a volume is cut into chunks. `head`: the bytes before its first tensor."""

    nbytes: int
    chunk_bytes: int
    head: int

    def span(self, chunk: int) -> tuple[int, int]:
        """The bytes of the volume that are a chunk."""
        start = chunk * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.nbytes)


def layouts_of(record: Record) -> dict[str, VolumeLayout]:
    """The layout of each volume of a step, by name."""
    heads = np.array([file.nbytes for file in record.volumes], np.int64)
    np.minimum.at(heads, record.box_volumes, record.box_starts)
    return {
        file.name: VolumeLayout(file.nbytes, file.chunk_bytes, head)
        for file, head in zip(record.volumes, heads.tolist(), strict=True)
    }


class RecordChunks:
    """The chunks of a volume that runs of it touch: those that are `whole`, and the others."""

    def __init__(self, runs: PartRuns, layout: VolumeLayout) -> None:
        self._runs, self._layout = runs, layout
        self.whole: list[int] = []
        self.partial: list[int] = []
        for chunk in _touched(runs, layout):
            lacks = _lacking(runs, *layout.span(chunk), most=0)
            (self.partial if lacks is None or len(lacks) else self.whole).append(chunk)

    def runs(self, chunk: int) -> list[StridedRun]:
        """The parts of runs that lie in a chunk."""
        return list(self._runs.volume_between(*self._layout.span(chunk)))

    def content(self, chunk: int, packed: Bytes) -> Bytes | None:
        """The bytes of a whole chunk; None where two runs have other bytes for one place."""
        start, stop = self._layout.span(chunk)
        runs = self.runs(chunk)
        if len(runs) == 1 and runs[0].rows == 1:
            return runs[0].of_packed(packed)
        found = np.empty(stop - start, np.uint8)
        for run in runs:
            run.of_volume(found, start)[...] = run.of_packed(packed)
        if sum(run.nbytes * run.rows for run in runs) > len(found) and not all(
            np.array_equal(run.of_volume(found, start), run.of_packed(packed)) for run in runs
        ):
            return None
        return found


def completing_runs(runs: PartRuns, boxes: Sequence[PartBox], layout: VolumeLayout) -> PartRuns:
    """The runs of boxes, and of what completes chunks that are nearly whole."""
    left = runs.total // MORE
    found: list[tuple[int, list[tuple[int, int]]]] = []
    head = layout.head
    for chunk in _touched(runs, layout):
        start, stop = layout.span(chunk)
        in_head = max(0, min(head, stop) - start)
        most = max((stop - start - in_head) // LACKS, 0)
        lacks = _lacking(runs, start, stop, most=in_head + most)
        if lacks:
            price = sum(high - max(low, head) for low, high in lacks if high > head)
            found.append((price, lacks))
    more: list[PartBox] = []
    for price, lacks in sorted(found):
        left -= price
        if left < 0 and price:
            break
        more += [(low, 1, (high - low,), (0,), (high - low,)) for low, high in lacks]
    return runs_of([*boxes, *more], layout.nbytes) if more else runs


def _touched(runs: PartRuns, layout: VolumeLayout) -> Iterable[int]:
    """The chunks from the first that a run reaches to the last."""
    size = layout.chunk_bytes
    if not len(runs) or size < 1:
        return range(0)
    # Chunks between runs are left out, also where a record has very many of them.
    ends = np.maximum(runs.ends - 1, runs.starts)
    spans = sorted(zip((runs.starts // size).tolist(), (ends // size).tolist(), strict=True))
    found: list[int] = []
    for first, last in spans:
        found.extend(range(max(first, found[-1] + 1 if found else 0), last + 1))
    return found


def _lacking(runs: PartRuns, start: int, stop: int, *, most: int) -> list[tuple[int, int]] | None:
    """The ranges of a chunk that no run has; None where those are more than `most` bytes, or all of
    it."""
    some = list(runs.volume_between(start, stop))
    have = sum(run.nbytes * run.rows for run in some)
    if not have or stop - start - have > most:
        return None
    if len(some) == 1 and have == stop - start:
        return []
    mask = np.zeros(stop - start + 2, np.uint8)  # a byte on each side of the chunk counts as there
    mask[0] = mask[-1] = 1
    for run in some:
        run.of_volume(mask[1:-1], start)[...] = 1
    edges = np.flatnonzero(np.diff(mask)) + start
    lacks = [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]
    return lacks if sum(high - low for low, high in lacks) <= most else None
